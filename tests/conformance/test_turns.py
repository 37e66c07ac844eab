"""Turns: a place in a lane for the caller's own code, started by the step that grants it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.model.job import Acceptance, Held, JobKind, JobState, NewJob, Reason
from fairlane.model.reading import Gate
from fairlane.model.settings import LaneRule

from .kit import Kit, Worker

QUEUE = "models"


async def _limit(kit: Kit, limit: int = 1, **fields: Any) -> None:
    version = fields.pop("version", 0)
    await kit.settings(QUEUE, LaneRule(pattern="flux", limit=limit, **fields), version=version)


def _request(kit: Kit, waiter: Worker, **fields: Any) -> NewJob:
    fields.setdefault("lane", "flux")
    return kit.new("turn", queue=QUEUE, kind=JobKind.TURN, waiter=waiter.id, **fields)


async def _turn(kit: Kit, waiter: Worker, **fields: Any) -> str:
    [answer] = await kit.store.enqueue([_request(kit, waiter, **fields)])
    return answer.id


async def _held(kit: Kit, id: str) -> Held:
    return Held(id, (await kit.job(id)).fence)


async def test_a_turn_in_a_free_lane_is_started_by_the_enqueue(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    [answer] = await kit.store.enqueue([_request(kit, waiter)])
    assert (answer.created, answer.state) == (True, JobState.RUNNING)
    job = await kit.job(answer.id)
    assert (job.kind, job.state, job.session) == (JobKind.TURN, JobState.RUNNING, waiter.id)
    assert job.fence >= 1
    assert job.started_at == kit.clock.now()


async def test_the_step_that_ends_one_turn_starts_the_next_for_its_own_waiter(kit: Kit) -> None:
    await _limit(kit)
    first_waiter, second_waiter = await kit.waiter(), await kit.waiter()
    first = await _turn(kit, first_waiter)
    second = await _turn(kit, second_waiter)
    assert await kit.state(second) is JobState.PENDING
    await first_waiter.complete(await _held(kit, first))
    job = await kit.job(second)
    assert (job.state, job.session) == (JobState.RUNNING, second_waiter.id)
    assert (await kit.store.admit()).repaired == 0


async def test_the_step_that_ends_a_job_starts_the_turn_behind_it_and_the_other_way_round(kit: Kit) -> None:
    await _limit(kit)
    worker, waiter = await kit.worker(QUEUE), await kit.waiter()
    before = await kit.enqueue(queue=QUEUE, lane="flux")
    turn = await _turn(kit, waiter)
    after = await kit.enqueue(queue=QUEUE, lane="flux")
    [claimed] = await worker.claim(10)
    assert claimed.id == before
    await worker.complete(claimed)
    assert await kit.state(turn) is JobState.RUNNING
    assert await worker.claim(10) == []
    await waiter.complete(await _held(kit, turn))
    assert await worker.claim_ids(10) == [after]


async def test_a_turn_is_never_claimed_by_a_worker(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    running, waiting = await _turn(kit, waiter), await _turn(kit, waiter)
    worker = await kit.worker(QUEUE)
    assert await worker.claim(10) == []
    assert [await kit.state(id) for id in (running, waiting)] == [JobState.RUNNING, JobState.PENDING]


async def test_a_lane_with_more_places_runs_several_turns_at_once(kit: Kit) -> None:
    await _limit(kit, 2)
    waiter = await kit.waiter()
    turns = [await _turn(kit, waiter) for _ in range(3)]
    assert [await kit.state(id) for id in turns] == [JobState.RUNNING, JobState.RUNNING, JobState.PENDING]


async def test_raising_the_limit_starts_turns_in_the_same_step(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    turns = [await _turn(kit, waiter) for _ in range(3)]
    await _limit(kit, 2, version=1)
    assert [await kit.state(id) for id in turns] == [JobState.RUNNING, JobState.RUNNING, JobState.PENDING]


async def test_a_turn_in_a_paused_lane_waits_and_starts_when_it_is_resumed(kit: Kit) -> None:
    await _limit(kit, paused=True)
    waiter = await kit.waiter()
    turn = await _turn(kit, waiter)
    position = await kit.positions(turn)
    assert position is not None
    assert position.gate is Gate.LANE_PAUSED
    await _limit(kit, version=1)
    assert await kit.state(turn) is JobState.RUNNING


@pytest.mark.parametrize("left", [False, True])
async def test_a_waiter_that_is_gone_loses_its_turns_and_the_lane_is_handed_on(kit: Kit, left: bool) -> None:
    await _limit(kit)
    gone, stays = await kit.waiter(), await kit.waiter()
    running = await _turn(kit, gone)
    waiting = await _turn(kit, gone)
    next_one = await _turn(kit, stays)
    if left:
        await gone.leave()
    else:
        kit.clock.advance(16)
        await stays.renew()
        rescued = await kit.store.rescue()
        assert rescued.declared == (gone.id,)
        assert (rescued.retried, rescued.failed, rescued.cancelled) == (0, 0, 2)
    for id in (running, waiting):
        job = await kit.job(id)
        assert (job.state, job.reason) == (JobState.CANCELLED, Reason.WAITER_GONE)
    job = await kit.job(next_one)
    assert (job.state, job.session) == (JobState.RUNNING, stays.id)
    assert (await kit.store.admit()).repaired == 0


@pytest.mark.parametrize("rule", [None, LaneRule(pattern="flux", weight=2)])
async def test_a_turn_in_a_lane_without_a_limit_is_refused_naming_the_call_that_sets_one(
    kit: Kit, rule: LaneRule | None
) -> None:
    await kit.settings(QUEUE, *([rule] if rule else []))
    waiter = await kit.waiter()
    request = _request(kit, waiter)
    with pytest.raises(InvalidInput) as refused:
        await kit.store.enqueue([request])
    assert ".lane(" in str(refused.value)
    assert "limit=" in str(refused.value)
    assert await kit.store.get([request.id]) == [None]


async def test_a_turn_for_a_waiter_that_is_unknown_or_gone_is_refused(kit: Kit) -> None:
    await _limit(kit)
    gone = await kit.waiter()
    await gone.leave()
    stranger = kit.new("turn", queue=QUEUE, lane="flux", kind=JobKind.TURN, waiter="nobody")
    for request in (_request(kit, gone), stranger):
        with pytest.raises(InvalidInput) as refused:
            await kit.store.enqueue([request])
        assert refused.value.field == "waiter"
        assert await kit.store.get([request.id]) == [None]


async def test_a_turn_is_never_retried(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    turn = await _turn(kit, waiter, retries=5)
    with suppress(InvalidInput):
        await waiter.retry(await _held(kit, turn), delay=5)
    assert await kit.state(turn) not in (JobState.SCHEDULED, JobState.PENDING)


async def test_a_turn_whose_body_failed_is_failed_and_hands_the_lane_on(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    first, second = await _turn(kit, waiter, retries=5), await _turn(kit, waiter)
    await waiter.fail(await _held(kit, first))
    assert [await kit.state(id) for id in (first, second)] == [JobState.FAILED, JobState.RUNNING]


async def test_waiting_turns_have_a_place_in_their_lane_and_a_running_one_has_none(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    running, *waiting = [await _turn(kit, waiter) for _ in range(4)]
    assert await kit.positions(running) is None
    positions = [await kit.positions(id) for id in waiting]
    assert [s and (s.place, s.ahead, s.of, s.gate) for s in positions] == [
        (1, 0, 3, Gate.LANE),
        (2, 1, 3, Gate.LANE),
        (3, 2, 3, Gate.LANE),
    ]


async def test_a_running_turn_does_not_count_against_the_limit_of_its_queue(kit: Kit) -> None:
    await kit.settings(QUEUE, LaneRule(pattern="flux", limit=1), limit=1)
    waiter = await kit.waiter()
    turn = await _turn(kit, waiter)
    assert await kit.state(turn) is JobState.RUNNING
    job = await kit.enqueue(queue=QUEUE, lane="other")
    worker = await kit.worker(QUEUE)
    assert await worker.claim_ids(10) == [job]


async def test_a_queue_at_its_limit_does_not_hold_a_turn_back(kit: Kit) -> None:
    await kit.settings(QUEUE, LaneRule(pattern="flux", limit=1), limit=1)
    await kit.enqueue(queue=QUEUE, lane="other")
    worker = await kit.worker(QUEUE)
    assert len(await worker.claim(10)) == 1
    turn = await _turn(kit, await kit.waiter())
    assert await kit.state(turn) is JobState.RUNNING


async def test_renewing_without_naming_a_turn_does_not_take_it_back(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    turn = await _turn(kit, waiter)
    renewal = await waiter.renew(claim=0)
    assert (renewal.taken_back, renewal.lost, renewal.cancel) == ((), (), ())
    named = await waiter.renew(await _held(kit, turn), claim=0)
    assert named.lost == ()
    assert await kit.state(turn) is JobState.RUNNING


async def test_cancelling_a_waiting_turn_is_final_and_a_running_one_is_asked_to_stop(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    running, waiting, last = [await _turn(kit, waiter) for _ in range(3)]
    assert await kit.store.cancel([running, waiting]) == [JobState.RUNNING, JobState.CANCELLED]
    held = await _held(kit, running)
    assert (await waiter.renew(held, claim=0)).cancel == (running,)
    assert await kit.state(last) is JobState.PENDING, "the lane stays taken until the body has ended"
    await waiter.fail(held)
    assert await kit.state(running) is JobState.CANCELLED
    assert await kit.state(last) is JobState.RUNNING


async def test_a_turn_that_waited_too_long_expires(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    first = await _turn(kit, waiter, expires=60)
    second = await _turn(kit, waiter, expires=5)
    kit.clock.advance(6)
    assert (await kit.store.promote()).expired == 1
    job = await kit.job(second)
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.EXPIRED)
    assert await kit.state(first) is JobState.RUNNING


async def test_an_expired_turn_is_not_started_by_the_step_that_would_grant_it(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    first = await _turn(kit, waiter)
    late = await _turn(kit, waiter, expires=5)
    last = await _turn(kit, waiter)
    kit.clock.advance(6)
    await waiter.complete(await _held(kit, first))
    await kit.store.promote()
    assert (await kit.job(late)).reason is Reason.EXPIRED
    assert await kit.state(last) is JobState.RUNNING


async def test_only_its_waiter_may_end_a_turn(kit: Kit) -> None:
    await _limit(kit)
    waiter, stranger = await kit.waiter(), await kit.waiter()
    turn = await _turn(kit, waiter)
    finished = await stranger.complete(await _held(kit, turn))
    assert [verdict.acceptance for verdict in finished.verdicts] == [Acceptance.STALE]
    assert await kit.state(turn) is JobState.RUNNING


async def test_asking_for_the_same_turn_twice_is_one_turn(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    request = _request(kit, waiter)
    answers = [(await kit.store.enqueue([request]))[0] for _ in range(2)]
    assert [answer.created for answer in answers] == [True, False]
    assert (await kit.job(request.id)).fence == 1


async def test_turns_are_counted_as_running_and_waiting_in_their_lane(kit: Kit) -> None:
    await _limit(kit)
    waiter = await kit.waiter()
    for _ in range(3):
        await _turn(kit, waiter)
    [lane] = await kit.store.lanes(QUEUE)
    assert (lane.lane, lane.running, lane.pending) == ("flux", 1, 2)
