"""Finishing: what each move makes of a running job, what it costs, and what a repetition answers."""

from __future__ import annotations

import pytest

from fairlane.errors import SessionLost, Stale
from fairlane.model import states
from fairlane.model.job import KEPT_ATTEMPTS, Acceptance, Held, JobState, Reason, Verdict
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.states import Transition, complete, decline, fail, hand_back, retry, snooze, take_back
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import survivor
from .kit import Kit

APPLIED, REPEATED, STALE = Acceptance.APPLIED, Acceptance.REPEATED, Acceptance.STALE
PENDING, SCHEDULED, RUNNING = JobState.PENDING, JobState.SCHEDULED, JobState.RUNNING
COMPLETED, FAILED, CANCELLED = JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED


def moves(held: Held, delay: float = 0.0) -> dict[str, Transition]:
    """Every decision a holder can write, by its outcome in the history."""
    return {
        "completed": complete(held, b"1"),
        "failed": fail(held, Reason.ERROR, "boom"),
        "retry": retry(held, delay, Reason.ERROR, "boom"),
        "snoozed": snooze(held, delay),
        "handed_back": hand_back(held),
        "taken_back": take_back(held, delay),
        "declined": decline(held, "no such task"),
        "cancelled": states.cancel(held),
    }


OUTCOMES = sorted(moves(Held("any", 1)))


