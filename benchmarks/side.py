"""What a contest asks of each queue it measures, and the process that a side runs in.

A side is one module of `peers_postgresql` or `peers_redis`. Its bodies only write down that they have started; they are
coroutines where the queue runs coroutines. ``python -m benchmarks.side VERB KIND SIDE …`` does one thing on behalf of a
side and prints JSON; workers are started as the side itself says, through its own command line where it has one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import ClassVar, Protocol

from .board import Board
from .workload import Pace, Stopwatch

URL = "FAIRLANE_BENCH_URL"
SLOTS = 200
SIDES = {
    "postgresql": ("fairlane", "bare", "pgqueuer", "procrastinate", "awa", "chancy", "saq", "absurd", "oban"),
    "redis": ("fairlane", "bare", "dramatiq", "taskiq", "huey", "celery", "rq", "saq"),
}
"""By the kind of server that they run on."""
BATCH = 1_000
"""Jobs in one call, where jobs are sent in bulk."""


class Producer(Protocol):
    """A sender of jobs; the argument of a job is its number."""

    async def send(self, number: int) -> None:
        """One job, stored when this returns."""

    async def send_many(self, numbers: Sequence[int]) -> None:
        """Many jobs in one call, in the fastest way there is."""


class Side(ABC):
    """One queue."""

    package: ClassVar[str]
    """What it is called on the package index."""
    settings: ClassVar[Mapping[str, str]]
    """The workers that are measured, by what is special about them, with how they are started."""
    sending: ClassVar[tuple[str, ...]] = ("",)
    """The settings that make a difference to who sends; the empty one means that none does."""
    waits: ClassVar[bool] = True
    """Whether its workers wait for jobs, so that it has a latency."""
    stored: ClassVar[str]
    """What counts the jobs there are, finished ones included: SQL, or Lua."""
    recorded: ClassVar[str]
    """What counts the jobs whose end is recorded. Lua knows as ``ARGV[1]`` how many were sent."""
    acknowledges: ClassVar[bool] = True
    """Whether a job that was begun is still known to the server, so that it outlives its worker."""
    keeps: ClassVar[bool] = True
    """Whether each job has a record of its own, besides its place in a line."""
    share: ClassVar[float] = 1.0
    """How many of the jobs asked for it gets: less than 1 for who needs minutes for all."""

    @abstractmethod
    async def install(self, url: str) -> None:
        """Prepare an empty database."""

    @abstractmethod
    def producer(self, url: str, setting: str) -> AbstractAsyncContextManager[Producer]:
        """A sender of jobs to workers of this kind."""

    @abstractmethod
    def command(self, url: str, setting: str) -> list[str]:
        """The command of a worker process with `SLOTS` slots. Its module waits for the board before it starts."""

    @property
    def version(self) -> str | None:
        """Which version is installed; None if none is."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def side(kind: str, name: str) -> Side:
    """The side of this name; what it measures is imported only where it runs."""
    if name not in SIDES[kind]:
        raise SystemExit(f"{name!r} is none of {', '.join(SIDES[kind])}")
    found: Side = import_module(f"benchmarks.peers_{kind}.{name}").SIDE
    return found


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def worker_url() -> str:
    """Where this worker's jobs are."""
    return os.environ[URL]


async def _send(side: Side, url: str, setting: str, jobs: int) -> dict[str, float]:
    """One by one, after some that warm it up."""
    async with side.producer(url, setting) as producer:
        for number in range(50):
            await producer.send(number)
        watch = Stopwatch()
        for number in range(jobs):
            await producer.send(number)
        return _paced(watch.pace(jobs), jobs + 50)


async def _load(side: Side, url: str, setting: str, jobs: int, batch: int, warm: int) -> dict[str, float]:
    """In bulk, after some that warm it up."""
    async with side.producer(url, setting) as producer:
        if warm:
            await producer.send_many(range(warm))
        watch = Stopwatch()
        for start in range(0, jobs, batch):
            await producer.send_many(range(start, min(start + batch, jobs)))
        return _paced(watch.pace(jobs), jobs + warm)


def _paced(pace: Pace, sent: int) -> dict[str, float]:
    return {"rate": pace.rate, "processor": pace.processor, "sent": sent}


async def _latency(side: Side, url: str, setting: str, board: Board) -> dict[str, float]:
    """From before the call that sends a job to the start of its body, on a worker with nothing else to do."""
    rng = Random(11)
    warm = board.jobs // 10
    waits = []
    async with side.producer(url, setting) as producer:
        for number in range(board.jobs):
            before = time.perf_counter()
            await producer.send(number)
            while not (started := board.start(number)):
                if time.perf_counter() - before > 60:
                    raise AssertionError(f"job {number} did not start within a minute")
                await asyncio.sleep(0.0005)
            if number >= warm:
                waits.append(started - before)
            # Spread out, and not in step with any timer.
            await asyncio.sleep(rng.uniform(0.02, 0.06))
    waits.sort()
    return {"median": waits[len(waits) // 2], "p99": waits[int(len(waits) * 0.99)], "sent": board.jobs}


async def _main(verb: str, kind: str, name: str, url: str, setting: str, *numbers: str) -> None:
    own = side(kind, name)
    answer: dict[str, float] = {}
    if verb == "install":
        await own.install(url)
    elif verb == "send":
        answer = await _send(own, url, setting, int(numbers[0]))
    elif verb == "load":
        answer = await _load(own, url, setting, int(numbers[0]), int(numbers[1]), int(numbers[2]))
    elif verb == "latency":
        answer = await _latency(own, url, setting, Board(Path(numbers[0])))
    else:
        raise SystemExit(f"no verb {verb!r}")
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
