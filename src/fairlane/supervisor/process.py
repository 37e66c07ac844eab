"""One child process, in a process group of its own; its end is detected at once.

Because of its own group, Ctrl-C in the terminal does not kill a child that its parent wants to stop gracefully, and the
parent can kill the child together with every process that the child has started.
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
    """A child process. Belongs to the event loop in which it was started."""

    def __init__(self, command: Sequence[str], *, fds: Sequence[int] = (), environ: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, pass_fds=tuple(fds), env=dict(environ), process_group=0
        )
        self.pid = self._popen.pid
        self.code: int | None = None
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        # A waiting thread works on every platform, and detects the end as quickly as any other way.
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
        """Kill it with every process of its group, including those it left behind when it ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # It may have left its group.
        self.signal(signal.SIGKILL)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._popen.wait()
        # The loop is closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._note, code)

    def _note(self, code: int) -> None:
        self.code = code
        self._ended.set()


def in_words(code: int) -> str:
    """How a process ended, for messages: "exited with code 3", "was ended by SIGSEGV"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
