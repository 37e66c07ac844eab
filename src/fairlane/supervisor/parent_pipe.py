"""The child's side of a supervisor: how a worker process learns that it has one, and that it has lost it.

The other end of the tether is held open by the supervisor alone, and nothing is ever written to it: the system closes
it when the supervisor ends, however that happens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import MutableMapping
from typing import NamedTuple

from ..errors import InvalidInput
from .crash_state import CrashState

MARKS_FD = "FAIRLANE_MARKS_FD"
TETHER_FD = "FAIRLANE_TETHER_FD"
PROCESS_NUMBER = "FAIRLANE_PROCESS_NUMBER"
"""Which of the supervisor's places the process fills, from 0; the one that replaces it has the same number."""


class ParentPipe:
    """Tells when the supervisor is gone."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd

    async def wait(self) -> None:
        """Return when the supervisor is gone. For one waiter at a time."""
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


class Supervised(NamedTuple):
    """What a supervisor gives to a process that it starts."""

    marks: CrashState
    tether: ParentPipe


def supervised(environ: MutableMapping[str, str]) -> Supervised | None:
    """What this process was given, None when nobody supervises it.

    The descriptors are this process's own, so their names are taken out of `environ`: a program started from here must
    not take itself for a child of the supervisor.
    """
    given = [environ.pop(name, None) for name in (MARKS_FD, TETHER_FD)]
    if given == [None, None]:
        return None
    try:
        marks, tether = (int(fd or "") for fd in given)
        return Supervised(CrashState(marks), ParentPipe(tether))
    except (ValueError, OSError):
        names = f"{MARKS_FD} and {TETHER_FD}"
        raise InvalidInput(names, "do not name open descriptors; unset them, only the supervisor sets them") from None
