"""The fleet of the demo: a store in a temporary directory, and real worker processes on it.

Leases are short, so that a dead worker is noticed within seconds. No process and no file is left behind: if the demo
itself is killed, its workers stop too.
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
from .application import app

SLOTS = 4
"""Slots of each worker. One of them is reserved for high-priority jobs."""
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


class Fleet:
    """Starts, kills and stops workers, and removes their store."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fairlane-demo-"))
        self.url = f"sqlite:///{self.directory / 'demo.db'}"
        self._processes: list[subprocess.Popen[bytes]] = []
        # Only this process holds the write end: when it exits for any reason, its workers read end-of-file and stop.
        self._read_end, self._write_end = os.pipe()
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FAIRLANE_")},
            **{f"FAIRLANE_{name}": str(value) for name, value in SHORT_INTERVALS.items()},
            "FAIRLANE_URL": self.url,
        }

    def start_worker(self) -> None:
        """Start one more worker. It is ready once it has registered with the store."""
        command = [sys.executable, "-m", "fairlane", "worker", "-A", "fairlane.cli.demo.application:app"]
        command += ["--slots", str(SLOTS), "--grace", "1", "--index", "auto", "--log-level", "warning"]
        crash_state = CrashState.make()
        inherited = {CRASH_STATE_FD: str(crash_state.fd), PARENT_PIPE_FD: str(self._read_end)}
        with (self.directory / "workers.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self._environ | inherited,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(crash_state.fd, self._read_end),
                # A process group of its own, so that Ctrl-C reaches only the demo, which then stops its workers.
                process_group=0,
            )
        crash_state.close()
        self._processes.append(process)

    async def workers(self) -> list[Session]:
        """The workers whose sessions are live or stopping, by index."""
        present = [
            session
            for session in await app.client.sessions()
            if session.kind is SessionKind.WORKER and session.state in (SessionState.LIVE, SessionState.STOPPING)
        ]
        return sorted(present, key=lambda session: session.index or 0)

    async def wait_for_workers(self, count: int) -> None:
        """Wait until `count` workers are registered. If one cannot start, the error shows the end of its log."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while len(await self.workers()) < count:
                    self._check_alive()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise click.ClickException(f"the workers did not start in time.\n{self._log_tail()}") from None

    def kill(self, pid: int) -> None:
        """Kill a worker with SIGKILL."""
        for process in self._processes:
            if process.pid == pid:
                process.send_signal(signal.SIGKILL)
                process.wait()
                self._processes.remove(process)
                return

    async def clear(self) -> None:
        """Stop every worker and remove the directory."""
        await app.close()
        for process in self._processes:
            process.terminate()
        await asyncio.to_thread(self._wait)
        os.close(self._read_end)
        os.close(self._write_end)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wait(self) -> None:
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()

    def _check_alive(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise click.ClickException(f"a worker of the demo exited.\n{self._log_tail()}")

    def _log_tail(self) -> str:
        log = (self.directory / "workers.log").read_text(errors="replace")
        return "\n".join(log.splitlines()[-10:])
