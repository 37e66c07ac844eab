"""The accuracy of estimates: a worker runs a backlog, and the estimates of waiting jobs are compared with the times at
which they really started."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from statistics import median, quantiles

import pytest

from fairlane.model.job import Claimed, Held, JobKind, NewJob, Priority
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Floor, Reserved, Slots, asks

from .death import LONG
from .kit import UNRESERVED, Kit
from .runs import bulk

HIGH, NORMAL, LOW = Priority
SPREAD = 0.3
WORTH_TELLING = 2.0
"""Service times. Shorter waits are a matter of luck: of whose run happens to end next."""
MOST_WRONG, SELDOM_WORSE = 0.25, 0.4
"""The largest relative error of half of the estimates, and of nine tenths of them."""
LOOK_EVERY = 7
"""How many jobs end between two reads of all positions."""


class Day:
    """A worker whose jobs take about a second each, and the estimates of waiting jobs meanwhile."""

    def __init__(self, kit: Kit, *, slots: int = 4, reserved: Reserved = UNRESERVED, seed: int = 1) -> None:
        self.kit = kit
        self.slots = Slots(total=slots, reserved=reserved)
        self.random = Random(seed)
        self.floor = Floor()
        self.running = [0, 0, 0]
        self.ends: list[tuple[float, str]] = []
        self.held: dict[str, Claimed] = {}
        self.waiting: set[str] = set()
        self.told: list[tuple[str, float, float]] = []
        self.errors: list[float] = []

    async def work(self, jobs: list[NewJob]) -> None:
        """Run `jobs` to the end, and check the estimates."""
        self.worker = await self.kit.worker(slots=self.slots.total, reserved=self.slots.reserved, lease=LONG)
        await self._run(bulk(self.kit, "before", 5 * self.slots.total), looks=False)
        await self._run(jobs, looks=True)
        assert len(self.errors) >= 100, "too few waits were long enough to judge by"
        usual, seldom = median(self.errors), quantiles(self.errors, n=10)[-1]
        assert usual <= MOST_WRONG, f"half of what was told is wrong by {usual:.0%} or more"
        assert seldom <= SELDOM_WORSE, f"a tenth of what was told is wrong by {seldom:.0%} or more"

    async def _run(self, jobs: list[NewJob], *, looks: bool) -> None:
        await self.kit.enqueue_all(jobs)
        self.waiting = {job.id for job in jobs}
        ended = 0
        await self._turn(None)
        while self.ends:
            if looks and ended % LOOK_EVERY == 0:
                await self._look()
            moment, id = heappop(self.ends)
            self.kit.clock.advance(max(0.0, moment - self.kit.clock.now()))
            await self._turn(id)
            ended += 1
        assert not self.waiting

    async def _turn(self, ended: str | None) -> None:
        """End a job, and claim for the free slots as a worker does."""
        if ended is not None:
            job = self.held.pop(ended)
            self.running[job.priority] -= 1
            await self.worker.complete(job)
        wanted = asks(self.slots, self.running, self.floor.due(), {"default": 1}, self.random)
        room = self.slots.total - sum(self.running)
        claim = Claim(number=self.kit.number(), asks=tuple(wanted), total=room)
        now = self.kit.clock.now()
        for job in await self.kit.store.claim(self.worker.id, claim):
            self.held[job.id] = job
            self.running[job.priority] += 1
            self.floor.started(job.priority)
            self.waiting.discard(job.id)
            heappush(self.ends, (now + self.random.uniform(1 - SPREAD, 1 + SPREAD), job.id))
            self._compare(job.id, now)

    async def _look(self) -> None:
        now = self.kit.clock.now()
        for position in await self.kit.store.positions(sorted(self.waiting)):
            assert position is not None
            eta = position.eta()
            assert eta is not None, position.why()
            self.told.append((position.id, now, eta))

    def _compare(self, id: str, started: float) -> None:
        for told, when, eta in self.told:
            if told == id and started - when >= WORTH_TELLING:
                self.errors.append(abs(when + eta - started) / (started - when))
        self.told = [each for each in self.told if each[0] != id]


def one_lane(kit: Kit) -> list[NewJob]:
    return bulk(kit, "user", 100)


def no_lane(kit: Kit) -> list[NewJob]:
    return bulk(kit, None, 100)


def unequal_lanes(kit: Kit) -> list[NewJob]:
    return [job for n, count in enumerate((2, 8, 20, 40, 80)) for job in bulk(kit, f"user-{n}", count)]


def heavy_lane(kit: Kit) -> list[NewJob]:
    return bulk(kit, "heavy", 60) + unequal_lanes(kit)


def ordered_lane(kit: Kit) -> list[NewJob]:
    return bulk(kit, "ordered", 40)


def ordered_beside_others(kit: Kit) -> list[NewJob]:
    return bulk(kit, "ordered", 30) + bulk(kit, "ann", 60) + bulk(kit, "bob", 10)


def two_at_once_beside_others(kit: Kit) -> list[NewJob]:
    return bulk(kit, "two", 60) + bulk(kit, "ann", 40)


def two_at_once_in_a_crowd(kit: Kit) -> list[NewJob]:
    return bulk(kit, "two", 30) + unequal_lanes(kit)


def many_ordered_lanes(kit: Kit) -> list[NewJob]:
    return [job for n in range(10) for job in bulk(kit, f"ordered-{n}", 4 + 2 * n)]


def classes(kit: Kit) -> list[NewJob]:
    """All three in one lane, and in others."""
    random = Random(5)
    lanes = ("ann", "bob", "cyd", None)
    return [kit.new(lane=random.choice(lanes), priority=random.choice((HIGH, NORMAL, LOW))) for _ in range(160)]


def few_behind_a_higher_class(kit: Kit) -> list[NewJob]:
    return bulk(kit, "ann", 200, priority=HIGH) + bulk(kit, "bob", 12, priority=LOW)


@pytest.mark.parametrize(
    "jobs",
    [
        *(one_lane, no_lane, unequal_lanes, heavy_lane, ordered_lane, ordered_beside_others),
        *(two_at_once_beside_others, two_at_once_in_a_crowd, many_ordered_lanes, classes, few_behind_a_higher_class),
    ],
)
async def test_estimates_of_waiting_jobs_are_close_to_their_starts(
    kit: Kit, jobs: Callable[[Kit], list[NewJob]]
) -> None:
    await kit.settings(
        "default",
        LaneRule(pattern="ordered*", limit=1),
        LaneRule(pattern="two", limit=2),
        LaneRule(pattern="heavy", weight=3),
    )
    await Day(kit).work(jobs(kit))


async def test_slots_that_are_reserved_for_a_higher_class_serve_no_lower_class(kit: Kit) -> None:
    await Day(kit, reserved=Reserved(high=2)).work(one_lane(kit))


async def test_the_limit_of_a_queue_counts_in_the_estimate(kit: Kit) -> None:
    await kit.settings(limit=2)
    await Day(kit).work(one_lane(kit))


async def test_a_turn_is_served_by_its_lane_and_needs_no_worker(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="flux", limit=2))
    waiter = await kit.waiter(lease=LONG)
    ids = [f"turn-{n}" for n in range(8)]
    for id in ids:
        await kit.enqueue(id=id, kind=JobKind.TURN, lane="flux", waiter=waiter.id)
    kit.clock.advance(4)
    await waiter.complete(*(Held(id, 1) for id in ids[:2]))
    etas = [position.eta() for position in await kit.store.positions(ids[4:]) if position is not None]
    assert etas == [pytest.approx(4 * (place - 0.5) / 2) for place in range(1, 5)]
