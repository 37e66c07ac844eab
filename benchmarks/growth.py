"""Whether a call costs the same when a thousand times as much is waiting.

Two stores of one shape: 1,000 jobs in 10 lanes, and 1,000,000 jobs in 10,000. Half of the lanes are blocked:
they have a limit of 1, and their place is held by a job that runs for ever, or they are paused. A third store
has few jobs but as many lanes as one batch can touch, which tells the cost of touching lanes from the cost of
size. What is measured is processor time, all threads together; calls on the stores take turns, and what a
cycle took out is put back.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count, cycle
from statistics import median
from typing import TypeVar

from fairlane.model.job import NewJob
from fairlane.model.settings import LaneRule
from fairlane.store.port import Store

from .figures import Bound, Figure, ratio
from .workload import Run, Worker, configure, job, load, opened

T = TypeVar("T")
BATCH = 100
FLAT = Bound(limit=1.5, least=False)
CALLS = ("claim 100", "finish 100", "finish 100 and claim 100", "enqueue 100", "enqueue 1")


@dataclass
class Lanes:
    """The keys of the lanes: half open, a quarter held by a running job, a quarter paused."""

    number: int

    def __post_init__(self) -> None:
        half = self.number // 2
        held = (half + 1) // 2
        self.open = [f"open:{number}" for number in range(self.number - half)]
        self.held = [f"held:{number}" for number in range(held)]
        self.paused = [f"paused:{number}" for number in range(half - held)]

    @property
    def blocked(self) -> list[str]:
        return self.held + self.paused

    def alternating(self) -> Iterator[str]:
        """All lanes for ever, an open one and a blocked one in turn."""
        for open_lane, blocked in zip(cycle(self.open), cycle(self.blocked), strict=False):
            yield open_lane
            yield blocked


@dataclass
class Patient:
    """A store of some size, and the processor seconds its calls took."""

    store: Store
    worker: Worker
    lanes: Lanes
    spent: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})

    def __post_init__(self) -> None:
        self._next = self.lanes.alternating()
        self._next_open = cycle(self.lanes.open)

    async def examine(self) -> None:
        """One cycle of all calls; afterwards as much is waiting, in the same lanes, as before."""
        claimed = await self._timed("claim 100", self.worker.claim(BATCH))
        more = await self._timed("finish 100 and claim 100", self.worker.finish_and_claim(claimed, BATCH))
        await self._timed("finish 100", self.worker.finish(more))
        if len(claimed) != BATCH or len(more) != BATCH:
            raise AssertionError(f"{len(claimed)} and {len(more)} jobs were claimed")
        batch = [job(next(self._next)) for _ in range(BATCH)]
        singles = [job(next(self._next)) for _ in range(4)]
        await self._timed("enqueue 100", self.store.enqueue(batch))
        for each in singles:
            await self._timed("enqueue 1", self.store.enqueue([each]))
        await self._put_back(batch + singles)

    async def _put_back(self, sent: list[NewJob]) -> None:
        blocked = [each.id for each in sent if each.lane is not None and not each.lane.startswith("open:")]
        await self.store.cancel(blocked)
        missing = 2 * BATCH - (len(sent) - len(blocked))
        await self.store.enqueue([job(next(self._next_open)) for _ in range(missing)])

    async def _timed(self, call: str, work: Awaitable[T]) -> T:
        before = time.process_time()
        answer = await work
        self.spent[call].append(time.process_time() - before)
        return answer


async def run(run: Run) -> list[Figure]:
    """Build the stores, then examine them in turn."""
    repetitions = 40 if run.quick else 100
    many = 100_000 if run.quick else 1_000_000
    sizes = {"small": (1_000, 10), "spread": (1_000, 2 * BATCH), "big": (many, 10_000)}
    async with AsyncExitStack() as stack:
        patients: dict[str, Patient] = {}
        for name, (jobs, lanes) in sizes.items():
            store = await stack.enter_async_context(opened(run.file(name)))
            patients[name] = Patient(store, await filled(store, jobs, Lanes(lanes)), Lanes(lanes))
        for repetition in count():
            for patient in patients.values():
                await patient.examine()
            if repetition == 4:
                # The first ones warm caches and statements up, and do not count.
                for patient in patients.values():
                    for spans in patient.spent.values():
                        spans.clear()
            if repetition == 4 + repetitions:
                break
    return list(_figures(patients, f"{many:,} jobs"))


async def filled(store: Store, jobs: int, lanes: Lanes) -> Worker:
    """Fill an empty store: first the jobs that hold lanes for ever, then the rest, evenly; a worker for them."""
    await configure(
        store,
        LaneRule(pattern="held:*", limit=1),
        LaneRule(pattern="paused:*", limit=1, paused=True),
    )
    await load(store, (job(lane) for lane in lanes.held))
    holder = await Worker.start(store, max(2, len(lanes.held)))
    held = await holder.claim(len(lanes.held))
    if len(held) != len(lanes.held):
        raise AssertionError(f"{len(held)} of {len(lanes.held)} lanes are held")
    waiting = lanes.alternating()
    await load(store, (job(next(waiting)) for _ in range(jobs - len(held))))
    return await Worker.start(store, BATCH)


def _figures(patients: dict[str, Patient], title: str) -> Iterator[Figure]:
    small, spread, big = (patients[name].spent for name in ("small", "spread", "big"))
    for call in CALLS:
        for name, spent in (("1,000 jobs", small), ("1,000 jobs, 100 lanes a batch", spread)):
            yield Figure(bench="growth", case=f"{call}: {name}", value=median(spent[call]) * 1e6, unit="µs of CPU")
        yield Figure(
            bench="growth",
            case=f"{call}: {title}",
            value=median(big[call]) * 1e6,
            unit="µs of CPU",
            ratio=ratio(big[call], small[call]),
            against="1,000 jobs",
            bound=FLAT,
        )
        yield Figure(
            bench="growth",
            case=f"{call}: {title}",
            value=median(big[call]) * 1e6,
            unit="µs of CPU",
            ratio=ratio(big[call], spread[call]),
            against="100 lanes a batch",
        )
