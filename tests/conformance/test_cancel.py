"""Cancelling: final at once for whatever waits, a request for whatever runs."""

from __future__ import annotations

import pytest

from fairlane.errors import NotFound
from fairlane.model import states
from fairlane.model.job import Acceptance, JobKind, JobState, Reason, Verdict
from fairlane.model.reading import Filter
from fairlane.model.settings import LaneRule
from fairlane.model.states import complete, fail, hand_back, retry, snooze
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import die, survivor
from .kit import Kit

PENDING, RUNNING, CANCELLED = JobState.PENDING, JobState.RUNNING, JobState.CANCELLED


async def test_a_waiting_job_is_cancelled_at_once(kit: Kit, store: Store, clock: ManualClock) -> None:
    await kit.store.enqueue([kit.new(id="pending"), kit.new(id="scheduled", delay=60)])
    clock.advance(5)

    assert await store.cancel(["scheduled", "pending"]) == [CANCELLED, CANCELLED]

    for id in ("pending", "scheduled"):
        job = await kit.job(id)
        assert (job.state, job.reason, job.finished_at) == (CANCELLED, Reason.BY_USER, clock.now())
        assert (job.fence, job.attempts) == (0, ())
    clock.advance(60)
    await store.promote()
    assert await (await kit.worker()).claim(5) == []


async def test_a_job_that_waits_for_its_retry_is_cancelled_at_once(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker(lease=600)
    await kit.enqueue(id="job")
    await worker.retry(*await worker.claim(), delay=60)

    assert await store.cancel(["job"]) == [CANCELLED]

    clock.advance(61)
    await store.promote()
    assert await worker.claim() == []


async def test_cancelling_again_answers_the_same_and_changes_nothing(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    await kit.enqueue(id="job")
    await store.cancel(["job"])
    before = await kit.job("job")
    clock.advance(5)

    assert await store.cancel(["job", "job"]) == [CANCELLED, CANCELLED]

    assert await kit.job("job") == before


async def test_nothing_to_cancel_is_an_empty_answer(store: Store) -> None:
    assert await store.cancel([]) == []


async def test_an_unknown_id_is_an_error_and_cancels_nothing(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="running"), kit.new(id="pending")])
    await worker.claim()

    with pytest.raises(NotFound):
        await store.cancel(["pending", "running", "unknown"])

    assert await kit.state("pending") is PENDING
    assert not (await kit.job("running")).cancel_requested


@pytest.mark.parametrize("end", [JobState.COMPLETED, JobState.FAILED])
async def test_a_final_job_stays_as_it_is(kit: Kit, store: Store, end: JobState) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await (worker.complete(job) if end is JobState.COMPLETED else worker.fail(job))
    before = await kit.job("job")

    assert await store.cancel(["job"]) == [end]

    assert await kit.job("job") == before


async def test_cancelling_the_head_of_a_lane_lets_the_next_one_start(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="head", lane="ann"), kit.new(id="next", lane="ann")])

    await store.cancel(["head"])

    assert await worker.claim_ids(5) == ["next"]
    assert (await store.admit()).repaired == 0


# -- running jobs ----------------------------------------------------------------------------------


