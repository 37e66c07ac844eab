"""Jobs of tasks that a worker does not know: returned uncharged, offered again later, failed only after a day."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.model.binding import BindingState
from fairlane.model.job import Acceptance, Claimed, JobKind, JobState, Priority, Reason, Verdict
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Gate, JobPosition
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from fairlane.model.states import (
    LONGEST_DECLINE,
    SHORTEST_DECLINE,
    UNKNOWN_TASK_SECONDS,
    complete,
    decline_delay,
    snooze,
)

from .kit import Kit, Worker

KEEP_NOTHING = Retention(completed_seconds=0, failed_seconds=0, history_seconds=0, id_seconds=0)


async def _position_of(kit: Kit, id: str) -> JobPosition:
    position = await kit.positions(id)
    assert position is not None
    return position


async def _old(kit: Kit, *queues: str, **fields: Any) -> Worker:
    """A worker that knows another task than the one in question."""
    return await kit.worker(*queues, tasks=("other",), **fields)


async def _new(kit: Kit, *queues: str, **fields: Any) -> Worker:
    """A worker that knows both tasks."""
    return await kit.worker(*queues, tasks=("other", "task"), **fields)


async def _offered_again(kit: Kit, worker: Worker, id: str) -> Claimed:
    """Wait until a bound job is due, and claim it."""
    due = (await kit.job(id)).due_at
    assert due is not None
    kit.clock.advance(due - kit.clock.now())
    await kit.store.promote()
    [job] = await worker.claim()
    assert job.id == id
    return job


async def test_a_declined_job_waits_uncharged_for_a_worker_that_knows_its_task(kit: Kit) -> None:
    old, older = await _old(kit), await _old(kit)
    id = await kit.enqueue()
    arrival = (await kit.job(id)).arrival
    [job] = await old.claim()

    finished = await old.decline(job)

    assert finished.verdicts == (Verdict(id, Acceptance.APPLIED, JobState.PENDING),)
    seen = await kit.job(id)
    assert (seen.state, seen.attempt, seen.reason, seen.error) == (JobState.PENDING, 0, None, None)
    assert (seen.arrival, seen.worker, seen.due_at) == (arrival, old.name, None)
    [attempt] = seen.attempts
    assert (attempt.outcome, attempt.reason, attempt.state) == ("declined", Reason.UNKNOWN_TASK, JobState.PENDING)
    kit.clock.advance(10)
    await kit.store.promote()
    await kit.store.admit()
    assert await old.claim(10) == await older.claim(10) == []
    elsewhere = await _new(kit, "elsewhere")
    assert await elsewhere.claim(10) == []
    assert (await kit.store.recount()).differences == ()

    new = await _new(kit)
    [again] = await new.claim()
    assert (again.id, again.attempt, again.fence) == (id, 1, 2)
    await new.complete(again)
    assert [a.outcome for a in (await kit.job(id)).attempts] == ["declined", "completed"]
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("ends", [True, False])
async def test_it_is_claimed_in_the_call_that_ends_or_puts_off_another_and_in_its_class(kit: Kit, ends: bool) -> None:
    old, new = await _old(kit), await _new(kit, slots=1)
    for name, priority in (("low", Priority.LOW), ("high", Priority.HIGH)):
        await kit.enqueue(id=name, priority=priority)
    await old.decline(*await old.claim(2))
    [first] = await new.claim()
    ending = complete(first.held) if ends else snooze(first.held, 60.0)
    finished = await kit.store.finish(new.id, [ending], claim=new.everything(1))
    assert [first.id, *(job.id for job in finished.claimed)] == ["high", "low"]


async def test_it_is_claimed_in_the_call_that_puts_off_a_job_of_another_queue(kit: Kit) -> None:
    old, new = await _old(kit, "first"), await _new(kit, "second", "first", slots=1)
    await kit.enqueue(id="declined", queue="first")
    await old.decline(*await old.claim())
    await kit.enqueue(id="put off", queue="second")
    [job] = await new.claim()
    finished = await kit.store.finish(new.id, [snooze(job.held, 60.0)], claim=new.everything(1))
    assert {job.id, *(each.id for each in finished.claimed)} == {"declined", "put off"}
    assert (await kit.store.recount()).differences == ()


async def test_a_retry_is_offered_to_every_session_again(kit: Kit) -> None:
    old, new = await _old(kit), await _new(kit)
    id = await kit.enqueue()
    await old.decline(*await old.claim())
    await new.retry(*await new.claim())
    assert await old.claim_ids() == [id]


async def test_a_paused_queue_and_its_limit_hold_declined_jobs_too(kit: Kit) -> None:
    await kit.settings(limit=1)
    old, new = await _old(kit), await _new(kit)
    id = await kit.enqueue()
    await old.decline(*await old.claim())
    await kit.enqueue("other")
    [running] = await old.claim(10)
    assert await new.claim(10) == []
    await old.complete(running)
    await kit.settings(limit=1, paused=True, version=1)
    assert await new.claim(10) == []
    await kit.settings(limit=1, version=2)
    assert await new.claim_ids(10) == [id]


async def test_repeating_a_decline_is_answered_and_a_stranger_is_refused(kit: Kit) -> None:
    worker, other = await _old(kit), await _old(kit)
    id = await kit.enqueue()
    [job] = await worker.claim()
    await worker.decline(job)
    [repeated] = (await worker.decline(job)).verdicts
    [stale] = (await other.decline(job)).verdicts
    assert (repeated.acceptance, repeated.state) == (Acceptance.REPEATED, JobState.PENDING)
    assert stale.acceptance is Acceptance.STALE
    [attempt] = (await kit.job(id)).attempts
    assert attempt.refused == 1


async def test_a_bound_job_is_left_alone_for_longer_each_time_within_a_bound(kit: Kit) -> None:
    worker = await kit.worker(index=0)
    id = await kit.enqueue(worker=0)
    [job] = await worker.claim()
    began, delays = kit.clock.now(), []
    for _ in range(20):
        await worker.decline(job)
        due = (await kit.job(id)).due_at
        assert due is not None
        delays.append(due - kit.clock.now())
        assert delays[-1] == pytest.approx(decline_delay(kit.clock.now() - began), abs=1e-3)
        job = await _offered_again(kit, worker, id)
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(LONGEST_DECLINE)
    assert job.attempt == 1


async def test_of_declines_in_a_row_the_history_keeps_the_first_and_the_last(kit: Kit) -> None:
    worker = await kit.worker(lease=10_000, index=0)
    id = await kit.enqueue(retries=5, worker=0)
    [job] = await worker.claim()
    await worker.retry(job)
    [job] = await worker.claim()
    for _ in range(25):
        await worker.decline(job)
        job = await _offered_again(kit, worker, id)
    await worker.retry(job)
    seen = await kit.job(id)
    assert [a.outcome for a in seen.attempts] == ["retry", "declined", "declined", "retry"]
    assert [a.fence for a in seen.attempts] == [1, 2, 26, 27]
    assert seen.attempt == 2


async def test_it_fails_as_unknown_task_once_its_patience_is_over(kit: Kit) -> None:
    worker = await _old(kit, lease=UNKNOWN_TASK_SECONDS * 4)
    id = await kit.enqueue()
    kit.clock.advance(UNKNOWN_TASK_SECONDS * 2)  # from the first decline on, not from its creation
    await worker.decline(*await worker.claim())
    kit.clock.advance(UNKNOWN_TASK_SECONDS - 1)
    await kit.store.admit()
    assert await worker.claim() == []
    kit.clock.advance(1)
    await kit.store.admit()
    [job] = await worker.claim()

    [verdict] = (await worker.decline(job)).verdicts

    assert verdict.state is JobState.FAILED
    seen = await kit.job(id)
    assert (seen.state, seen.reason, seen.error) == (JobState.FAILED, Reason.UNKNOWN_TASK, "no such task")
    assert (seen.error_group, seen.attempt) == ("unknown_task", 0)
    assert [a.outcome for a in seen.attempts] == ["declined", "declined"]
    [repeated] = (await worker.decline(job)).verdicts
    assert (repeated.acceptance, repeated.state) == (Acceptance.REPEATED, JobState.FAILED)
    assert await kit.store.declined() == []
    assert (await kit.store.recount()).differences == ()


async def test_when_its_patience_is_over_a_worker_that_knows_it_may_still_run_it(kit: Kit) -> None:
    worker = await _old(kit, lease=UNKNOWN_TASK_SECONDS * 4)
    id = await kit.enqueue()
    await worker.decline(*await worker.claim())
    kit.clock.advance(UNKNOWN_TASK_SECONDS * 2)
    await kit.store.admit()
    new = await _new(kit)
    [job] = await new.claim()
    await new.complete(job)
    assert await kit.state(id) is JobState.COMPLETED


async def test_without_patience_the_first_decline_fails_it(kit: Kit) -> None:
    worker = await kit.worker()
    id = await kit.enqueue()
    await worker.decline(*await worker.claim(), patience=0)
    assert (await kit.job(id)).reason is Reason.UNKNOWN_TASK


@pytest.mark.parametrize("way", ["retry", "snooze", "crash"])
async def test_a_run_in_between_makes_the_next_decline_a_first_one(kit: Kit, way: str) -> None:
    old, new = await _old(kit, lease=10_000), await _new(kit, lease=10_000)
    id = await kit.enqueue()
    await old.decline(*await old.claim(), patience=50)
    kit.clock.advance(100)
    [job] = await new.claim()
    if way == "crash":
        await new.leave(job.held)
    else:
        await new.finish(snooze(job.held, 0)) if way == "snooze" else await new.retry(job)
    [verdict] = (await old.decline(*await old.claim(), patience=50)).verdicts
    assert verdict.state is JobState.PENDING
    assert [declined.since for declined in await kit.store.declined()] == [pytest.approx(kit.clock.now())]
    assert not (await kit.job(id)).state.final


async def test_a_claim_whose_answer_was_lost_does_not_count_as_a_run(kit: Kit) -> None:
    old, new = await _old(kit, lease=10_000), await _new(kit, lease=10_000)
    id = await kit.enqueue()
    await old.decline(*await old.claim())
    kit.clock.advance(100)
    await new.claim()
    assert (await new.renew()).taken_back == (id,)
    [verdict] = (await old.decline(*await old.claim(), patience=50)).verdicts
    assert verdict.state is JobState.FAILED


async def test_a_claim_for_the_inbox_alone_finds_it(kit: Kit) -> None:
    old, new, elsewhere = await _old(kit), await _new(kit), await _new(kit, "mail")
    id = await kit.enqueue()
    [job] = await old.claim()
    await old.decline(job)
    inbox = [Ask(None, priority, 1) for priority in Priority]
    assert await elsewhere.claim(1, *inbox) == []
    assert [each.id for each in await new.claim(1, *inbox)] == [id]


async def test_a_worker_that_does_not_say_what_it_knows_gets_a_declined_job_but_not_at_once_again(kit: Kit) -> None:
    old, silent = await _old(kit), await kit.worker()
    id = await kit.enqueue()
    await old.decline(*await old.claim())
    [verdict] = (await silent.decline(*await silent.claim())).verdicts
    assert verdict.state is JobState.SCHEDULED
    assert await silent.claim() == []
    assert (await kit.job(id)).due_at == pytest.approx(kit.clock.now() + SHORTEST_DECLINE)
    await _offered_again(kit, old, id)


async def test_an_ordered_lane_waits_for_its_declined_head(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    head, behind = [await kit.enqueue(lane="doc") for _ in range(2)]
    old, new = await _old(kit), await _new(kit)
    arrival = (await kit.job(head)).arrival
    await old.decline(*await old.claim())
    kit.clock.advance(5)
    await kit.store.admit()
    assert await old.claim(10) == []
    position = await _position_of(kit, behind)
    assert (position.gate, position.place, position.task) == (Gate.LANE_TASK, 2, "task")
    assert position.why() == "lane doc waits for a worker that knows task task"
    assert position.eta() is None
    [job] = await new.claim(10)
    assert (await _position_of(kit, behind)).gate is Gate.LANE, "its head runs"
    assert (job.id, (await kit.job(head)).arrival) == (head, arrival)
    await new.complete(job)
    assert await old.claim_ids(10) == [behind]
    assert (await kit.store.recount()).differences == ()


async def test_an_unordered_lane_continues_while_no_worker_knows_the_task_of_its_head(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", limit=1, ordered=False))
    first, second = [await kit.enqueue(lane="user") for _ in range(2)]
    old = await _old(kit)
    await old.decline(*await old.claim())
    kit.clock.advance(3)
    await kit.store.admit()
    [job] = await old.claim(10)
    assert job.id == second
    await old.complete(job)
    assert await old.claim(10) == []
    new = await _new(kit)
    assert await new.claim_ids(10) == [first]
    assert (await kit.store.recount()).differences == ()


async def test_a_decline_costs_its_lane_nothing_in_fair_order(kit: Kit) -> None:
    old = await _old(kit, slots=1)
    for lane in ("odd", "even"):
        await kit.store.enqueue([kit.new("task", lane=lane)] if lane == "odd" else [])
        await kit.store.enqueue([kit.new("other", lane=lane) for _ in range(3)])
    started = []
    for _ in range(5):
        [job] = await old.claim()
        if job.task == "task":
            await old.decline(job)
        else:
            started.append(job.lane)
            await old.complete(job)
    assert started.count("odd") == 2


async def test_a_cancel_that_was_requested_ends_it(kit: Kit) -> None:
    worker = await _old(kit)
    id = await kit.enqueue()
    [job] = await worker.claim()
    await kit.store.cancel([id])
    [verdict] = (await worker.decline(job)).verdicts
    assert verdict.state is JobState.CANCELLED
    assert (await kit.job(id)).reason is Reason.BY_USER


async def test_a_declined_job_can_be_cancelled_and_expires(kit: Kit) -> None:
    worker = await _old(kit)
    cancelled, expired = await kit.enqueue(), await kit.enqueue(expires=60)
    await worker.decline(*await worker.claim(2))
    assert await kit.store.cancel([cancelled]) == [JobState.CANCELLED]
    kit.clock.advance(61)
    await kit.store.promote()
    assert (await kit.job(expired)).reason is Reason.EXPIRED
    assert await kit.store.declined() == []


async def test_a_sticky_job_waits_for_its_own_worker_although_another_knows_the_task(kit: Kit) -> None:
    bound = await kit.worker(index=0, tasks=("other",))
    id = await kit.enqueue("draw", sticky="plan")
    await kit.worker(index=1, tasks=("draw",))
    await bound.decline(*await bound.claim())
    position = await _position_of(kit, id)
    assert (position.gate, position.why()) == (Gate.UNKNOWN_TASK, "its worker default/0 does not know task draw")
    job = await _offered_again(kit, bound, id)
    assert (await kit.job(id)).worker == bound.name
    await bound.decline(job, patience=0)
    assert (await kit.job(id)).reason is Reason.UNKNOWN_TASK


async def test_a_declined_clean_up_keeps_its_binding_draining_and_fails_it_released(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(sticky="plan")
    await worker.complete(*await worker.claim())
    await kit.store.release("default", "plan", kit.new("tidy", id="tidy", kind=JobKind.CLEANUP))
    await worker.decline(*await worker.claim())
    [binding] = await kit.store.bindings("default", "plan")
    assert binding.state is BindingState.DRAINING
    await worker.decline(await _offered_again(kit, worker, "tidy"), patience=0)
    [binding] = await kit.store.bindings("default", "plan")
    assert (binding.state, binding.cleanup_failed) == (BindingState.RELEASED, True)


async def test_a_declined_copy_of_a_broadcast_is_waited_for(kit: Kit) -> None:
    old, new = await kit.worker(), await kit.worker()
    await kit.enqueue(id="all", kind=JobKind.BROADCAST)
    [mine] = await old.claim()
    await old.decline(mine)
    await new.complete(*await new.claim())
    assert await kit.state("all") is JobState.RUNNING
    await old.complete(await _offered_again(kit, old, mine.id))
    assert await kit.state("all") is JobState.COMPLETED


async def test_a_suspect_stays_one(kit: Kit) -> None:
    worker = await _new(kit)
    await kit.enqueue()
    await worker.leave((await worker.claim())[0].held)
    old, new = await _old(kit), await _new(kit)
    await old.decline(*await old.claim())
    [job] = await new.claim()
    assert job.suspect
