"""A full queue or lane says when to come back: when one more of its waiting jobs has probably started."""

from __future__ import annotations

import copy

import pytest

from fairlane.errors import QueueFull
from fairlane.model.job import Priority
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Reserved

from .death import LONG
from .kit import UNRESERVED, Kit, Worker
from .runs import bulk

SECONDS = 6.0


async def served(kit: Kit, *, slots: int = 3, reserved: Reserved = UNRESERVED) -> Worker:
    """A worker that has finished a few jobs, each in `SECONDS`."""
    worker = await kit.worker(slots=slots, reserved=reserved, lease=LONG)
    for _ in range(3):
        await kit.enqueue()
        claimed = await worker.claim()
        kit.clock.advance(SECONDS)
        await worker.complete(*claimed)
    return worker


async def refused(kit: Kit, lane: str | None = None, priority: Priority = Priority.NORMAL) -> QueueFull:
    """Enqueue until there is no room."""
    for _ in range(10):
        try:
            await kit.enqueue(lane=lane, priority=priority)
        except QueueFull as refusal:
            return refusal
    raise AssertionError("it takes any number of jobs")


async def test_a_full_queue_has_room_when_one_of_its_servers_is_done(kit: Kit) -> None:
    await served(kit, slots=3)
    await kit.settings(max_pending=2)
    assert (await refused(kit)).retry_after == pytest.approx(SECONDS / 3)


async def test_the_limit_of_the_queue_bounds_its_servers(kit: Kit) -> None:
    await served(kit, slots=3)
    await kit.settings(max_pending=2, limit=2)
    assert (await refused(kit)).retry_after == pytest.approx(SECONDS / 2)


async def test_slots_kept_for_a_higher_class_do_not_serve_the_others(kit: Kit) -> None:
    await served(kit, slots=3, reserved=Reserved(high=1))
    await kit.settings(max_pending=2)
    assert (await refused(kit)).retry_after == pytest.approx(SECONDS / 2)
    assert (await refused(kit, priority=Priority.HIGH)).retry_after == pytest.approx(SECONDS / 3)


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_full_lane_has_room_when_one_of_its_places_is_free(kit: Kit, limit: int) -> None:
    await served(kit, slots=10)
    await kit.settings("default", LaneRule(pattern="doc", limit=limit, max_pending=3))
    assert (await refused(kit, "doc")).retry_after == pytest.approx(SECONDS / limit)


async def test_a_lane_has_no_more_places_than_there_are_servers(kit: Kit) -> None:
    await served(kit, slots=2)
    await kit.settings("default", LaneRule(pattern="doc", limit=50, max_pending=3))
    assert (await refused(kit, "doc")).retry_after == pytest.approx(SECONDS / 2)


async def test_lanes_without_a_limit_share_the_servers(kit: Kit) -> None:
    await served(kit, slots=3)
    await kit.settings("default", LaneRule(pattern="user*", max_pending=3))
    assert (await refused(kit, "user:ann")).retry_after == pytest.approx(SECONDS / 3)
    await kit.enqueue_all([*bulk(kit, "user:bob", 2), *bulk(kit, "user:cyd", 2)])
    assert (await refused(kit, "user:ann")).retry_after == pytest.approx(SECONDS)


async def test_no_retry_time_is_given_before_any_job_has_finished(kit: Kit) -> None:
    await kit.worker()
    await kit.settings("default", LaneRule(pattern="doc", max_pending=1), max_pending=2)
    assert (await refused(kit, "doc")).retry_after is None
    assert (await refused(kit)).retry_after is None


async def test_no_retry_time_is_given_without_workers_or_while_paused(kit: Kit) -> None:
    worker = await served(kit)
    await kit.settings("default", LaneRule(pattern="doc", max_pending=1, paused=True), max_pending=2)
    assert (await refused(kit, "doc")).retry_after is None
    await kit.settings(max_pending=2, paused=True, version=1)
    assert (await refused(kit)).retry_after is None
    await kit.settings(max_pending=2, version=2)
    assert (await refused(kit)).retry_after is not None
    await worker.leave()
    assert (await refused(kit)).retry_after is None


async def test_the_error_can_be_copied_to_another_process(kit: Kit) -> None:
    await served(kit)
    await kit.settings(max_pending=1)
    error = await refused(kit)
    again = copy.copy(error)
    assert (type(again), str(again), again.retry_after) == (QueueFull, str(error), error.retry_after)


async def test_coming_back_after_that_time_finds_room(kit: Kit) -> None:
    worker = await served(kit, slots=1)
    await kit.settings(max_pending=1)
    await kit.enqueue()
    running = await worker.claim()
    error = await refused(kit)
    assert error.retry_after is not None
    kit.clock.advance(error.retry_after)
    await worker.complete(*running)
    await worker.claim()
    await kit.enqueue()
