"""Corners where two rules meet: each of these once went wrong, or nearly."""

from __future__ import annotations

import pytest

from fairlane.errors import Conflict, QueueFull
from fairlane.model.job import JobKind, JobState, NewJob, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from fairlane.model.states import complete

from .kit import Kit


def rule(pattern: str = "l", *, limit: int | None = 1, ordered: bool | None = None) -> LaneRule:
    return LaneRule(pattern=pattern, limit=limit, ordered=ordered)


async def test_a_job_and_the_clean_up_behind_it_expire_in_one_pass(kit: Kit) -> None:
    worker = await kit.worker(slots=5)
    await kit.enqueue(sticky="plan", expires=5)
    tidy = NewJob(id="tidy", task="tidy", kind=JobKind.CLEANUP, expires=6)
    await kit.store.release("default", "plan", tidy)
    kit.clock.advance(10)
    await kit.store.promote()
    later = await kit.enqueue(worker=worker.session.index)
    assert await worker.claim_ids(5) == [later]
    assert (await kit.store.recount()).differences == ()


async def test_a_place_moves_on_from_a_job_that_lost_its_worker(kit: Kit) -> None:
    await kit.settings("default", rule(ordered=False))
    await kit.worker(pool="p", lease=5)
    worker = await kit.worker(lease=10_000)
    await kit.enqueue(sticky="x", pool="p", lane="l")
    free = await kit.enqueue(lane="l")
    kit.clock.advance(6)
    await kit.store.rescue()
    kit.clock.advance(3)
    await kit.store.admit()
    assert await worker.claim_ids(5) == [free]


async def test_a_full_queue_does_not_keep_a_worker_from_joining_a_broadcast(kit: Kit) -> None:
    await kit.settings(max_pending=1)
    await kit.enqueue(id="news", kind=JobKind.BROADCAST, ttl=100)
    waiting = await kit.enqueue()
    with pytest.raises(QueueFull):
        await kit.enqueue()
    worker = await kit.worker()
    assert set(await worker.claim_ids(5)) == {"news/0", waiting}


async def test_places_that_cannot_move_do_not_hide_one_that_can(kit: Kit) -> None:
    await kit.settings("default", rule("o:*"), rule(ordered=False))
    worker = await kit.worker(lease=10_000)
    await kit.enqueue_all([kit.new(lane=f"o:{number}", worker=7) for number in range(100)])
    kit.clock.advance(0.1)
    await kit.enqueue(lane="l", worker=7)
    await kit.enqueue_all([kit.new(lane="l", worker=8) for _ in range(150)])
    free = await kit.enqueue(lane="l")
    kit.clock.advance(3)
    assert (await kit.store.admit(limit=50)).moved == 1
    assert await worker.claim_ids(5) == [free]


async def test_a_claim_cancels_only_so_many_expired_jobs(kit: Kit) -> None:
    await kit.enqueue_all([kit.new(expires=1) for _ in range(1_000)])
    kit.clock.advance(2)
    worker = await kit.worker()
    assert await worker.claim_ids(1) == []
    [queue] = await kit.store.queues()
    assert 0 < queue.counts.cancelled < 500


async def test_an_expired_head_gives_no_other_lane_a_second_turn(kit: Kit) -> None:
    await kit.enqueue(lane="a", expires=1)
    for id, lane in (("b1", "b"), ("b2", "b"), ("c1", "c")):
        await kit.enqueue(id=id, lane=lane)
    kit.clock.advance(2)
    worker = await kit.worker()
    assert set(await worker.claim_ids(2)) == {"b1", "c1"}


async def test_a_turn_takes_no_slot_even_of_a_worker_that_waits_for_it(kit: Kit) -> None:
    await kit.settings("default", rule())
    worker = await kit.worker(slots=1)
    turn = await kit.enqueue(kind=JobKind.TURN, lane="l", waiter=worker.id)
    job = await kit.enqueue()
    assert await kit.state(turn) is JobState.RUNNING
    assert await worker.claim_ids(1) == [job]


async def test_a_copy_of_a_broadcast_runs_once_on_an_index_even_when_it_was_pruned(kit: Kit) -> None:
    worker = await kit.worker(index=0)
    await kit.enqueue(id="news", kind=JobKind.BROADCAST, ttl=1_000)
    await worker.complete(*await worker.claim(5))
    kit.clock.advance(1)
    await kit.store.prune(Retention(completed_seconds=0))
    await worker.leave()
    assert await (await kit.worker(index=0)).claim_ids(5) == []


async def test_the_ids_of_a_broadcast_s_copies_must_be_free(kit: Kit) -> None:
    await kit.worker()
    await kit.enqueue(id="news/0")
    with pytest.raises(Conflict):
        await kit.enqueue(id="news", kind=JobKind.BROADCAST)
    assert await kit.store.get(["news"]) == [None]


async def test_a_unique_value_is_held_for_its_time_even_when_its_job_was_pruned(kit: Kit) -> None:
    worker = await kit.worker()
    first = await kit.enqueue(unique="v", unique_for=100_000)
    await worker.complete(*await worker.claim())
    kit.clock.advance(1)
    await kit.store.prune(Retention(completed_seconds=0))
    [again] = await kit.store.enqueue([kit.new(unique="v", unique_for=100_000)])
    assert (again.id, again.created, again.state) == (first, False, JobState.COMPLETED)


