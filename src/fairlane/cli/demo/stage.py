"""The stage of the demo: a store in a temporary directory, and real worker processes on it.

Leases are shortened, so that a death is noticed while somebody watches. Whatever happens, no process and no file stays
behind: a worker that is left alone because the demo itself was killed ends as well.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import click

from ...model.session import Session, SessionKind, SessionState
from ...supervisor.crash_state import CrashState
from ...supervisor.parent_pipe import CRASH_STATE_FD, PARENT_PIPE_FD
from .scene import app

SLOTS = 4
"""Of each worker; one of them is kept for urgent work."""
SHORT_INTERVALS = {
    "HEARTBEAT": 0.4,
    "LEASE": 2.0,
    "TRUST_MARGIN": 0.5,
    "RESCUE": 0.25,
    "CAUTION": 1.0,
    "LEADER_LEASE": 2.0,
    "LEADER_RENEW": 0.5,
    "STAND": 0.3,
    "PROMOTE": 0.3,
}
START_SECONDS = 30.0
STOP_SECONDS = 5.0


class Stage:
    """Starts, kills and clears away workers."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fairlane-demo-"))
        self.url = f"sqlite:///{self.directory / 'demo.db'}"
        self._processes: list[subprocess.Popen[bytes]] = []
        # Held open by this process alone: when it ends, however that happens, its workers learn it and end too.
        self._theirs, self._tether = os.pipe()
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FAIRLANE_")},
            **{f"FAIRLANE_{name}": str(value) for name, value in SHORT_INTERVALS.items()},
            "FAIRLANE_URL": self.url,
        }

    def start_worker(self) -> None:
        """Start one more worker; it is there when the store knows it."""
        command = [sys.executable, "-m", "fairlane", "worker", "-A", "fairlane.cli.demo.scene:app"]
        command += ["--slots", str(SLOTS), "--grace", "1", "--index", "auto", "--log-level", "warning"]
        marks = CrashState.make()
        told = {CRASH_STATE_FD: str(marks.fd), PARENT_PIPE_FD: str(self._theirs)}
        with (self.directory / "workers.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self._environ | told,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(marks.fd, self._theirs),
                # A group of its own, so that Ctrl-C reaches the demo alone, which then ends them in good order.
                process_group=0,
            )
        marks.close()
        self._processes.append(process)

    async def workers(self) -> list[Session]:
        """The workers that the store believes to be there, by index."""
        present = [
            session
            for session in await app.client.sessions()
            if session.kind is SessionKind.WORKER and session.state in (SessionState.LIVE, SessionState.STOPPING)
        ]
        return sorted(present, key=lambda session: session.index or 0)

    async def wait_for_workers(self, count: int) -> None:
        """Until that many are there; when they cannot start, their last words are told."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while len(await self.workers()) < count:
                    self._check_alive()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise click.ClickException(f"the workers did not start in time.\n{self._last_words()}") from None

    def kill(self, pid: int) -> None:
        """End a worker as a power cut would."""
        for process in self._processes:
            if process.pid == pid:
                process.send_signal(signal.SIGKILL)
                process.wait()
                self._processes.remove(process)
                return

    async def clear(self) -> None:
        """End every process and remove every file."""
        await app.close()
        for process in self._processes:
            process.terminate()
        await asyncio.to_thread(self._wait)
        os.close(self._theirs)
        os.close(self._tether)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wait(self) -> None:
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise click.ClickException(f"a worker of the demo has ended.\n{self._last_words()}")

    def _last_words(self) -> str:
        log = (self.directory / "workers.log").read_text(errors="replace")
        return "\n".join(log.splitlines()[-10:])