async def test_a_completed_job_keeps_its_result(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    clock.advance(3)

    finished = await worker.complete(job, result=b'{"a":[1,2]}')

    assert finished.verdicts == (Verdict("job", APPLIED, COMPLETED),)
    assert finished.claimed == ()
    seen = await kit.job("job")
    assert (seen.state, seen.reason, seen.result, seen.error) == (COMPLETED, None, b'{"a":[1,2]}', None)
    assert seen.finished_at == clock.now()
    assert seen.worker == worker.name
    [attempt] = seen.attempts
    assert (attempt.outcome, attempt.ended_at, attempt.refused) == ("completed", clock.now(), 0)
    assert attempt.started_at == clock.now() - 3


async def test_a_job_may_complete_without_a_result(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")

    await worker.complete(*await worker.claim(), result=None)

    job = await kit.job("job")
    assert (job.state, job.result) == (COMPLETED, None)


async def test_the_largest_result_comes_back_byte_for_byte(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    result = b'"' + b"x" * (256 * 1024 - 2) + b'"'

    await worker.complete(*await worker.claim(), result=result)

    assert (await kit.job("job")).result == result


@pytest.mark.parametrize(
    "reason", [Reason.ERROR, Reason.TIMEOUT, Reason.CRASHED, Reason.BAD_PAYLOAD, Reason.UNKNOWN_TASK]
)
async def test_a_failed_job_keeps_its_reason_error_and_group(kit: Kit, clock: ManualClock, reason: Reason) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    finished = await worker.finish(fail(job.held, reason, "Traceback …\nValueError: ü", group="ValueError in f"))

    assert finished.verdicts == (Verdict("job", APPLIED, FAILED),)
    seen = await kit.job("job")
    assert (seen.state, seen.reason) == (FAILED, reason)
    assert (seen.error, seen.error_group) == ("Traceback …\nValueError: ü", "ValueError in f")
    assert (seen.result, seen.finished_at) == (None, clock.now())
    [attempt] = seen.attempts
    assert (attempt.outcome, attempt.reason, attempt.error) == (
        "failed",
        reason,
        "Traceback …\nValueError: ü",
    )


async def test_a_holder_may_cancel_what_it_runs(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    finished = await worker.finish(states.cancel(job.held, Reason.BY_USER))

    assert finished.verdicts == (Verdict("job", APPLIED, CANCELLED),)
    seen = await kit.job("job")
    assert (seen.state, seen.reason, seen.finished_at) == (CANCELLED, Reason.BY_USER, clock.now())
    assert seen.attempts[0].outcome == "cancelled"


# -- charging --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "attempt"), [("retry", 2), ("snoozed", 1), ("handed_back", 1), ("declined", 1)])
async def test_every_claim_raises_the_fence_and_only_a_retry_is_charged(kit: Kit, outcome: str, attempt: int) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [first] = await worker.claim()

    finished = await worker.finish(moves(first.held)[outcome])
    [second] = await worker.claim()

    assert finished.verdicts == (Verdict("job", APPLIED, PENDING),)
    assert (first.fence, first.attempt) == (1, 1)
    assert (second.fence, second.attempt) == (2, attempt)
    seen = await kit.job("job")
    assert (seen.fence, seen.attempt) == (2, attempt)
    assert [each.outcome for each in seen.attempts] == [outcome, None]


async def test_charges_add_up_over_mixed_moves(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", retries=10)
    seen = []
    for outcome in ["handed_back", "retry", "snoozed", "snoozed", "retry", "handed_back", "completed"]:
        [job] = await worker.claim()
        seen.append((job.fence, job.attempt))
        await worker.finish(moves(job.held)[outcome])

    assert seen == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)]
    assert [(each.fence, each.attempt) for each in (await kit.job("job")).attempts] == seen


@pytest.mark.parametrize("outcome", ["retry", "snoozed"])
async def test_a_delayed_move_waits_for_its_due_time(kit: Kit, clock: ManualClock, outcome: str) -> None:
    worker = await kit.worker(lease=600)
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    finished = await worker.finish(moves(job.held, delay=30)[outcome])

    assert finished.verdicts == (Verdict("job", APPLIED, SCHEDULED),)
    seen = await kit.job("job")
    assert (seen.state, seen.due_at, seen.finished_at) == (SCHEDULED, clock.now() + 30, None)
    clock.advance(29)
    await kit.store.promote()
    assert await worker.claim() == []
    clock.advance(1)
    await kit.store.promote()
    assert await worker.claim_ids() == ["job"]


async def test_a_retry_keeps_its_error_in_the_history(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    await worker.finish(retry(job.held, 0.0, Reason.TIMEOUT, "took too long"))

    [attempt] = (await kit.job("job")).attempts
    assert (attempt.outcome, attempt.reason, attempt.error) == ("retry", Reason.TIMEOUT, "took too long")


async def test_a_job_that_waits_again_shows_where_it_ran_last(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")

    await worker.retry(*await worker.claim(), delay=60)

    job = await kit.job("job")
    assert (job.worker, job.session) == (worker.name, None)


async def test_the_history_keeps_the_last_twenty_attempts(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", retries=100)
    for _ in range(KEPT_ATTEMPTS + 5):
        await worker.retry(*await worker.claim())

    [last] = await worker.claim()

    attempts = (await kit.job("job")).attempts
    assert [each.fence for each in attempts] == list(range(last.fence - KEPT_ATTEMPTS + 1, last.fence + 1))
    assert last.attempt == last.fence == KEPT_ATTEMPTS + 6


# -- batches ---------------------------------------------------------------------------------------


async def test_verdicts_come_in_the_order_of_the_transitions(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(3)])
    zero, one, two = await worker.claim(3)

    finished = await worker.finish(
        retry(two.held, 60.0, Reason.ERROR, "boom"),
        complete(Held("unknown", 1)),
        fail(zero.held, Reason.ERROR, "boom"),
        complete(one.held),
        complete(one.held),
    )

    assert finished.verdicts == (
        Verdict("job-2", APPLIED, SCHEDULED),
        Verdict("unknown", STALE, None),
        Verdict("job-0", APPLIED, FAILED),
        Verdict("job-1", APPLIED, COMPLETED),
        Verdict("job-1", REPEATED, COMPLETED),
    )


async def test_a_finish_without_transitions_answers_nothing(kit: Kit) -> None:
    finished = await (await kit.worker()).finish()

    assert (finished.verdicts, finished.claimed) == ((), ())


async def test_a_finish_claims_into_the_slot_it_frees(kit: Kit, store: Store) -> None:
    worker = await kit.worker(slots=1)
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two"), kit.new(id="three")])
    [job] = await worker.claim()

    finished = await store.finish(worker.id, [complete(job.held)], claim=worker.everything(5))

    assert finished.verdicts == (Verdict("one", APPLIED, COMPLETED),)
    assert [(each.id, each.fence) for each in finished.claimed] == [("two", 1)]


async def test_a_finish_hands_its_place_on_before_it_claims(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1), limit=1)
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="one", lane="ann"), kit.new(id="two", lane="ann")])
    [job] = await worker.claim(5)

    finished = await store.finish(worker.id, [complete(job.held)], claim=worker.everything(5))

    assert [each.id for each in finished.claimed] == ["two"]


async def test_a_finish_with_a_claim_repeats_as_a_whole(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(4)])
    [job] = await worker.claim()
    call = worker.everything(1)
    first = await store.finish(worker.id, [complete(job.held, b"1")], claim=call)

    again = await store.finish(worker.id, [complete(job.held, b"1")], claim=call)

    assert again.verdicts == (Verdict("job-0", REPEATED, COMPLETED),)
    assert again.claimed == first.claimed
    assert [each.id for each in again.claimed] == ["job-1"]


