"""How long the oldest waiting job of a queue has waited."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.model.job import Priority
from fairlane.model.settings import LaneRule

from .kit import Kit


async def oldest(kit: Kit, queue: str = "default") -> float | None:
    """What the reading of a queue says."""
    [found] = [each.oldest_wait for each in await kit.store.queues() if each.name == queue]
    return found if found is None else round(found, 3)


async def test_the_oldest_wait_counts_from_the_first_job_that_still_waits(kit: Kit) -> None:
    await kit.settings()
    assert await oldest(kit) is None
    worker = await kit.worker(lease=1e6)
    await kit.enqueue()
    kit.clock.advance(10)
    await kit.enqueue()
    kit.clock.advance(20)
    assert await oldest(kit) == 30
    [first] = await worker.claim()
    assert await oldest(kit) == 20
    [second] = await worker.claim()
    assert await oldest(kit) is None
    await worker.complete(first, second)
    assert await oldest(kit) is None


async def test_each_queue_has_its_own(kit: Kit) -> None:
    await kit.enqueue(queue="images")
    kit.clock.advance(5)
    await kit.enqueue(queue="mail")
    kit.clock.advance(5)
    assert (await oldest(kit, "images"), await oldest(kit, "mail")) == (10, 5)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lane": "a"}, {"lane": "b"}),
        ({"lane": "b"}, {"lane": "a"}),
        ({"priority": Priority.LOW}, {"priority": Priority.HIGH}),
        ({"lane": "a", "priority": Priority.LOW}, {"lane": "a", "priority": Priority.HIGH}),
        ({"sticky": "plan"}, {}),
        ({}, {"sticky": "plan"}),
        ({"worker": 0}, {}),
        ({"worker": 7}, {"lane": "a"}),
        ({"pool": "gpu", "sticky": "plan"}, {}),
        ({"lane": "full"}, {"lane": "a"}),
        ({"lane": "wide", "priority": Priority.LOW}, {"lane": "wide"}),
        ({"lane": "paused"}, {"lane": "a"}),
    ],
)
async def test_whatever_holds_it_the_oldest_is_found(kit: Kit, first: Any, second: Any) -> None:
    rules = (
        LaneRule(pattern="full", limit=1),
        LaneRule(pattern="wide", limit=1, ordered=False),
        LaneRule(pattern="paused", paused=True),
    )
    await kit.settings("default", *rules)
    worker = await kit.worker(slots=1, lease=1e6)
    for lane in ("full", "wide"):
        await kit.enqueue(lane=lane)
    kit.clock.advance(1)
    running = await worker.claim()
    other = await kit.worker(slots=1, lease=1e6)
    running += await other.claim()
    assert len(running) == 2
    assert await oldest(kit) is None
    await kit.enqueue(**first)
    kit.clock.advance(7)
    await kit.enqueue(**second)
    kit.clock.advance(1)
    assert await oldest(kit) == 8


async def test_a_paused_queue_still_waits(kit: Kit) -> None:
    await kit.enqueue()
    await kit.settings(paused=True, version=1)
    kit.clock.advance(3)
    assert await oldest(kit) == 3


async def test_a_job_that_was_sent_for_later_waits_since_it_was_due(kit: Kit) -> None:
    await kit.enqueue(delay=100)
    await kit.enqueue(run_at=kit.clock.now() + 150)
    kit.clock.advance(50)
    assert await oldest(kit) is None
    kit.clock.advance(110)
    await kit.store.promote()
    assert await oldest(kit) == 60
    worker = await kit.worker(lease=1e6)
    await worker.claim()
    assert await oldest(kit) == 10


async def test_a_job_that_is_tried_again_waits_since_it_ran(kit: Kit) -> None:
    worker = await kit.worker(lease=1e6)
    await kit.enqueue()
    kit.clock.advance(100)
    [job] = await worker.claim()
    kit.clock.advance(10)
    await worker.retry(job)
    kit.clock.advance(4)
    assert await oldest(kit) == 4


async def test_many_jobs_in_many_lanes_have_one_oldest(kit: Kit) -> None:
    await kit.enqueue(lane="last")
    kit.clock.advance(5)
    await kit.enqueue_all([kit.new(lane=f"lane-{n % 300}") for n in range(900)])
    kit.clock.advance(5)
    assert await oldest(kit) == 10
