"""A server that is killed again and again under load, with every write flushed before it is answered.

A worker has a backlog and a client goes on sending while the server is killed and started again. In the end every job
whose sender was told that it is stored must have ended. What is measured is the time from the moment the server answers
again to the first body that starts after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import median

from fairlane.errors import FairlaneError

from .board import Board
from .cases import Cases, board_of, until
from .contest import Options
from .figures import Bound, Figure
from .redis_contest import prepared
from .redis_server import DURABLE, Server
from .side import Producer, side
from .workload import Run

BURST = 3_000
"""Jobs that are sent before each kill: more than a worker can do until then."""
ROOM = 3 * BURST
"""Jobs for each kill that there is room for."""
AFTER = 0.1
"""Seconds after a burst when the server is killed."""
DOWN = 0.3
"""Seconds that it is away."""


@dataclass
class Load:
    """Who sends, and what is known of it."""

    producer: Producer
    board: Board
    stored: list[int] = field(default_factory=list)
    """Jobs whose sender was told that they are stored."""
    failed: int = 0

    def __post_init__(self) -> None:
        self._numbers = count()

    async def burst(self) -> None:
        """Many at once."""
        for _ in range(BURST // 1_000):
            await self._send([next(self._numbers) for _ in range(1_000)])

    async def trickle(self) -> None:
        """One after the other, for ever; nobody knows what became of those that failed."""
        while True:
            await self._send([next(self._numbers)])
            await asyncio.sleep(0.005)

    async def _send(self, numbers: list[int]) -> None:
        try:
            await self.producer.send_many(numbers)
        except FairlaneError:
            self.failed += len(numbers)
        else:
            self.stored += numbers


async def run(run: Run, options: Options) -> list[Figure]:
    """Kill, start again, and look at what is left."""
    kills = max(3, options.kills // 10) if run.quick else options.kills
    with prepared(run, options, DURABLE) as server, board_of(kills * ROOM) as board:
        own = side("redis", "fairlane")
        cases = Cases(server, "redis", "fairlane", own, "")
        url = await server.database("kills")
        async with own.producer(url, "") as producer:
            load = Load(producer, board)
            with cases.workers(url, board, 1) as processes:
                await until(lambda: board.ready(1), processes)
                board.go()
                trickle = asyncio.create_task(load.trickle())
                waits = [await _killed(server, load) for _ in range(kills)]
                trickle.cancel()
                await asyncio.wait([trickle])
                await until(lambda: all(map(board.runs, load.stored)), processes)
                async with server.counting(url) as counted:
                    jobs = await counted(own.stored, 0)
                await cases.expect(url, own.recorded, jobs)
        await server.drop(url)
    # A job whose end is forgotten with the job itself is lost as well, though it ran.
    forgotten = max(0, len(load.stored) - jobs)
    return list(_figures(waits, load, forgotten))


async def _killed(server: Server, load: Load) -> float:
    """Seconds from the return of the server to the next body that starts."""
    await load.burst()
    await asyncio.sleep(AFTER)
    server.kill()
    await asyncio.sleep(DOWN)
    before = load.board.count
    server.start()
    back = time.perf_counter()
    while load.board.count == before:
        if time.perf_counter() - back > 60:
            raise AssertionError("no job has started within a minute")
        await asyncio.sleep(0.001)
    waited = time.perf_counter() - back
    # Until all goes its way again.
    await asyncio.sleep(1)
    return waited


def _figures(waits: list[float], load: Load, forgotten: int) -> Iterator[Figure]:
    bench = "redis-kills"
    title = f"{len(waits)} kills"
    lost = sum(not load.board.runs(number) for number in load.stored)
    again = sum(load.board.runs(number) > 1 for number in load.stored)
    none = Bound(limit=0.0, least=False)
    yield Figure(bench=bench, case=f"{title}: jobs stored", value=len(load.stored), unit="jobs")
    yield Figure(bench=bench, case=f"{title}: of them lost", value=lost + forgotten, unit="jobs", bound=none)
    yield Figure(bench=bench, case=f"{title}: of them run more than once", value=again, unit="jobs")
    yield Figure(bench=bench, case=f"{title}: jobs that could not be sent", value=load.failed, unit="jobs")
    yield Figure(bench=bench, case=f"{title}: return to first claim, median", value=median(waits), unit="s")
    yield Figure(
        bench=bench,
        case=f"{title}: return to first claim, longest",
        value=max(waits),
        unit="s",
        bound=Bound(limit=3.0, least=False),
    )