async def test_a_finish_with_an_outdated_claim_number_is_refused_whole(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    old = worker.everything(1)
    [job] = await worker.claim()

    with pytest.raises(Stale) as refusal:
        await store.finish(worker.id, [complete(job.held)], claim=Claim(number=old.number, asks=(), total=0))

    assert not isinstance(refusal.value, SessionLost)
    assert await kit.state("job") is RUNNING


# -- repetition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_repeated_finish_answers_with_the_stored_outcome(kit: Kit, outcome: str) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    move = moves(job.held, delay=60)[outcome]
    [first] = (await worker.finish(move)).verdicts
    before = await kit.job("job")

    [again] = (await worker.finish(move)).verdicts

    assert (again.acceptance, again.state) == (REPEATED, first.state)
    assert again.accepted
    assert await kit.job("job") == before


@pytest.mark.parametrize("outcome", ["retry", "snoozed", "handed_back"])
async def test_a_repeated_finish_is_answered_even_after_another_session_claimed_the_job(kit: Kit, outcome: str) -> None:
    worker, other = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    move = moves(job.held)[outcome]
    [first] = (await worker.finish(move)).verdicts
    [second] = await other.claim()

    [again] = (await worker.finish(move)).verdicts

    assert (again.acceptance, again.state) == (REPEATED, first.state)
    seen = await kit.job("job")
    assert (seen.state, seen.session, seen.fence) == (RUNNING, other.id, second.fence)
    assert [each.refused for each in seen.attempts] == [0, 0]
    assert (await other.complete(second)).verdicts == (Verdict("job", APPLIED, COMPLETED),)
    assert (await worker.finish(move)).verdicts == (again,)


async def test_a_repeated_finish_answers_even_after_the_same_session_claimed_the_job_again(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [first] = await worker.claim()
    move = retry(first.held, 0.0, Reason.ERROR, "boom")
    await worker.finish(move)
    [second] = await worker.claim()

    assert (await worker.finish(move)).verdicts == (Verdict("job", REPEATED, PENDING),)

    assert (await kit.job("job")).fence == second.fence
    assert (await worker.complete(second)).verdicts == (Verdict("job", APPLIED, COMPLETED),)


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_another_decision_under_the_same_fence_changes_nothing(kit: Kit, outcome: str) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await worker.complete(job, result=b"1")
    before = await kit.job("job")

    [verdict] = (await worker.finish(moves(job.held)[outcome])).verdicts

    assert (verdict.acceptance is not APPLIED, verdict.state) == (True, COMPLETED)
    after = await kit.job("job")
    assert (after.state, after.result, after.finished_at) == (COMPLETED, b"1", before.finished_at)
    assert after.attempts[0].outcome == "completed"