async def test_an_ordered_lane_keeps_its_order_when_its_limit_was_lowered_meanwhile(kit: Kit) -> None:
    await kit.settings("default", rule(limit=2, ordered=True))
    worker = await kit.worker()
    for id in ("a", "b"):
        await kit.enqueue(id=id, lane="l")
    first, second = await worker.claim(2)
    await kit.settings("default", rule(limit=1, ordered=True), version=1)
    await worker.hand_back(first)
    await worker.hand_back(second)
    assert await worker.claim_ids(2) == ["a"]


async def test_a_lane_that_becomes_ordered_goes_by_arrival_from_then_on(kit: Kit) -> None:
    await kit.settings("default", rule(ordered=False))
    low = await kit.enqueue(lane="l", priority=Priority.LOW)
    await kit.enqueue(lane="l", priority=Priority.HIGH)
    await kit.settings("default", rule(ordered=True), version=1)
    assert await (await kit.worker()).claim_ids(1) == [low]


async def test_a_lane_that_is_no_longer_ordered_does_not_wait_for_a_retry(kit: Kit) -> None:
    await kit.settings("default", rule(ordered=True))
    worker = await kit.worker()
    await kit.enqueue(lane="l")
    behind = await kit.enqueue(lane="l")
    await worker.retry(*await worker.claim(), delay=3_600)
    assert await worker.claim_ids() == []
    await kit.settings("default", rule(ordered=False), version=1)
    assert await worker.claim_ids() == [behind]


async def test_a_turn_that_has_expired_is_not_started_by_a_place_that_moves(kit: Kit) -> None:
    await kit.settings("default", rule(ordered=False))
    waiter = await kit.waiter(lease=10_000)
    await kit.enqueue(lane="l", worker=7)
    turn = await kit.enqueue(kind=JobKind.TURN, lane="l", waiter=waiter.id, expires=1)
    kit.clock.advance(3)
    await kit.store.admit()
    assert await kit.state(turn) is JobState.PENDING
    await kit.store.promote()
    assert await kit.state(turn) is JobState.CANCELLED


async def test_jobs_that_no_worker_can_take_yet_count_against_a_full_lane(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="l", max_pending=2))
    for _ in range(2):
        await kit.enqueue(lane="l", sticky="plan")
    with pytest.raises(QueueFull):
        await kit.enqueue(lane="l", sticky="plan")


async def test_pruning_by_number_keeps_that_number(kit: Kit) -> None:
    worker = await kit.worker()
    ids = [await kit.enqueue() for _ in range(10)]
    await worker.complete(*await worker.claim(10))
    await kit.store.prune(Retention(completed_count=5))
    assert [job is not None for job in await kit.store.get(ids)] == [False] * 5 + [True] * 5


async def test_a_repeated_release_with_a_clean_up_that_was_cancelled_is_refused(kit: Kit) -> None:
    await kit.worker()
    await kit.enqueue(sticky="plan")
    tidy = NewJob(id="tidy", task="tidy", kind=JobKind.CLEANUP)
    await kit.store.release("default", "plan", tidy)
    await kit.enqueue(sticky="plan")
    with pytest.raises(Conflict):
        await kit.store.release("default", "plan", tidy)


async def test_workers_with_jobs_in_their_inbox_are_notified_of_room_in_a_limited_queue(kit: Kit) -> None:
    await kit.settings(limit=1)
    worker = await kit.worker()
    other = await kit.worker("elsewhere")
    await kit.enqueue(id="first")
    [first] = await worker.claim(1, Ask("default", Priority.NORMAL, 1))
    await kit.enqueue(worker=other.session.index)
    subscription = kit.store.wakeups.subscribe([f"worker:{other.name}"])
    try:
        await worker.retry(first, delay=60)
        assert await subscription.wait(5) == {f"worker:{other.name}"}
    finally:
        subscription.close()


@pytest.mark.parametrize(
    "result",
    [None, b"", b"null", b'"a cat"', '"eine Größe"'.encode(), b'"\\u0000"', b"\x00\xff", b'"' + b"x" * 100_000 + b'"'],
    ids=["none", "empty", "null", "text", "umlaut", "escaped", "bytes", "long"],
)
async def test_a_result_comes_out_as_it_went_in_alone_and_among_others(kit: Kit, result: bytes | None) -> None:
    worker = await kit.worker(slots=3)
    ids = [await kit.enqueue() for _ in range(3)]
    first, second, third = await worker.claim(3)
    await worker.finish(complete(first.held, b"1"), complete(second.held, result), complete(third.held, None))
    assert [(await kit.job(id)).result for id in ids] == [b"1", result, None]


async def test_two_places_given_back_at_once_to_a_lane_that_has_one_now_are_one_place(kit: Kit) -> None:
    await kit.settings("default", rule(limit=2, ordered=True))
    worker = await kit.worker()
    ids = [await kit.enqueue(lane="l") for _ in range(5)]
    running = await worker.claim(5)
    assert len(running) == 2
    await kit.settings("default", rule(limit=1, ordered=True), version=1)
    await worker.complete(*running)
    assert await worker.claim_ids(5) == [ids[2]]
    assert (await kit.store.recount()).differences == ()
