"""Real Celery workers for tests: subprocesses of ``celery worker`` with Valkey as broker and result backend."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 120.0
ROOT = Path(__file__).resolve().parents[3]
DATABASE = 14
"""Of the shared server, for brokers and results: tests of connections count those to other databases."""
SHORT_INTERVALS = {
    "FAIRLANE_HEARTBEAT": "0.4",
    "FAIRLANE_LEASE": "4",
    "FAIRLANE_STAND": "0.2",
    "FAIRLANE_PROMOTE": "0.2",
    "FAIRLANE_POLL": "0.2",
    "FAIRLANE_RESCUE": "0.2",
    "FAIRLANE_CAUTION": "0.5",
    "FAIRLANE_LEADER_LEASE": "3",
    "FAIRLANE_LEADER_RENEW": "0.5",
}


def eventually(look: Callable[[], T], *, within: float = PATIENCE) -> T:
    """Call `look` until it returns a true value, and return that."""
    until = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)
    return found


class CeleryProcess:
    """A ``celery worker``, or another command of Celery, of its own process group, which ends with it."""

    def __init__(self, module: str, log: Path, *options: str, environ: dict[str, str], command: str = "worker") -> None:
        self._log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", module, command, "-l", "INFO", *options],
                cwd=ROOT,
                env=os.environ | SHORT_INTERVALS | environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of its main process."""
        return self.process.pid

    def log(self) -> str:
        """What it has written."""
        return self._log.read_text(errors="replace")

    def ready(self) -> None:
        """Wait until it claims jobs."""

        def claims() -> bool:
            assert self.process.poll() is None, self.log()
            return " is ready: " in self.log()

        eventually(claims)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it, and return its exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end, and return its exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker does not end:\n{self.log()}") from None

    def kill(self) -> None:
        """Kill its main process; its children die with it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Kill whatever is left of it, with its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
