"""One child process: started without a fork of ours, in a process group of its own, its end noticed at once.

A group of its own keeps a Ctrl-C in the terminal from reaping work that its parent wants to end in good order, and lets
the parent end whatever the child has started in turn.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress


class Process:
    """A running program. Belongs to the event loop it was started in."""

    def __init__(self, command: Sequence[str], *, fds: Sequence[int] = (), environ: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, pass_fds=tuple(fds), env=dict(environ), process_group=0
        )
        self.pid = self._popen.pid
        self.code: int | None = None
        """How it ended: its exit code, or the negative number of a signal; None while it runs."""
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        # A thread that waits works wherever there are processes, and is as quick as anything the system offers.
        threading.Thread(target=self._watch, args=(loop,), name=f"fairlane-watch-{self.pid}", daemon=True).start()

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        await self._ended.wait()
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.code is None:
            with suppress(ProcessLookupError):
                self._popen.send_signal(number)

    def kill(self) -> None:
        """End it at once, with all it has started; whatever it left behind when it ended is ended too."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # It may have left its group.
        self.signal(signal.SIGKILL)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._popen.wait()
        # A closed loop: nobody is left to be told.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._note, code)

    def _note(self, code: int) -> None:
        self.code = code
        self._ended.set()


def in_words(code: int) -> str:
    """How a process ended, for people: "exited with code 3", "was ended by SIGSEGV"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
