"""Jobs that are sent in one call are in the same order as if they had been sent one after the other."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from fairlane.model.job import Claimed, JobState, NewJob, Priority
from fairlane.model.reading import Filter
from fairlane.model.settings import LaneRule
from fairlane.store.wakeups import queue_topic
from tests.sizes import sized

from .kit import Kit, Worker

RULES = (
    LaneRule(pattern="one:*", limit=1),
    LaneRule(pattern="two:*", limit=2),
    LaneRule(pattern="classes:*", limit=1, ordered=False),
    LaneRule(pattern="paused:*", paused=True),
    LaneRule(pattern="heavy:*", weight=3.0),
)
LANES = (None, None, "a", "b", "one:1", "one:2", "two:1", "two:2", "classes:1", "classes:2", "paused:1", "heavy:1")
TOGETHER, APART = "together", "apart"


def _bare(queue: str, ids: list[str]) -> list[str]:
    return [id.removeprefix(f"{queue}-") for id in ids]


class Pair:
    """Two queues with the same rules, which get the same jobs in two ways."""

    def __init__(self, kit: Kit, workers: dict[str, Worker]) -> None:
        self.kit = kit
        self.workers = workers
        self.jobs: list[NewJob] = []
        self.running: dict[str, list[Claimed]] = {TOGETHER: [], APART: []}

    def jobs_of(self, queue: str, jobs: list[NewJob]) -> list[NewJob]:
        """The same jobs for a queue; those for one worker name the worker of that queue."""
        index = self.workers[queue].session.index
        return [
            msgspec.structs.replace(
                job, id=f"{queue}-{job.id}", queue=queue, worker=None if job.worker is None else index
            )
            for job in jobs
        ]

    async def send(self, jobs: list[NewJob]) -> None:
        self.jobs += jobs
        await self.kit.store.enqueue(self.jobs_of(TOGETHER, jobs))
        for job in self.jobs_of(APART, jobs):
            await self.kit.store.enqueue([job])

    async def claim(self, most: int) -> None:
        started = {}
        for queue, worker in self.workers.items():
            claimed = await worker.claim(most)
            ids = _bare(queue, [job.id for job in claimed])
            started[queue] = [(id, job.headers, job.lane, job.limited) for id, job in zip(ids, claimed, strict=True)]
            self.running[queue] += claimed
        assert started[TOGETHER] == started[APART]

    async def complete(self, most: int) -> None:
        for queue, worker in self.workers.items():
            ending, self.running[queue] = self.running[queue][:most], self.running[queue][most:]
            if ending:
                await worker.complete(*ending)

    async def looks(self, queue: str) -> tuple[Any, ...]:
        """The positions of all jobs, the counts, and the jobs that readers find."""
        ids = [job.id for job in self.jobs_of(queue, self.jobs)]
        positions = [
            each and (each.gate, each.place, each.of, each.exact, each.queue_ahead, each.lane_limit)
            for each in await self.kit.store.positions(ids)
        ]
        lanes = [(each.lane, each.pending, each.running) for each in await self.kit.store.lanes(queue)]
        found = [
            _bare(queue, await self._found(where))
            for where in (Filter(queue=queue), *(Filter(queue=queue, lane=lane) for lane in LANES if lane is not None))
        ]
        [counts] = [each.classes for each in await self.kit.store.queues() if each.name == queue]
        return positions, lanes, found, counts

    async def _found(self, where: Filter) -> list[str]:
        page = await self.kit.store.find(where, limit=10)
        found = [*page.jobs]
        while page.cursor is not None:
            page = await self.kit.store.find(where, limit=10, cursor=page.cursor)
            found += page.jobs
        return [job.id for job in found]

    async def compare(self) -> None:
        assert await self.looks(TOGETHER) == await self.looks(APART)


async def _pair(kit: Kit) -> Pair:
    workers = {}
    for queue in (TOGETHER, APART):
        await kit.settings(queue, *RULES)
        workers[queue] = await kit.worker(queue, slots=500)
    return Pair(kit, workers)


@pytest.mark.parametrize("seed", range(sized(1, 30)))
async def test_sending_together_is_sending_one_after_the_other(kit: Kit, seed: int) -> None:
    rng, pair = Random(seed), await _pair(kit)
    for _ in range(12):
        # A scheduled job has a number but no arrival: numbers and arrivals are not the same.
        await pair.send([kit.new(delay=1_000.0, lane="a")])
        jobs = [
            kit.new(
                rng.choice(["task", "other"]),
                lane=rng.choice(LANES),
                priority=rng.choice([*Priority, Priority.NORMAL, Priority.NORMAL]),
                headers=rng.choice([None, None, b'{"trace":"1"}']),
                worker=rng.choice([None] * 7 + [0]),
            )
            for _ in range(rng.choice([1, 2, 5, 12, 40]))
        ]
        # Jobs that differ only in their lanes are often next to each other.
        if rng.random() < 0.6:
            jobs.sort(key=lambda job: (job.task, job.priority))
        await pair.send(jobs)
        if rng.random() < 0.6:
            await pair.claim(rng.choice([1, 3, 20]))
        if rng.random() < 0.4:
            await pair.complete(rng.choice([1, 4, 30]))
    await pair.compare()
    assert (await kit.store.recount()).differences == ()
    while any(pair.running.values()):
        await pair.complete(1_000)
        await pair.claim(50)
    await pair.compare()
    assert (await kit.store.recount()).differences == ()


async def test_jobs_of_one_call_know_of_each_other(kit: Kit) -> None:
    await kit.settings("default", *RULES)
    worker = await kit.worker(slots=50)
    weak = await kit.enqueue(lane="classes:1", priority=Priority.LOW)
    # The first takes the place of the weak one, which needs the general path, as do the other jobs of the call.
    await kit.store.enqueue(
        [
            kit.new(lane="classes:1", id="strong"),
            kit.new(lane="one:1", id="first"),
            kit.new(lane="a", id="third"),
            kit.new("other", lane="one:1", id="second"),
            kit.new("another", lane="a", id="fourth"),
        ]
    )
    assert (await kit.store.recount()).differences == ()
    assert await worker.claim_ids(10) == ["strong", "first", "third", "fourth"]
    assert [await kit.state(id) for id in (weak, "second")] == [JobState.PENDING] * 2
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("lanes", [(None, None), ("a", "a"), ("one:1", "one:2"), ("two:1", "a")])
async def test_workers_are_notified_of_jobs_that_are_sent_together(kit: Kit, lanes: tuple[str | None, str]) -> None:
    await kit.settings("default", *RULES)
    subscription = kit.store.wakeups.subscribe([queue_topic("default")])
    await kit.store.enqueue([kit.new(lane=lane) for lane in lanes])
    assert await subscription.wait(5) == {queue_topic("default")}
    subscription.close()


@pytest.mark.parametrize("together", [True, False])
async def test_a_place_that_waits_for_one_worker_alone_is_taken_by_a_higher_class(kit: Kit, together: bool) -> None:
    await kit.settings("default", *RULES)
    worker = await kit.worker(slots=50)
    weak = await kit.enqueue(lane="classes:1", priority=Priority.LOW, worker=worker.session.index)
    jobs = [kit.new(lane="classes:1", id=id) for id in ("strong", "next")]
    for call in [jobs] if together else [[job] for job in jobs]:
        await kit.store.enqueue(call)
    assert await worker.claim_ids(10) == ["strong"]
    assert await kit.state(weak) is JobState.PENDING
    assert (await kit.store.recount()).differences == ()
