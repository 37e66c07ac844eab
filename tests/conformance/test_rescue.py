"""Rescue: jobs of processes that died run again while their budget lasts, and nothing is left behind."""

from __future__ import annotations

import pytest

from fairlane.errors import TermLost
from fairlane.model.job import Claimed, JobKind, JobState, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.retry import Backoff
from fairlane.model.session import SessionState
from fairlane.model.settings import LaneRule
from fairlane.model.states import retry, snooze
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import LONG, die, survivor
from .kit import Kit

PENDING, SCHEDULED, RUNNING = JobState.PENDING, JobState.SCHEDULED, JobState.RUNNING
STEADY = Backoff(base=10.0, factor=1.0, jitter=False)


async def start(kit: Kit) -> Claimed | None:
    """Start all jobs on a new worker, after every back-off is over; the worker then dies."""
    kit.clock.advance(301)
    await kit.store.promote()
    worker = await kit.worker()
    claimed = await worker.claim()
    await die(kit, worker)
    return claimed[0] if claimed else None


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_a_job_whose_process_dies_starts_retries_plus_one_times_and_then_fails(kit: Kit, retries: int) -> None:
    await kit.enqueue(id="poison", retries=retries)

    starts = [begun for _ in range(retries + 4) if (begun := await start(kit)) is not None]

    assert [(begun.fence, begun.attempt) for begun in starts] == [(n, n) for n in range(1, retries + 2)]
    job = await kit.job("poison")
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    assert job.finished_at is not None
    assert [each.outcome for each in job.attempts] == ["crashed"] * (retries + 1)


