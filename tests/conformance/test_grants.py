"""A limited lane's places: every way out hands the place on in the same step, with nothing to repair."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from fairlane.model.job import Claimed, JobState, Priority, Reason
from fairlane.model.reading import Gate
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from fairlane.model.states import cancel, complete, snooze

from .kit import Kit, Worker

Way = Callable[[Kit, Worker, Claimed], Awaitable[object]]


async def _complete(kit: Kit, worker: Worker, job: Claimed) -> None:
    await worker.complete(job)


async def _fail(kit: Kit, worker: Worker, job: Claimed) -> None:
    await worker.fail(job)


async def _cancel(kit: Kit, worker: Worker, job: Claimed) -> None:
    await kit.store.cancel([job.id])
    await worker.finish(cancel(job.held))


async def _cancel_and_raise(kit: Kit, worker: Worker, job: Claimed) -> None:
    await kit.store.cancel([job.id])
    await worker.retry(job, delay=60)


async def _cancel_and_return(kit: Kit, worker: Worker, job: Claimed) -> None:
    await kit.store.cancel([job.id])
    await worker.complete(job)


async def _cancel_and_hand_back(kit: Kit, worker: Worker, job: Claimed) -> None:
    await kit.store.cancel([job.id])
    await worker.hand_back(job)


async def _leave_as_after_a_crash(kit: Kit, worker: Worker, job: Claimed) -> None:
    await kit.store.leave(worker.id, begun=[job.held])


async def _cancel_and_take_back(kit: Kit, worker: Worker, job: Claimed) -> None:
    await kit.store.cancel([job.id])
    await worker.renew()


async def _die(kit: Kit, worker: Worker, job: Claimed) -> None:
    kit.clock.advance(16)
    await kit.store.rescue()


async def _retry(kit: Kit, worker: Worker, job: Claimed) -> None:
    await worker.retry(job, delay=60)


async def _snooze(kit: Kit, worker: Worker, job: Claimed) -> None:
    await worker.finish(snooze(job.held, 60))


FINAL_WAYS: list[Way] = [
    _complete,
    _fail,
    _cancel,
    _cancel_and_raise,
    _cancel_and_return,
    _cancel_and_hand_back,
    _cancel_and_take_back,
    _leave_as_after_a_crash,
    _die,
]


async def _hands_on(kit: Kit, way: Way, *, ordered: bool) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=ordered))
    first = await kit.enqueue(lane="lane", retries=0 if way in FINAL_WAYS else 3)
    second = await kit.enqueue(lane="lane")
    worker = await kit.worker()
    [claimed] = await worker.claim(10)
    assert claimed.id == first
    await way(kit, worker, claimed)
    assert await kit.state(first) is not JobState.RUNNING
    other = await kit.worker()
    assert await other.claim_ids(10) == [second]
    assert (await kit.store.admit()).repaired == 0
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("way", FINAL_WAYS)
async def test_every_end_of_a_running_job_hands_its_place_on(kit: Kit, way: Way, ordered: bool) -> None:
    await _hands_on(kit, way, ordered=ordered)


@pytest.mark.parametrize("way", [_retry, _snooze])
async def test_waiting_to_run_again_hands_the_place_of_an_unordered_lane_on(kit: Kit, way: Way) -> None:
    await _hands_on(kit, way, ordered=False)


async def test_a_job_handed_back_to_an_unordered_lane_starts_next(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=False))
    first = await kit.enqueue(lane="lane")
    await kit.enqueue(lane="lane")
    worker = await kit.worker()
    await worker.hand_back(*await worker.claim(10))
    assert await worker.claim_ids(10) == [first]
    assert (await kit.store.admit()).repaired == 0


@pytest.mark.parametrize("ordered", [True, False])
async def test_cancelling_an_unstarted_job_passes_its_place_on(kit: Kit, ordered: bool) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=ordered))
    first, second = [await kit.enqueue(lane="lane") for _ in range(2)]
    await kit.store.cancel([first])
    worker = await kit.worker()
    assert await worker.claim_ids(10) == [second]
    assert (await kit.store.admit()).repaired == 0


@pytest.mark.parametrize("ordered", [True, False])
async def test_the_expiry_of_an_unstarted_job_passes_its_place_on(kit: Kit, ordered: bool) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=ordered))
    first = await kit.enqueue(lane="lane", expires=5)
    second = await kit.enqueue(lane="lane")
    kit.clock.advance(6)
    assert (await kit.store.promote()).expired == 1
    worker = await kit.worker()
    assert (await kit.job(first)).reason is Reason.EXPIRED
    assert await worker.claim_ids(10) == [second]
    assert (await kit.store.admit()).repaired == 0


async def test_a_claim_that_meets_an_expired_job_hands_its_place_on(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    first = await kit.enqueue(lane="lane", expires=5)
    second = await kit.enqueue(lane="lane")
    kit.clock.advance(6)
    worker = await kit.worker()
    # The claim may start the next job itself, or leave that to the next call, for which it sends a hint.
    started = await worker.claim_ids(10) or await worker.claim_ids(10)
    assert started == [second]
    assert (await kit.job(first)).reason is Reason.EXPIRED
    assert (await kit.store.admit()).repaired == 0


async def test_the_call_that_completes_a_job_can_start_the_next_of_its_lane(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    ids = [await kit.enqueue(lane="lane") for _ in range(2)]
    worker = await kit.worker(slots=1)
    [claimed] = await worker.claim()
    call = Claim(number=kit.number(), asks=(Ask("default", Priority.NORMAL, 1),), total=1)
    finished = await kit.store.finish(worker.id, [complete(claimed.held)], claim=call)
    assert [job.id for job in finished.claimed] == ids[1:]


async def test_a_running_job_that_was_asked_to_stop_keeps_its_place_until_it_has_ended(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    ids = [await kit.enqueue(lane="lane") for _ in range(2)]
    worker = await kit.worker()
    [claimed] = await worker.claim(10)
    assert await kit.store.cancel([ids[0]]) == [JobState.RUNNING]
    assert await worker.claim(10) == []
    await worker.finish(cancel(claimed.held))
    assert await worker.claim_ids(10) == ids[1:]


async def test_an_arriving_higher_class_takes_a_place_that_has_not_started(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=2))
    older, newer = [await kit.enqueue(lane="lane") for _ in range(2)]
    high = await kit.enqueue(lane="lane", priority=Priority.HIGH)
    position = await kit.positions(newer)
    assert position is not None
    assert position.gate is Gate.LANE
    worker = await kit.worker()
    assert await worker.claim_ids(10) == [high, older]


async def test_the_lowest_class_yields_first(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=2))
    low = await kit.enqueue(lane="lane", priority=Priority.LOW)
    normal = await kit.enqueue(lane="lane")
    high = await kit.enqueue(lane="lane", priority=Priority.HIGH)
    worker = await kit.worker()
    claimed = await worker.claim(10)
    assert [job.id for job in claimed] == [high, normal]
    await worker.complete(*claimed)
    assert await worker.claim_ids(10) == [low]


async def test_a_running_job_keeps_its_place_and_an_equal_class_takes_none(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=2))
    worker = await kit.worker()
    low = await kit.enqueue(lane="lane", priority=Priority.LOW)
    assert await worker.claim_ids(1) == [low]
    high = await kit.enqueue(lane="lane", priority=Priority.HIGH)
    await kit.enqueue(lane="lane", priority=Priority.HIGH)
    assert await worker.claim_ids(10) == [high]
    assert await kit.state(low) is JobState.RUNNING


async def test_lowering_a_limit_takes_back_the_newest_unstarted_places(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=3))
    ids = [await kit.enqueue(lane="lane") for _ in range(4)]
    await kit.settings("default", LaneRule(pattern="lane", limit=2, ordered=False), version=1)
    worker = await kit.worker()
    assert sorted(await worker.claim_ids(10)) == sorted(ids[:2])
    assert (await kit.store.admit()).repaired == 0


async def test_lowering_a_limit_below_what_runs_starts_nothing_until_there_is_room(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=3))
    ids = [await kit.enqueue(lane="lane") for _ in range(5)]
    worker = await kit.worker()
    claimed = await worker.claim(10)
    assert len(claimed) == 3
    await kit.settings("default", LaneRule(pattern="lane", limit=2), version=1)
    await worker.complete(claimed[0])
    assert await worker.claim(10) == []
    await worker.complete(claimed[1])
    assert await worker.claim_ids(10) == [ids[3]]
    assert (await kit.store.admit()).repaired == 0


async def test_raising_a_limit_hands_out_places_at_once(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=False))
    ids = [await kit.enqueue(lane="lane") for _ in range(4)]
    worker = await kit.worker()
    assert await worker.claim_ids(10) == ids[:1]
    await kit.settings("default", LaneRule(pattern="lane", limit=3), version=1)
    assert sorted(await worker.claim_ids(10)) == sorted(ids[1:3])
    await kit.settings("default", version=2)
    assert await worker.claim_ids(10) == ids[3:]
    assert (await kit.store.admit()).repaired == 0


async def test_a_limit_given_to_a_lane_that_had_none_counts_what_runs_already(kit: Kit) -> None:
    ids = [await kit.enqueue(lane="lane") for _ in range(4)]
    worker = await kit.worker()
    claimed = await worker.claim(2)
    await kit.settings("default", LaneRule(pattern="lane", limit=2))
    assert await worker.claim(10) == []
    await worker.complete(claimed[0])
    assert await worker.claim_ids(10) == [ids[2]]


@pytest.mark.parametrize("others", [0, 1])
async def test_a_claim_that_meets_an_expired_job_goes_on_with_the_next_of_its_lane_in_another_class(
    kit: Kit, others: int
) -> None:
    await kit.settings("default", LaneRule(pattern="cap", limit=1, ordered=False))
    worker = await kit.worker(slots=4)
    jobs = [kit.new(lane="cap"), kit.new(lane="cap", priority=Priority.HIGH, expires=4.0)]
    await kit.store.enqueue([*jobs, *(kit.new(priority=Priority.HIGH) for _ in range(others))])
    kit.clock.advance(6)
    claimed = await worker.claim_ids(5)
    # The one of high priority had the place, and gives it up in the claim that finds it too late.
    assert claimed[-1] == jobs[0].id
    assert len(claimed) == 1 + others
    assert await kit.state(jobs[1].id) is JobState.CANCELLED
