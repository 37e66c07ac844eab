"""Hard limits that the store itself enforces in a claim: slots, reservations, queue limits and pauses."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from fairlane.model.job import Claimed, JobState, Priority
from fairlane.model.settings import LaneRule, QueueOverride, SettingsChange
from fairlane.model.slots import Ask, Reserved
from fairlane.store.port import Store

from .kit import Kit

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


async def fill(kit: Kit, each: int = 10, **fields: Any) -> None:
    """Enqueue `each` jobs of every class."""
    for priority in Priority:
        await kit.store.enqueue([kit.new(priority=priority, **fields) for _ in range(each)])


def by_class(jobs: list[Claimed]) -> tuple[int, int, int]:
    """How many jobs of each class there are: high, normal, low."""
    counts = Counter(job.priority for job in jobs)
    return counts[HIGH], counts[NORMAL], counts[LOW]


async def test_a_worker_never_holds_more_jobs_than_slots(kit: Kit) -> None:
    await fill(kit)
    worker = await kit.worker(slots=3)

    held = await worker.claim(20)

    assert len(held) == 3
    assert await worker.claim(20) == []


async def test_a_slot_is_free_again_in_the_step_that_ends_its_job(kit: Kit) -> None:
    await fill(kit)
    worker = await kit.worker(slots=3)
    first, second, third = await worker.claim(3)

    await worker.complete(first)
    assert len(await worker.claim(20)) == 1
    await worker.retry(second, delay=60)
    await worker.fail(third)
    assert len(await worker.claim(20)) == 2


async def test_a_slot_is_free_again_when_a_job_is_handed_back(kit: Kit) -> None:
    await kit.enqueue(id="one")
    worker = await kit.worker(slots=1)
    await worker.hand_back(*await worker.claim())

    assert await worker.claim_ids(5) == ["one"]


@pytest.mark.parametrize(
    ("priority", "most"),
    [(HIGH, 6), (NORMAL, 4), (LOW, 3)],
)
async def test_a_class_alone_uses_what_is_not_reserved_above_it(kit: Kit, priority: Priority, most: int) -> None:
    await fill(kit)
    worker = await kit.worker(slots=6, reserved=Reserved(high=2, normal=1))

    held = await worker.claim(20, Ask("default", priority, 20))

    assert [job.priority for job in held] == [priority] * most


async def test_reservations_hold_over_several_claims_and_classes(kit: Kit) -> None:
    await fill(kit)
    worker = await kit.worker(slots=6, reserved=Reserved(high=2, normal=1))
    low_first = (Ask("default", LOW, 20), Ask("default", NORMAL, 20), Ask("default", HIGH, 20))

    held = await worker.claim(1, *low_first)
    held += await worker.claim(20, *low_first)

    assert by_class(held) == (2, 1, 3)
    assert await worker.claim(20, *low_first) == []


async def test_normal_work_fills_the_place_of_low_but_never_the_one_of_high(kit: Kit) -> None:
    await fill(kit)
    worker = await kit.worker(slots=4, reserved=Reserved(high=1, normal=1))

    held = await worker.claim(20, Ask("default", NORMAL, 20), Ask("default", LOW, 20))

    assert by_class(held) == (0, 3, 0)


async def test_high_work_in_the_common_slots_leaves_the_reservation_untouched(kit: Kit) -> None:
    await fill(kit)
    worker = await kit.worker(slots=3, reserved=Reserved(high=1))

    held = await worker.claim(2, Ask("default", HIGH, 2))
    held += await worker.claim(20, Ask("default", NORMAL, 20))

    # Two of three slots are taken by high; normal may use the third, for its own bound of two is not met.
    assert by_class(held) == (2, 1, 0)


async def test_reservations_bind_the_inbox_too(kit: Kit) -> None:
    worker = await kit.worker(slots=3, reserved=Reserved(high=1))
    await fill(kit, worker=worker.session.index)

    held = await worker.claim(20, Ask(None, NORMAL, 20))

    assert by_class(held) == (0, 2, 0)


# -- queue limits ----------------------------------------------------------------------------------


async def test_a_queue_limit_holds_for_the_whole_fleet(kit: Kit) -> None:
    await kit.settings(limit=3)
    await fill(kit)
    workers = [await kit.worker(slots=2) for _ in range(4)]

    answers = await asyncio.gather(*(worker.claim(2) for worker in workers))

    assert sum(len(answer) for answer in answers) == 3


async def test_a_queue_limit_binds_high_work_too(kit: Kit) -> None:
    await kit.settings(limit=2)
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(), kit.new()])
    held = await worker.claim(5)
    await kit.enqueue(id="urgent", priority=HIGH)

    assert await worker.claim(5) == []

    await worker.complete(held[0])
    assert await worker.claim_ids(5) == ["urgent"]


@pytest.mark.parametrize(("priority", "most"), [(HIGH, 6), (NORMAL, 4), (LOW, 3)])
async def test_a_queue_keeps_its_own_reservations(kit: Kit, priority: Priority, most: int) -> None:
    await kit.settings(limit=6, reserved=Reserved(high=2, normal=1))
    await fill(kit)
    workers = [await kit.worker(slots=10) for _ in range(2)]

    held = [job for worker in workers for job in await worker.claim(4, Ask("default", priority, 20))]

    assert [job.priority for job in held] == [priority] * most


async def test_a_queue_limit_leaves_other_queues_alone(kit: Kit) -> None:
    await kit.settings("narrow", limit=1)
    await kit.store.enqueue([kit.new(queue="narrow") for _ in range(5)])
    await kit.store.enqueue([kit.new(queue="wide") for _ in range(5)])
    worker = await kit.worker("narrow", "wide", slots=20)

    held = await worker.claim(20)

    assert Counter(job.queue for job in held) == {"narrow": 1, "wide": 5}


async def test_a_queue_limit_counts_jobs_from_inboxes(kit: Kit) -> None:
    await kit.settings("narrow", limit=1)
    worker = await kit.worker("narrow")
    await kit.enqueue(id="direct", queue="narrow", worker=worker.session.index)
    await kit.enqueue(id="free", queue="narrow")

    assert len(await worker.claim(5, Ask(None, NORMAL, 5), Ask("narrow", NORMAL, 5))) == 1
    assert await worker.claim(5, Ask("narrow", NORMAL, 5), Ask(None, NORMAL, 5)) == []


async def test_a_lower_queue_limit_stops_nothing_and_starts_nothing(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new() for _ in range(5)])
    held = await worker.claim(3)

    await kit.settings(limit=1)

    assert await worker.claim(5) == []
    await worker.complete(held[0], held[1])
    assert await worker.claim(5) == []
    await worker.complete(held[2])
    assert len(await worker.claim(5)) == 1


# -- pauses ----------------------------------------------------------------------------------------


async def test_a_paused_queue_starts_nothing_and_ends_what_runs(kit: Kit) -> None:
    worker = await kit.worker("default", "other")
    await kit.store.enqueue([kit.new(id="running"), kit.new(id="waiting"), kit.new(id="beside", queue="other")])
    [job] = await worker.claim(1, Ask("default", NORMAL, 1))

    await kit.settings(paused=True, version=1)

    assert await worker.claim_ids(5) == ["beside"]
    assert (await worker.complete(job)).verdicts[0].state is JobState.COMPLETED
    assert await worker.claim(5) == []

    await kit.settings(paused=False, version=2)
    assert await worker.claim_ids(5) == ["waiting"]


async def test_a_paused_queue_holds_its_jobs_in_the_inboxes_too(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="direct", worker=worker.session.index)
    await kit.settings(paused=True, version=1)

    assert await worker.claim(5) == []

    await kit.settings(paused=False, version=2)
    assert await worker.claim_ids(5) == ["direct"]


async def test_an_operators_pause_holds_until_it_is_cleared(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await store.configure([SettingsChange(queue="default", override=QueueOverride(paused=True))])
    await kit.settings(paused=False, version=9)

    assert await worker.claim(5) == []

    await store.configure([SettingsChange(queue="default", override=None)])
    assert await worker.claim_ids(5) == ["job"]


async def test_jobs_are_still_taken_in_while_a_queue_is_paused(kit: Kit) -> None:
    await kit.settings(paused=True)

    await kit.enqueue(id="job")

    assert await kit.state("job") is JobState.PENDING


async def test_a_paused_lane_lets_the_others_through(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="ann", paused=True), version=1)
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="ann-1", lane="ann"), kit.new(id="bob-1", lane="bob"), kit.new(id="free")])

    assert sorted(await worker.claim_ids(5)) == ["bob-1", "free"]

    await kit.settings("default", version=2)
    assert await worker.claim_ids(5) == ["ann-1"]
