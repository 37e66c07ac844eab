"""Writers that lost their job: their writes are rejected, counted, and have no effect, whatever they are."""

from __future__ import annotations

import pytest

from fairlane.errors import SessionLost
from fairlane.model import states
from fairlane.model.job import Acceptance, Held, JobState, Reason, Verdict
from fairlane.model.states import Transition, complete, fail, hand_back, retry, snooze, take_back
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import die, survivor
from .kit import Kit

APPLIED, STALE = Acceptance.APPLIED, Acceptance.STALE
RUNNING, COMPLETED, PENDING = JobState.RUNNING, JobState.COMPLETED, JobState.PENDING


def every_move(held: Held) -> list[Transition]:
    """One of each decision a holder can write."""
    return [
        complete(held, b"1"),
        fail(held, Reason.ERROR, "boom"),
        retry(held, 0.0, Reason.ERROR, "boom"),
        snooze(held, 5.0),
        hand_back(held),
        take_back(held, 5.0),
        states.cancel(held),
    ]


async def test_a_wrong_fence_is_refused_for_every_move(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    for fence in (job.fence - 1, job.fence + 1):
        finished = await worker.finish(*every_move(Held("job", fence)))
        assert finished.verdicts == (Verdict("job", STALE, RUNNING),) * 7

    seen = await kit.job("job")
    assert (seen.state, seen.fence, seen.session) == (RUNNING, job.fence, worker.id)
    assert (await worker.complete(job)).verdicts == (Verdict("job", APPLIED, COMPLETED),)


async def test_another_session_is_refused_for_every_move(kit: Kit) -> None:
    worker, other = await kit.worker(), await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    finished = await other.finish(*every_move(job.held))

    assert finished.verdicts == (Verdict("job", STALE, RUNNING),) * 7
    assert not finished.verdicts[0].accepted
    assert (await kit.job("job")).session == worker.id
    assert (await worker.complete(job)).verdicts == (Verdict("job", APPLIED, COMPLETED),)


async def test_another_session_cannot_repeat_what_the_holder_wrote(kit: Kit) -> None:
    worker, other = await kit.worker(), await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await worker.complete(job)

    assert (await other.complete(job)).verdicts == (Verdict("job", STALE, COMPLETED),)


async def test_a_job_that_was_never_claimed_takes_no_write(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")

    for fence in (0, 1):
        finished = await worker.finish(*every_move(Held("job", fence)))
        assert finished.verdicts == (Verdict("job", STALE, PENDING),) * 7
    assert await worker.claim_ids() == ["job"]


async def test_an_unknown_job_is_stale_and_has_no_state(kit: Kit) -> None:
    finished = await (await kit.worker()).finish(*every_move(Held("unknown", 1)))

    assert finished.verdicts == (Verdict("unknown", STALE, None),) * 7


async def test_after_a_rescue_every_write_is_refused_while_the_job_waits(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await die(kit, worker)
    before = await kit.job("job")
    assert before.state is PENDING

    finished = await worker.finish(*every_move(job.held))

    assert finished.verdicts == (Verdict("job", STALE, PENDING),) * 7
    after = await kit.job("job")
    assert (after.state, after.fence, after.due_at) == (PENDING, before.fence, before.due_at)


async def test_after_a_rescue_every_write_is_rejected_while_another_session_runs_the_job(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job")
    [old] = await worker.claim()
    await die(kit, worker)
    [new] = await heir.claim()

    finished = await worker.finish(*every_move(old.held))

    assert finished.verdicts == (Verdict("job", STALE, RUNNING),) * 7
    seen = await kit.job("job")
    assert (seen.state, seen.session, seen.fence) == (RUNNING, heir.id, new.fence)
    assert (await heir.complete(new, result=b'"heir"')).verdicts == (Verdict("job", APPLIED, COMPLETED),)


async def test_after_the_heir_finished_a_late_write_changes_nothing(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job")
    [old] = await worker.claim()
    await die(kit, worker)
    await heir.complete(*await heir.claim(), result=b'"heir"')

    finished = await worker.finish(*every_move(old.held))

    assert finished.verdicts == (Verdict("job", STALE, COMPLETED),) * 7
    seen = await kit.job("job")
    assert (seen.state, seen.result) == (COMPLETED, b'"heir"')


async def test_a_session_that_left_is_stale_and_not_an_error(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await worker.leave()

    finished = await worker.finish(*every_move(job.held))

    # The store itself has taken the job back as one that never began, so that move is a repetition.
    assert [verdict.acceptance for verdict in finished.verdicts] == [*[STALE] * 5, Acceptance.REPEATED, STALE]
    assert await kit.state("job") is PENDING


async def test_what_was_taken_back_at_a_renewal_takes_no_write(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    assert (await worker.renew()).taken_back == ("job",)

    assert (await worker.complete(job)).verdicts == (Verdict("job", STALE, PENDING),)
    assert await worker.claim_ids() == ["job"]


async def test_a_finish_with_a_claim_of_a_lost_session_is_rejected_as_lost(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await die(kit, worker)

    with pytest.raises(SessionLost):
        await store.finish(worker.id, [complete(job.held)], claim=worker.everything(1))

    assert await kit.state("job") is PENDING


# -- refused writes in the history -----------------------------------------------------------------


async def test_refused_writes_are_counted_under_the_fence_they_came_with(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job")
    [old] = await worker.claim()
    await die(kit, worker)
    await heir.claim()

    await worker.complete(old)
    await worker.finish(hand_back(old.held), fail(old.held, Reason.ERROR, "boom"))

    attempts = (await kit.job("job")).attempts
    assert [(each.fence, each.refused) for each in attempts] == [(1, 3), (2, 0)]


async def test_refused_writes_are_counted_after_the_job_is_final(kit: Kit) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job")
    [old] = await worker.claim()
    await die(kit, worker)
    await heir.complete(*await heir.claim())

    await worker.complete(old)

    attempts = (await kit.job("job")).attempts
    assert [(each.outcome, each.refused) for each in attempts] == [("crashed", 1), ("completed", 0)]


async def test_a_refused_write_under_an_unknown_fence_leaves_the_history_alone(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await worker.claim()
    before = await kit.job("job")

    await worker.complete(Held("job", 99))

    assert (await kit.job("job")).attempts == before.attempts


# -- progress --------------------------------------------------------------------------------------


async def test_the_latest_progress_is_kept(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    first = await store.progress(worker.id, [(job.held, b'{"done":1}')])
    second = await store.progress(worker.id, [(job.held, b'{"done":2}'), (job.held, b'{"done":3}')])

    assert first == [Verdict("job", APPLIED, RUNNING)]
    assert [verdict.state for verdict in second] == [RUNNING, RUNNING]
    assert all(verdict.accepted for verdict in second)
    assert (await kit.job("job")).progress == b'{"done":3}'


async def test_progress_is_rejected_from_a_session_that_does_not_hold_the_job(kit: Kit, store: Store) -> None:
    worker, other = await kit.worker(), await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await store.progress(worker.id, [(job.held, b"1")])

    wrong_session = await store.progress(other.id, [(job.held, b"2")])
    wrong_fence = await store.progress(worker.id, [(Held("job", job.fence + 1), b"3"), (Held("unknown", 1), b"4")])

    assert wrong_session == [Verdict("job", STALE, RUNNING)]
    assert wrong_fence == [Verdict("job", STALE, RUNNING), Verdict("unknown", STALE, None)]
    assert (await kit.job("job")).progress == b"1"


async def test_progress_is_refused_after_the_end_and_after_a_rescue(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker, heir = await kit.worker(), await survivor(kit)
    await kit.store.enqueue([kit.new(id="done"), kit.new(id="lost")])
    done, lost = await worker.claim(2)
    await worker.complete(done)
    await die(kit, worker)
    [again] = await heir.claim()

    verdicts = await store.progress(worker.id, [(done.held, b"1"), (lost.held, b"2")])

    assert verdicts == [Verdict("done", STALE, COMPLETED), Verdict("lost", STALE, RUNNING)]
    assert (await kit.job("done")).progress is None
    assert (await kit.job("lost")).progress is None
    assert await store.progress(heir.id, [(again.held, b"3")]) == [Verdict("lost", APPLIED, RUNNING)]


async def test_an_expired_session_may_still_report_progress(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    clock.advance(60)

    assert await store.progress(worker.id, [(job.held, b"1")]) == [Verdict("job", APPLIED, RUNNING)]


# -- final is final --------------------------------------------------------------------------------


@pytest.mark.parametrize("final", [COMPLETED, JobState.FAILED, JobState.CANCELLED])
async def test_final_stays_final(kit: Kit, store: Store, clock: ManualClock, final: JobState) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", expires=30)
    [job] = await worker.claim()
    end = {COMPLETED: complete(job.held, b"1"), JobState.FAILED: fail(job.held, Reason.ERROR, "boom")}
    await worker.finish(end.get(final, states.cancel(job.held)))
    before = await kit.job("job")
    assert before.state is final

    assert await store.cancel(["job"]) == [final]
    await worker.renew(job)
    clock.advance(100)
    await store.promote()
    await store.rescue()
    await store.admit()
    heir = await kit.worker()

    assert await heir.claim(5) == []
    assert (await store.recount()).differences == ()
    assert await kit.job("job") == before
