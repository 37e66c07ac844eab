"""Which jobs start, in which order, whatever shape calls have: many jobs of one lane, one of each, and all between.

The rule itself is short (`Order`); how a store gets there depends on how many lanes and jobs a call touches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from fairlane.model.job import Claimed, NewJob, Priority
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from fairlane.model.states import Transition, complete, hand_back
from tests.sizes import sized

from .kit import Kit, Worker

RULES = (
    LaneRule(pattern="heavy:*", weight=2.5),
    LaneRule(pattern="one:*", limit=1),
    LaneRule(pattern="two:*", limit=2),
)
LANES = (
    [None, "a", "b", "c", "d"],
    [*(f"lane:{number}" for number in range(30))],
    [*(f"one:{number}" for number in range(20)), *(f"two:{number}" for number in range(5))],
    [None, "heavy:1", "heavy:2", "a", "b", "one:1", "one:2", "one:3", "two:1", "two:2"],
    [None],
)


@dataclass
class Lane:
    """Waiting jobs by arrival, the number of running ones, the finish time, and the tag if its next job may start."""

    limit: int
    weight: float
    waiting: list[tuple[int, NewJob]] = field(default_factory=list)
    running: int = 0
    finish: int = 0
    tag: int | None = None

    def charge(self, job: NewJob) -> int:
        return max(1, round(1_000 * job.cost / self.weight))


class Order:
    """Start-time fair queueing, one job after the other."""

    def __init__(self) -> None:
        self.clock = 0
        self.lanes: dict[str | None, Lane] = {}
        self.arrived: dict[str, int] = {}

    def lane(self, key: str | None) -> Lane:
        if key not in self.lanes:
            limit = {"one": 1, "two": 2}.get((key or "").partition(":")[0], 10**6)
            self.lanes[key] = Lane(limit, 2.5 if (key or "").startswith("heavy:") else 1.0)
        return self.lanes[key]

    def _settle(self) -> None:
        """Give a tag to each lane whose next job may start and that has none; remove the tags of all others."""
        for lane in self.lanes.values():
            if not lane.waiting or lane.running >= lane.limit:
                lane.tag = None
            elif lane.tag is None:
                lane.tag = max(self.clock, lane.finish)

    def enqueue(self, jobs: list[NewJob]) -> None:
        for job in jobs:
            self.arrived[job.id] = len(self.arrived)
            self.lane(job.lane).waiting.append((self.arrived[job.id], job))
            self._settle()

    def claim(self, most: int) -> list[str]:
        started: list[str] = []
        while len(started) < most:
            turns = [(lane.tag, lane.waiting[0][0], key) for key, lane in self.lanes.items() if lane.tag is not None]
            if not turns:
                break
            tag, _, key = min(turns, key=lambda turn: turn[:2])
            lane = self.lanes[key]
            _, job = lane.waiting.pop(0)
            self.clock = max(self.clock, tag)
            lane.finish = tag + lane.charge(job)
            lane.running += 1
            lane.tag = lane.finish
            self._settle()
            started.append(job.id)
        return started

    def end(self, job: NewJob) -> None:
        self.lane(job.lane).running -= 1

    def settle(self) -> None:
        self._settle()

    def hand_back(self, job: NewJob) -> None:
        lane = self.lane(job.lane)
        lane.running -= 1
        lane.finish = max(0, lane.finish - lane.charge(job))
        if lane.tag is not None:
            lane.tag = max(self.clock, lane.finish)
        lane.waiting = sorted([*lane.waiting, (self.arrived[job.id], job)], key=lambda each: each[0])
        self._settle()

    def cancel(self, job: NewJob) -> None:
        lane = self.lane(job.lane)
        lane.waiting = [(arrival, other) for arrival, other in lane.waiting if other.id != job.id]
        self._settle()


class Run:
    """A random sequence of calls on a queue, and the jobs that must start."""

    def __init__(self, kit: Kit, worker: Worker, rng: Random, lanes: list[str | None]) -> None:
        self.kit, self.worker, self.rng, self.lanes = kit, worker, rng, lanes
        self.order = Order()
        self.jobs: dict[str, NewJob] = {}
        self.running: list[Claimed] = []

    async def enqueue(self) -> None:
        jobs = [
            self.kit.new(lane=self.rng.choice(self.lanes), cost=self.rng.choice([1.0, 1.0, 1.0, 1.0, 0.25, 3.0]))
            for _ in range(self.rng.choice([1, 1, 3, 30, 60]))
        ]
        self.jobs.update((job.id, job) for job in jobs)
        await self.kit.store.enqueue(jobs)
        self.order.enqueue(jobs)

    def _claim(self) -> Claim:
        most = self.rng.choice([1, 1, 2, 3, 5, 8, 13, 20, 50])
        return Claim(number=self.kit.number(), asks=(Ask("default", Priority.NORMAL, most),), total=most)

    def _started(self, claim: Claim, claimed: list[Claimed]) -> None:
        assert [job.id for job in claimed] == self.order.claim(claim.total)
        self.running += claimed

    async def claim(self) -> None:
        claim = self._claim()
        self._started(claim, await self.kit.store.claim(self.worker.id, claim))

    async def finish(self) -> None:
        """End some running jobs, mostly all of them and mostly as completed; the same call may claim the next."""
        self.rng.shuffle(self.running)
        count = self.rng.choice([len(self.running), len(self.running), len(self.running) // 2, 1])
        ending, self.running = self.running[:count], self.running[count:]
        all_well = self.rng.random() < 0.7
        transitions: list[Transition] = []
        for job in ending:
            if all_well or self.rng.random() < 0.7:
                transitions.append(complete(job.held))
                self.order.end(self.jobs[job.id])
            else:
                transitions.append(hand_back(job.held))
                self.order.hand_back(self.jobs[job.id])
            if not all_well:
                self.order.settle()
        self.order.settle()
        claim = self._claim() if self.rng.random() < 0.7 else None
        finished = await self.kit.store.finish(self.worker.id, transitions, claim=claim)
        assert all(verdict.accepted for verdict in finished.verdicts)
        if claim is not None:
            self._started(claim, list(finished.claimed))

    async def cancel(self) -> None:
        """Not for a limited lane, where the place of a job that ends is granted to the next one."""
        waiting = [job for lane in self.order.lanes.values() if lane.limit > 2 for _, job in lane.waiting]
        if waiting:
            job = self.rng.choice([*waiting, waiting[0]])
            await self.kit.store.cancel([job.id])
            self.order.cancel(job)


@pytest.mark.parametrize("seed", range(sized(2, 20)))
@pytest.mark.parametrize("lanes", LANES, ids=["few lanes", "many lanes", "limited lanes", "all kinds", "one lane"])
async def test_jobs_start_in_the_order_of_the_rule_whatever_calls_look_like(
    kit: Kit, lanes: list[str | None], seed: int
) -> None:
    await kit.settings("default", *RULES)
    run = Run(kit, await kit.worker(slots=10_000), Random(seed), lanes)
    for _ in range(60):
        # Some job always waits: a store may forget the tags of a queue in which none does.
        while sum(len(lane.waiting) for lane in run.order.lanes.values()) < 60:
            await run.enqueue()
        act = run.rng.choice([run.claim, run.claim, run.enqueue, run.finish, run.finish, run.finish, run.cancel])
        await act()
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("lanes", [1, 3])
async def test_what_is_handed_back_and_started_again_in_one_step_leaves_its_lane_as_it_is(
    kit: Kit, lanes: int, left: int
) -> None:
    """The lanes change twice in the step, and are empty after it, or are not."""
    worker = await kit.worker(slots=100)
    ids = [await kit.enqueue(lane=f"lane:{number % lanes}") for number in range(4 * lanes)]
    claimed = await worker.claim(2 * lanes)
    total = 4 * lanes - left
    finished = await kit.store.finish(
        worker.id, [hand_back(job.held) for job in claimed], claim=worker.everything(total)
    )
    assert [job.id for job in finished.claimed] == ids[:total]
    more = [await kit.enqueue(lane=f"lane:{number}") for number in range(lanes)]
    assert await worker.claim_ids(100) == ids[total:] + more
    assert (await kit.store.recount()).differences == ()