async def test_errors_and_crashes_share_one_budget(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", retries=1)
    await worker.retry(*await worker.claim())
    await worker.claim()

    rescued = await die(kit, worker)

    assert (rescued.retried, rescued.failed) == (0, 1)
    assert await kit.state("job") is JobState.FAILED


async def test_the_first_crash_is_retried_at_once_and_later_ones_back_off(kit: Kit, clock: ManualClock) -> None:
    await kit.enqueue(id="job", retries=5, backoff=STEADY)
    first = await kit.worker()
    await first.claim()
    await die(kit, first)
    assert await kit.state("job") is PENDING

    second = await kit.worker()
    await second.claim()
    await die(kit, second)

    job = await kit.job("job")
    assert (job.state, job.due_at) == (SCHEDULED, clock.now() + 10)
    last = await survivor(kit)
    assert await last.claim() == []
    clock.advance(10)
    await kit.store.promote()
    assert await last.claim_ids() == ["job"]


async def test_the_first_crash_after_an_error_is_retried_at_once(kit: Kit) -> None:
    await kit.enqueue(id="job", retries=5, backoff=STEADY)
    worker = await kit.worker()
    await worker.retry(*await worker.claim())
    await worker.claim()

    await die(kit, worker)

    assert await kit.state("job") is PENDING


async def test_what_did_not_begin_is_no_crash(kit: Kit) -> None:
    await kit.enqueue(id="job", retries=5, backoff=STEADY)
    for _ in range(3):
        worker = await kit.worker()
        await worker.claim()
        await worker.leave()
    worker = await kit.worker()
    [job] = await worker.claim()
    assert (job.fence, job.attempt, job.suspect) == (4, 1, False)

    await die(kit, worker)

    assert await kit.state("job") is PENDING


# -- suspects --------------------------------------------------------------------------------------


async def test_a_job_that_crashed_is_a_suspect_and_others_are_not(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="crashed")
    await worker.claim()
    await kit.enqueue(id="innocent")
    await die(kit, worker)
    assert (await kit.job("crashed")).suspect

    suspects = {job.id: job.suspect for job in await heir.claim(5)}

    assert suspects == {"crashed": True, "innocent": False}


async def test_a_suspect_that_did_not_run_to_an_end_stays_one(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job")
    await worker.claim()
    await die(kit, worker)

    await heir.hand_back(*await heir.claim())

    [job] = await heir.claim()
    assert job.suspect


async def test_a_suspect_is_cleared_once_its_body_ended_by_itself(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job", retries=5)
    await worker.claim()
    await die(kit, worker)
    [suspect] = await heir.claim()
    assert suspect.suspect

    # An error is an end too: the body ran until it raised, and the process is alive.
    await heir.finish(retry(suspect.held, 0.0, Reason.ERROR, "boom"))

    [job] = await heir.claim()
    assert not job.suspect


async def test_a_suspect_is_cleared_by_a_snooze_too(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job", retries=5)
    await worker.claim()
    await die(kit, worker)
    [suspect] = await heir.claim()

    await heir.finish(snooze(suspect.held, 0.0))

    [job] = await heir.claim()
    assert not job.suspect


@pytest.mark.parametrize("delay", [0.0, 5.0])
@pytest.mark.parametrize("limit", [None, 1, 2])
async def test_a_crash_that_the_holder_reports_makes_a_suspect(kit: Kit, limit: int | None, delay: float) -> None:
    await kit.settings("default", LaneRule(pattern="ann", limit=limit))
    worker = await survivor(kit)
    await kit.enqueue(id="job", lane="ann", retries=5)
    [run] = await worker.claim()

    await worker.finish(retry(run.held, delay, Reason.CRASHED, "killed by signal 9"))

    assert (await kit.job("job")).suspect
    kit.clock.advance(delay)
    await kit.store.promote()
    [again] = await worker.claim()
    assert (again.suspect, again.attempt) == (True, 2)
    [attempt] = (await kit.job("job")).attempts[:1]
    assert (attempt.reason, attempt.error) == (Reason.CRASHED, "killed by signal 9")


async def test_a_suspect_by_report_stays_one_when_handed_back_and_is_cleared_by_an_error(kit: Kit) -> None:
    worker = await survivor(kit)
    await kit.enqueue(id="job", retries=5)
    await worker.finish(*(retry(run.held, 0.0, Reason.CRASHED, "killed") for run in await worker.claim()))
    await worker.hand_back(*await worker.claim())
    [suspect] = await worker.claim()
    assert suspect.suspect

    await worker.retry(suspect)

    [job] = await worker.claim()
    assert not job.suspect


async def test_a_crash_that_the_holder_reports_counts_like_one_that_the_rescuer_finds(
    kit: Kit, clock: ManualClock
) -> None:
    await kit.enqueue(id="job", retries=5, backoff=STEADY)
    worker = await kit.worker()
    await worker.finish(*(retry(run.held, 0.0, Reason.CRASHED, "killed") for run in await worker.claim()))
    await worker.claim()

    await die(kit, worker)

    # The second crash of all: only the first is retried at once.
    job = await kit.job("job")
    assert (job.state, job.due_at) == (SCHEDULED, clock.now() + 10)


async def test_a_crash_reported_twice_counts_once(kit: Kit, clock: ManualClock) -> None:
    await kit.enqueue(id="job", retries=5)
    worker = await kit.worker()
    [run] = await worker.claim()
    for _ in range(2):
        finished = await worker.finish(retry(run.held, 5.0, Reason.CRASHED, "killed"))
        assert finished.verdicts[0].accepted
    job = await kit.job("job")
    assert (job.attempt, job.due_at, len(job.attempts)) == (1, clock.now() + 5, 1)


# -- who is declared -------------------------------------------------------------------------------


async def test_a_pass_declares_only_sessions_whose_lease_has_ended(kit: Kit, clock: ManualClock) -> None:
    dying, living = await kit.worker(lease=10), await kit.worker(lease=100)
    await kit.store.enqueue([kit.new(id="lost"), kit.new(id="kept")])
    await dying.claim()
    await living.claim()
    clock.advance(11)

    rescued = await kit.store.rescue()

    assert rescued.declared == (dying.id,)
    assert (rescued.retried, rescued.failed, rescued.cancelled, rescued.more) == (1, 0, 0, False)
    assert rescued.now == clock.now()
    assert await kit.state("lost") is PENDING
    assert await kit.state("kept") is RUNNING
    again = await kit.store.rescue()
    assert (again.declared, again.retried) == ((), 0)


async def test_a_pass_that_may_not_declare_leaves_expired_sessions_alone(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    clock.advance(60)

    rescued = await store.rescue(declare=False)

    assert (rescued.declared, rescued.retried) == ((), 0)
    assert await kit.state("job") is RUNNING
    assert (await worker.renew(job)).lost == ()


async def test_a_pass_that_may_not_declare_still_takes_what_the_dead_left(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    ids = [await kit.enqueue() for _ in range(4)]
    await worker.claim(4)
    kit.clock.advance(16)
    await store.rescue(limit=1)

    for _ in range(10):
        if not (await store.rescue(limit=1, declare=False)).more:
            break

    assert [await kit.state(id) for id in ids] == [PENDING] * 4


async def test_jobs_of_an_unknown_session_are_taken_back(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker()
    ids = [await kit.enqueue() for _ in range(3)]
    await worker.claim(3)
    clock.advance(16)
    await store.rescue(limit=1)
    clock.advance(10)
    for _ in range(10):
        if not (await store.prune(Retention(history_seconds=0.0))).more:
            break

    for _ in range(10):
        if not (await store.rescue(limit=1)).more:
            break

    assert [await kit.state(id) for id in ids] == [PENDING] * 3


async def test_many_sessions_and_jobs_are_all_handled_over_short_passes(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    workers = [await kit.worker(lease=10) for _ in range(7)]
    ids = [await kit.enqueue() for _ in range(21)]
    for worker in workers:
        assert len(await worker.claim(3)) == 3
    clock.advance(11)

    declared: list[str] = []
    retried = passes = 0
    while passes < 100:
        rescued = await store.rescue(limit=2)
        declared += rescued.declared
        retried += rescued.retried
        passes += 1
        if not rescued.more:
            break

    assert sorted(declared) == sorted(worker.id for worker in workers)
    assert retried == 21
    assert [await kit.state(id) for id in ids] == [PENDING] * 21
    heir = await kit.worker(slots=30)
    assert sorted(await heir.claim_ids(30)) == sorted(ids)


async def test_a_pass_under_a_lost_term_changes_nothing(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker(lease=10)
    await kit.enqueue(id="job")
    await worker.claim()
    term = await store.lead("manager", lease=LONG)
    assert term is not None
    clock.advance(11)

    with pytest.raises(TermLost):
        await store.rescue(term=term.number - 1)
    assert await kit.state("job") is RUNNING

    assert (await store.rescue(term=term.number)).declared == (worker.id,)


# -- what becomes of a job -------------------------------------------------------------------------


async def test_a_crash_after_a_cancel_request_ends_the_job_as_cancelled(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job", retries=9)
    await worker.claim()
    await kit.store.cancel(["job"])

    rescued = await die(kit, worker)

    assert (rescued.cancelled, rescued.retried, rescued.failed) == (1, 0, 0)
    job = await kit.job("job")
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.BY_USER)
    assert await heir.claim() == []


async def test_a_rescued_job_has_its_history(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await worker.claim()

    await die(kit, worker)

    job = await kit.job("job")
    [attempt] = job.attempts
    assert (attempt.session, attempt.worker, attempt.outcome) == (worker.id, worker.name, "crashed")
    assert attempt.ended_at == clock.now()
    assert (job.state, job.finished_at) == (PENDING, None)


async def test_a_rescue_frees_the_place_in_queue_and_lane(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1), limit=1)
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.store.enqueue([kit.new(id="first", lane="ann", retries=0), kit.new(id="next", lane="ann")])
    await worker.claim()
    assert await heir.claim(5) == []

    await die(kit, worker)

    assert await kit.state("first") is JobState.FAILED
    assert await heir.claim_ids(5) == ["next"]


async def test_the_turns_of_a_dead_waiter_are_cancelled_and_their_lane_goes_on(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    dying, living = await kit.waiter(lease=10), await kit.waiter(lease=LONG)
    for id, waiter in [("granted", dying), ("waiting", dying), ("next", living)]:
        await store.enqueue([kit.new(id=id, kind=JobKind.TURN, lane="ann", waiter=waiter.id)])

    await die(kit, dying)

    for id in ("granted", "waiting"):
        job = await kit.job(id)
        assert (job.state, job.reason) == (JobState.CANCELLED, Reason.WAITER_GONE)
    assert (await kit.job("next")).session == living.id
    assert await kit.state("next") is RUNNING


async def test_a_dead_session_is_still_remembered(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await die(kit, worker)

    assert [(session.id, session.state) for session in await store.sessions()] == [(worker.id, SessionState.DEAD)]