async def test_a_running_job_is_only_asked_to_stop(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [claimed] = await worker.claim()

    assert await store.cancel(["job"]) == [RUNNING]
    assert await store.cancel(["job"]) == [RUNNING]

    job = await kit.job("job")
    assert (job.state, job.cancel_requested, job.finished_at) == (RUNNING, True, None)
    assert (await worker.renew(claimed)).cancel == ("job",)


async def test_a_job_that_was_asked_to_stop_keeps_its_slot(kit: Kit, store: Store) -> None:
    worker = await kit.worker(slots=1)
    await kit.store.enqueue([kit.new(id="job"), kit.new(id="next")])
    [job] = await worker.claim()
    await store.cancel(["job"])

    assert await worker.claim(5) == []

    await worker.finish(states.cancel(job.held))
    assert await worker.claim_ids(5) == ["next"]


async def test_a_job_that_was_asked_to_stop_keeps_its_lane(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    worker, other = await kit.worker(), await kit.worker()
    await kit.store.enqueue([kit.new(id="job", lane="ann"), kit.new(id="next", lane="ann")])
    [job] = await worker.claim()
    await store.cancel(["job"])

    assert await other.claim(5) == []

    await worker.fail(job)
    assert await other.claim_ids(5) == ["next"]


async def test_a_job_that_was_asked_to_stop_counts_in_its_queue(kit: Kit, store: Store) -> None:
    await kit.settings(limit=1)
    worker, other = await kit.worker(), await kit.worker()
    await kit.store.enqueue([kit.new(id="job"), kit.new(id="next")])
    [job] = await worker.claim()
    await store.cancel(["job"])

    assert await other.claim(5) == []

    await worker.hand_back(job)
    assert await other.claim_ids(5) == ["next"]


async def test_a_body_that_returned_is_completed_all_the_same(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await store.cancel(["job"])

    finished = await worker.complete(job, result=b"1")

    assert finished.verdicts == (Verdict("job", Acceptance.APPLIED, JobState.COMPLETED),)
    seen = await kit.job("job")
    assert (seen.state, seen.reason, seen.result) == (JobState.COMPLETED, None, b"1")


@pytest.mark.parametrize("move", ["fail", "retry", "late retry", "snooze", "hand back", "cancel"])
async def test_every_other_end_of_a_job_that_was_asked_to_stop_is_cancelled(
    kit: Kit, store: Store, clock: ManualClock, move: str
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", retries=9)
    [job] = await worker.claim()
    await store.cancel(["job"])
    transition = {
        "fail": fail(job.held, Reason.ERROR, "boom"),
        "retry": retry(job.held, 0.0, Reason.ERROR, "boom"),
        "late retry": retry(job.held, 60.0, Reason.TIMEOUT, "boom"),
        "snooze": snooze(job.held, 60.0),
        "hand back": hand_back(job.held),
        "cancel": states.cancel(job.held),
    }[move]

    first = await worker.finish(transition)
    again = await worker.finish(transition)

    assert first.verdicts == (Verdict("job", Acceptance.APPLIED, CANCELLED),)
    assert again.verdicts == (Verdict("job", Acceptance.REPEATED, CANCELLED),)
    seen = await kit.job("job")
    assert (seen.state, seen.reason, seen.finished_at) == (CANCELLED, Reason.BY_USER, clock.now())
    assert await worker.claim() == []


async def test_a_request_does_not_outlive_its_session(kit: Kit, store: Store) -> None:
    worker, other = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job", retries=9)
    [job] = await worker.claim()
    await store.cancel(["job"])
    await die(kit, worker)

    assert await store.cancel(["job"]) == [CANCELLED]
    assert (await worker.complete(job)).verdicts == (Verdict("job", Acceptance.STALE, CANCELLED),)
    assert await other.claim() == []


async def test_a_batch_answers_each_job_in_its_place(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="done"), kit.new(id="running"), kit.new(id="pending")])
    [done] = await worker.claim()
    await worker.complete(done)
    await worker.claim()

    answers = await store.cancel(["running", "pending", "done"])

    assert answers == [RUNNING, CANCELLED, JobState.COMPLETED]


# -- turns and broadcasts --------------------------------------------------------------------------


async def test_a_waiting_turn_is_cancelled_at_once(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    waiter = await kit.waiter()
    for id in ("granted", "waiting"):
        await store.enqueue([kit.new(id=id, kind=JobKind.TURN, lane="ann", waiter=waiter.id)])

    assert await store.cancel(["waiting"]) == [CANCELLED]

    assert await kit.state("granted") is RUNNING


@pytest.mark.parametrize("ids", [["job", "turn"], ["turn", "job"]])
async def test_no_turn_starts_in_the_place_of_a_job_that_is_cancelled_with_it(
    kit: Kit, store: Store, ids: list[str]
) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    waiter = await kit.waiter()
    await kit.enqueue(id="job", lane="ann")
    for id in ("turn", "next"):
        await store.enqueue([kit.new(id=id, kind=JobKind.TURN, lane="ann", waiter=waiter.id)])

    assert await store.cancel(ids) == [CANCELLED, CANCELLED]

    assert await kit.state("next") is RUNNING


async def test_cancelling_a_broadcast_cancels_its_children(kit: Kit, store: Store) -> None:
    workers = [await kit.worker() for _ in range(3)]
    await store.enqueue([kit.new("purge", id="all", kind=JobKind.BROADCAST)])
    [running] = await workers[0].claim()

    await store.cancel(["all"])

    page = await store.find(Filter(task="purge"))
    children = {job.id: job for job in page.jobs if job.parent == "all"}
    assert len(children) == 3
    assert (children[running.id].state, children[running.id].cancel_requested) == (RUNNING, True)
    assert [job.state for id, job in children.items() if id != running.id] == [CANCELLED] * 2
    assert not (await kit.state("all")).final

    await workers[0].finish(complete(running.held))
    assert (await kit.state("all")).final
