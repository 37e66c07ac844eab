"""How near to what its slots allow a mixed application comes: ``python -m benchmarks mixed``.

Real worker processes run `mixed_app` on each store while another process sends jobs one by one, takes turns, broadcasts
and releases sticky keys. Bodies sleep, so the rate that the slots allow is known, and what is missing of it is time in
which a free slot waited for the store. On PostgreSQL the deadlocks of the database are counted too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from . import postgresql_server, redis_server
from .contest import Options
from .figures import Bound, Figure
from .processes import end_with_parent
from .workload import Run

SLOTS = 6
LEAST = 0.9
"""Of the rate that the slots allow."""
WARM_SECONDS = 2.0
START_SECONDS = 60.0
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one store did with the application."""

    rate: float
    """Jobs completed in a second."""
    allowed: float
    """As many as the slots allow."""
    turns: int
    broadcasts: int

    @property
    def share(self) -> float:
        """How much of what the slots allow."""
        return self.rate / self.allowed


async def run(run: Run, options: Options) -> list[Figure]:
    """Every store, with two and with four processes."""
    seconds = 6.0 if run.quick else 20.0
    rounds = 1 if run.quick else options.rounds
    figures = []
    for kind in ("sqlite", "postgresql", "redis"):
        for processes in (2, 4):
            measured = []
            deadlocks = 0
            for _ in range(rounds):
                async with fresh_store(kind, run, options) as url:
                    measured.append(await measure(url, processes=processes, seconds=seconds))
                    if kind == "postgresql":
                        deadlocks += await deadlocks_of(url)
            figures.append(
                Figure(
                    bench="mixed",
                    case=f"{kind}, {processes} processes of {SLOTS} slots",
                    value=median(each.rate for each in measured),
                    unit="jobs/s",
                    ratio=median(each.share for each in measured),
                    against="what the slots allow",
                    bound=Bound(limit=LEAST),
                )
            )
            if kind == "postgresql":
                figures.append(
                    Figure(
                        bench="mixed",
                        case=f"{kind}, {processes} processes: deadlocks",
                        value=deadlocks,
                        unit="",
                        bound=Bound(limit=0, least=False),
                    )
                )
    return figures


@asynccontextmanager
async def fresh_store(kind: str, run: Run, options: Options) -> AsyncIterator[str]:
    """An empty store of a kind, with a server of its own; its URL."""
    if kind == "sqlite":
        yield f"sqlite:///{run.file('mixed')}"
        return
    server: Any
    if kind == "redis":
        server = redis_server.Server(redis_server.program(options.server), run.directory)
        url = await server.database("mixed")
        try:
            yield url
        finally:
            await server.drop(url)
        return
    server = postgresql_server.Server(postgresql_server.binaries(options.server), _folder(run))
    server.start()
    try:
        yield await server.database("mixed")
    finally:
        server.stop()


def _folder(run: Run) -> Path:
    folder = run.file("server").with_suffix("")
    folder.mkdir()
    # The server's user has to get there.
    run.directory.chmod(0o755)
    return folder


async def deadlocks_of(url: str) -> int:
    """How many the server has counted. A process of it adds what it saw when it ends, or after a second."""
    await asyncio.sleep(1.5)
    async with postgresql_server.connected(url) as connection:
        return int(await connection.fetchval(DEADLOCKS))


async def measure(url: str, *, processes: int, seconds: float, log: Path | None = None) -> Outcome:
    """Run the application on an empty store, and send to it from another process."""
    environment = os.environ | {"FAIRLANE_URL": url}
    command = [sys.executable, "-m", "fairlane", "worker", "-A", "benchmarks.mixed_app:app", "--reserved", "high=0"]
    command += ["-c", str(SLOTS), "--processes", str(processes), "--log-level", "warning", "--grace", "5"]
    output = asyncio.subprocess.DEVNULL if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    workers = await asyncio.create_subprocess_exec(
        *command, env=environment, stderr=output, stdout=output, preexec_fn=end_with_parent
    )
    try:
        sender = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.mixed", str(processes), str(seconds)),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await sender.communicate()
        if sender.returncode:
            raise RuntimeError(f"the process that sends ended with {sender.returncode}")
    finally:
        workers.terminate()
        async with asyncio.timeout(60):
            await workers.wait()
    return Outcome(**json.loads(told))


class _Sender:
    """Sends, waits in line, broadcasts and releases, until it is stopped; and counts what the workers complete."""

    def __init__(self, processes: int, seconds: float) -> None:
        from . import mixed_app

        self._mixed = mixed_app
        self._app = mixed_app.app
        self._processes = processes
        self._seconds = seconds
        self._rng = Random(11)
        self._turns = 0
        self._broadcasts = 0

    async def run(self) -> Outcome:
        """All of it."""
        allowed = self._processes * SLOTS / self._mixed.MEAN_SECONDS
        async with self._app:
            await self._wait_for_workers()
            backlog = int(allowed * (self._seconds + WARM_SECONDS) * 1.5) + 200
            await self._app.enqueue_many(self._mixed.calls(backlog, self._rng))
            others = [
                asyncio.create_task(each()) for each in (self._send, self._take_turns, self._broadcast, self._release)
            ]
            await asyncio.sleep(WARM_SECONDS)
            before, begun = await self._completed(), time.perf_counter()
            await asyncio.sleep(self._seconds)
            after, ended = await self._completed(), time.perf_counter()
            for other in others:
                other.cancel()
            for other in others:
                with suppress(asyncio.CancelledError):
                    await other
        rate = (after - before) / (ended - begun)
        return Outcome(rate=rate, allowed=allowed, turns=self._turns, broadcasts=self._broadcasts)

    async def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while sum(session.slots is not None for session in await self._app.client.sessions()) < self._processes:
            if time.monotonic() > deadline:
                raise RuntimeError("the workers have not started")
            await asyncio.sleep(0.1)

    async def _completed(self) -> int:
        queues = await self._app.client.queues()
        return sum(queue.counts.completed for queue in queues if queue.name in self._mixed.QUEUES) - self._turns

    async def _send(self) -> None:
        while True:
            [call] = self._mixed.calls(1, self._rng)
            await self._app.enqueue_many([call])
            await asyncio.sleep(0.1)

    async def _take_turns(self) -> None:
        for number in range(sys.maxsize):
            queue = self._mixed.QUEUES[number % len(self._mixed.QUEUES)]
            # A lane of its own: a turn holds a place without a slot, which would count against the workers.
            async with self._app.turn(f"m:turn-{number % 3}", queue=queue):
                await asyncio.sleep(0.01)
            self._turns += 1
            await asyncio.sleep(0.1)

    async def _broadcast(self) -> None:
        while True:
            await self._app.broadcast(self._mixed.refresh.call())
            self._broadcasts += 1
            await asyncio.sleep(0.5)

    async def _release(self) -> None:
        while True:
            await self._app.release(f"s:{self._rng.randrange(self._mixed.LANES)}", cleanup=self._mixed.refresh.call())
            await asyncio.sleep(0.3)


def main(processes: int, seconds: float) -> None:
    """The process that sends; prints the outcome as JSON."""
    outcome = asyncio.run(_Sender(processes, seconds).run())
    print(json.dumps({name: getattr(outcome, name) for name in ("rate", "allowed", "turns", "broadcasts")}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
