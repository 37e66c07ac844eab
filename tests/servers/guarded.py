"""Programs of a test server, run by a guard that ends them with this process, however this process ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

from . import guard
from .installation import Account

LOCK = "lock"
PATIENCE = 30.0


class GuardLost(Exception):
    """The guard was killed, and with it the server."""


class Guarded:
    """A folder and the programs that run in it, one at a time. Both are removed with the guard."""

    def __init__(self, folder: Path, account: Account, repair: list[str]) -> None:
        given = {"folder": str(folder), "account": account.ids, "repair": [*account.prefix, *repair]}
        self._prefix = account.prefix
        self._answers = b""
        self._released = False
        with (folder / "new").open("w") as lock:
            # Held by the guard while it lives: see `sweep`.
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[lock.fileno()],
                # A Ctrl-C in the terminal is for the tests; the end of their process is what ends the server.
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._orders, self._news = self._guard.stdin.fileno(), self._guard.stdout.fileno()

    def start(self, command: list[str], source: Path | None = None) -> int:
        """Start a program that reads from `source`. Returns its process id."""
        order = {"command": [*self._prefix, *command], "input": str(source) if source else None}
        os.write(self._orders, json.dumps(order).encode() + b"\n")
        said = self._answer(within=PATIENCE)
        assert said is not None, "the guard says nothing"
        assert said[0] == "started", said
        return said[1]

    def ended(self, within: float) -> int | None:
        """The exit code of the program once it has ended; None if it still runs after `within` seconds."""
        said = self._answer(within)
        if said is None:
            return None
        assert said[0] == "ended", said
        return said[1]

    def release(self) -> None:
        """Have the guard end everything, without waiting for that."""
        if not self._released:
            self._released = True
            with contextlib.suppress(BrokenPipeError):
                os.write(self._orders, b"\n")

    def close(self) -> None:
        """End everything."""
        self.release()
        if self._guard.returncode is None:
            self._guard.communicate()

    def _answer(self, within: float) -> tuple[str, int] | None:
        end = time.monotonic() + within
        while b"\n" not in self._answers:
            ready, _, _ = select.select([self._news], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self._news, 4096)
            if not chunk:
                raise GuardLost("the guard of the server has ended")
            self._answers += chunk
        line, self._answers = self._answers.split(b"\n", 1)
        word, number = line.decode().split()
        return word, int(number)


def sweep(folders: list[Path]) -> None:
    """Remove folders whose guard was killed: a live guard holds the lock of its folder."""
    for folder in folders:
        with contextlib.suppress(OSError), (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
