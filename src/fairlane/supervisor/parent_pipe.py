"""The child's side of a supervisor: how a worker process detects that it has one, and that it has lost it.

The supervisor alone holds the write end of the pipe open, and never writes to it: the system closes it when the
supervisor ends, however that happens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import MutableMapping
from typing import NamedTuple

from ..errors import InvalidInput
from .crash_state import CrashState

CRASH_STATE_FD = "FAIRLANE_CRASH_STATE_FD"
PARENT_PIPE_FD = "FAIRLANE_PARENT_PIPE_FD"
PROCESS_NUMBER = "FAIRLANE_PROCESS_NUMBER"
"""Which of the supervisor's processes this is, from 0. The process that replaces it gets the same number."""


class ParentPipe:
    """The read end of a pipe that is closed when the supervisor ends."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd

    async def wait(self) -> None:
        """Return when the supervisor has ended. Only one call at a time may wait."""
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        """Close the read end."""
        os.close(self._fd)


class Supervised(NamedTuple):
    """What a supervisor shares with a process that it starts."""

    crash_state: CrashState
    parent_pipe: ParentPipe


def supervised(environ: MutableMapping[str, str]) -> Supervised | None:
    """What the supervisor shares with this process, None when there is no supervisor.

    The variables are removed from `environ`: a program that this process starts is not a child of the supervisor.
    """
    given = [environ.pop(name, None) for name in (CRASH_STATE_FD, PARENT_PIPE_FD)]
    if given == [None, None]:
        return None
    try:
        crash_state, parent_pipe = (int(fd or "") for fd in given)
        return Supervised(CrashState(crash_state), ParentPipe(parent_pipe))
    except (ValueError, OSError):
        names = f"{CRASH_STATE_FD} and {PARENT_PIPE_FD}"
        raise InvalidInput(names, "are not open file descriptors; unset them, only the supervisor sets them") from None
