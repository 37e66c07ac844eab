"""Endings that are not charged are bounded: after three hand-backs in a row a job is a suspect, and is charged.

Only runs whose body had begun count. A claim that never began says nothing about the job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from fairlane.model.binding import BindingState
from fairlane.model.job import Acceptance, Held, JobKind, JobState, NewJob, Reason, Verdict
from fairlane.model.retry import Backoff
from fairlane.model.settings import LaneRule
from fairlane.model.states import MOST_HAND_BACKS, Move, retry, snooze, take_back

from .kit import Kit, Worker

PENDING, SCHEDULED, FAILED, CANCELLED = (
    JobState.PENDING,
    JobState.SCHEDULED,
    JobState.FAILED,
    JobState.CANCELLED,
)
STEADY = Backoff(base=10, factor=1, jitter=False)


async def hand_back(worker: Worker, times: int) -> None:
    """Claim the only job and hand it back, this many times."""
    for _ in range(times):
        [run] = await worker.claim()
        await worker.hand_back(run)


async def test_the_first_hand_backs_in_a_row_are_not_charged_and_the_last_of_them_makes_a_suspect(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    for number in range(1, MOST_HAND_BACKS + 1):
        [run] = await worker.claim()
        assert (run.attempt, run.suspect) == (1, False)
        [verdict] = (await worker.hand_back(run)).verdicts
        assert verdict == Verdict("job", Acceptance.APPLIED, PENDING)
        job = await kit.job("job")
        assert (job.attempt, job.suspect) == (0, number == MOST_HAND_BACKS)

    [run] = await worker.claim()

    assert (run.attempt, run.suspect, run.fence) == (1, True, MOST_HAND_BACKS + 1)


@pytest.mark.parametrize("limit", [None, 1, 2])
async def test_every_further_one_is_charged_until_the_budget_is_used_up(kit: Kit, limit: int | None) -> None:
    await kit.settings("default", LaneRule(pattern="ann", limit=limit))
    worker = await kit.worker(lease=1_000)
    await kit.enqueue(id="job", lane="ann", retries=2, backoff=STEADY)
    await hand_back(worker, MOST_HAND_BACKS)

    # As after a crash: the first one runs again at once, later ones back off.
    [run] = await worker.claim()
    [verdict] = (await worker.hand_back(run)).verdicts
    assert verdict == Verdict("job", Acceptance.APPLIED, PENDING)
    [run] = await worker.claim()
    assert (run.attempt, run.suspect) == (2, True)
    [verdict] = (await worker.hand_back(run)).verdicts
    assert verdict == Verdict("job", Acceptance.APPLIED, SCHEDULED)
    job = await kit.job("job")
    assert (job.state, job.due_at) == (SCHEDULED, kit.clock.now() + 10)
    last = job.attempts[-1]
    assert (last.outcome, last.state, last.reason) == (Move.HAND_BACK.value, SCHEDULED, Reason.CRASHED)
    kit.clock.advance(10)
    await kit.store.promote()
    [run] = await worker.claim()
    assert (run.attempt, run.suspect) == (3, True)

    [verdict] = (await worker.hand_back(run)).verdicts

    assert verdict == Verdict("job", Acceptance.APPLIED, FAILED)
    job = await kit.job("job")
    assert (job.state, job.reason, job.attempt, job.error_group) == (FAILED, Reason.CRASHED, 3, "handed_back")
    assert job.error is not None
    assert "handed back" in job.error
    assert job.attempts[-1].outcome == Move.HAND_BACK.value
    assert (await kit.store.recount()).differences == ()


async def test_a_charged_hand_back_that_is_repeated_counts_once(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", retries=0)
    await hand_back(worker, MOST_HAND_BACKS)
    [run] = await worker.claim()
    await worker.hand_back(run)

    again = await worker.hand_back(run)

    assert again.verdicts == (Verdict("job", Acceptance.REPEATED, FAILED),)
    assert (await kit.job("job")).attempts[-1].refused == 0


async def test_it_holds_across_workers(kit: Kit) -> None:
    await kit.enqueue(id="job")
    for _ in range(MOST_HAND_BACKS):
        worker = await kit.worker()
        await hand_back(worker, 1)
        await worker.leave()
    [run] = await (await kit.worker()).claim()
    assert (run.suspect, run.attempt) == (True, 1)


async def retried(kit: Kit, worker: Worker) -> None:
    [run] = await worker.claim()
    await worker.finish(retry(run.held, 0.0, Reason.ERROR, "boom"))


async def snoozed(kit: Kit, worker: Worker) -> None:
    [run] = await worker.claim()
    await worker.finish(snooze(run.held, 0.0))


async def crashed(kit: Kit, worker: Worker) -> None:
    gone = await kit.worker()
    [run] = await gone.claim()
    await gone.leave(run.held)


Way = Callable[[Kit, Worker], Awaitable[None]]


@pytest.mark.parametrize("end", [retried, snoozed, crashed])
async def test_a_run_that_ends_otherwise_begins_a_new_row(kit: Kit, end: Way) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", retries=5)
    await hand_back(worker, MOST_HAND_BACKS - 1)
    await end(kit, worker)
    charged = (await kit.job("job")).attempt

    await hand_back(worker, MOST_HAND_BACKS)
    assert (await kit.job("job")).attempt == charged

    await hand_back(worker, 1)
    assert (await kit.job("job")).attempt == charged + 1


async def not_begun(kit: Kit, worker: Worker) -> None:
    [run] = await worker.claim()
    [verdict] = (await worker.finish(take_back(run.held))).verdicts
    assert verdict == Verdict("job", Acceptance.APPLIED, PENDING)


async def reply_lost(kit: Kit, worker: Worker) -> None:
    await worker.claim()
    await worker.renew()


async def left_unbegun(kit: Kit, worker: Worker) -> None:
    gone = await kit.worker()
    await gone.claim()
    await gone.leave()


@pytest.mark.parametrize("way", [not_begun, reply_lost, left_unbegun])
async def test_a_claim_that_never_began_neither_counts_nor_ends_the_row(kit: Kit, way: Way) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    for _ in range(5):
        await way(kit, worker)
    job = await kit.job("job")
    assert (job.attempt, job.suspect) == (0, False)
    await hand_back(worker, MOST_HAND_BACKS - 1)
    await way(kit, worker)
    assert not (await kit.job("job")).suspect

    await hand_back(worker, 1)

    assert (await kit.job("job")).suspect


async def test_a_claim_that_never_began_may_wait_before_it_is_offered_again(kit: Kit) -> None:
    worker = await kit.worker(lease=1_000)
    await kit.enqueue(id="job", expires=60)
    [run] = await worker.claim()

    [verdict] = (await worker.finish(take_back(run.held, 5.0))).verdicts

    assert verdict == Verdict("job", Acceptance.APPLIED, SCHEDULED)
    job = await kit.job("job")
    assert (job.state, job.due_at, job.attempt, job.suspect) == (SCHEDULED, kit.clock.now() + 5, 0, False)
    assert (job.attempts[-1].outcome, job.attempts[-1].state) == (Move.TAKE_BACK.value, SCHEDULED)
    repeated = await worker.finish(take_back(run.held, 5.0))
    assert repeated.verdicts == (Verdict("job", Acceptance.REPEATED, SCHEDULED),)
    # It has not started, so it may still expire.
    kit.clock.advance(60)
    assert (await kit.store.promote()).expired == 1


async def test_a_suspect_that_never_began_stays_one(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await crashed(kit, worker)
    [run] = await worker.claim()

    await worker.finish(take_back(run.held))

    assert (await kit.job("job")).suspect


async def test_a_cancel_that_was_requested_comes_true_instead(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", retries=0)
    await hand_back(worker, MOST_HAND_BACKS)
    [run] = await worker.claim()
    await kit.store.cancel(["job"])

    [verdict] = (await worker.hand_back(run)).verdicts

    assert verdict == Verdict("job", Acceptance.APPLIED, CANCELLED)
    assert (await kit.job("job")).reason is Reason.BY_USER


async def test_a_turn_that_is_taken_back_by_its_waiter_is_cancelled(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="ann", limit=1))
    waiter = await kit.waiter()
    await kit.enqueue(id="turn", kind=JobKind.TURN, lane="ann", waiter=waiter.id)

    [verdict] = (await waiter.finish(take_back(Held("turn", 1)))).verdicts

    assert verdict == Verdict("turn", Acceptance.APPLIED, CANCELLED)


async def test_a_clean_up_is_bounded_too_and_its_key_is_released(kit: Kit) -> None:
    worker = await kit.worker(index=0)
    await kit.enqueue(sticky="plan")
    await worker.complete(*await worker.claim())
    await kit.store.release("default", "plan", NewJob(id="tidy", task="tidy", kind=JobKind.CLEANUP, retries=0))
    await hand_back(worker, MOST_HAND_BACKS)

    await hand_back(worker, 1)

    assert await kit.state("tidy") is FAILED
    [binding] = await kit.store.bindings("default", "plan")
    assert binding.state is BindingState.RELEASED


# -- a job that has started does not expire any more ---------------------------------------------------------------


async def handed_back(kit: Kit, worker: Worker) -> None:
    await hand_back(worker, 1)


async def retried_later(kit: Kit, worker: Worker) -> None:
    [run] = await worker.claim()
    await worker.finish(retry(run.held, 5.0, Reason.ERROR, "boom"))


async def died(kit: Kit, worker: Worker) -> None:
    gone = await kit.worker(lease=1)
    await gone.claim()
    kit.clock.advance(2)
    await kit.store.rescue()


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("way", [handed_back, retried, retried_later, snoozed, crashed, died])
async def test_a_job_that_has_started_never_expires(kit: Kit, way: Way, limit: int | None) -> None:
    await kit.settings("default", LaneRule(pattern="ann", limit=limit))
    worker = await kit.worker(lease=10_000)
    began = kit.clock.now()
    await kit.enqueue(id="job", lane="ann", expires=60, retries=5)
    await way(kit, worker)

    kit.clock.advance(100)

    assert (await kit.store.promote()).expired == 0
    await kit.store.admit()
    assert not (await kit.state("job")).final
    # The requested expiry stays readable.
    assert (await kit.job("job")).expires_at == began + 60
    [run] = await worker.claim()
    assert run.id == "job"
    await worker.complete(run)
    job = await kit.job("job")
    assert (job.state, job.expires_at) == (JobState.COMPLETED, began + 60)
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("way", [not_begun, reply_lost, left_unbegun])
async def test_a_job_whose_claim_never_began_expires_all_the_same(kit: Kit, way: Way) -> None:
    worker = await kit.worker(lease=10_000)
    await kit.enqueue(id="job", expires=60)
    await way(kit, worker)

    kit.clock.advance(60)

    assert (await kit.store.promote()).expired == 1
    assert (await kit.job("job")).reason is Reason.EXPIRED
