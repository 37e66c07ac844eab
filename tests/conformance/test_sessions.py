"""Sessions: how they stay alive by renewing, what a renewal returns, and how they end."""

from __future__ import annotations

from contextlib import suppress

import pytest

from fairlane.errors import FairlaneError, NotFound, SessionLost
from fairlane.model.job import Acceptance, Held, JobKind, JobState, Priority, Reason, Verdict
from fairlane.model.session import NewSession, Renewal, Session, SessionKind, SessionState
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Reserved, Slots
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import die, survivor
from .kit import Kit

PENDING, RUNNING = JobState.PENDING, JobState.RUNNING


async def seen(store: Store, id: str) -> Session:
    """The session as readers see it."""
    [session] = [session for session in await store.sessions() if session.id == id]
    return session


async def test_a_registered_session_is_live_and_shows_its_properties(store: Store, clock: ManualClock) -> None:
    new = NewSession(
        id="first",
        kind=SessionKind.WORKER,
        lease=20.0,
        host="machine-1",
        pid=4711,
        pool="gpu",
        index=3,
        queues=("images", "mail"),
        slots=Slots(total=8, reserved=Reserved(high=2, normal=1)),
    )

    answer = await store.register(new)

    assert answer == Session(
        id="first",
        kind=SessionKind.WORKER,
        state=SessionState.LIVE,
        host="machine-1",
        pid=4711,
        pool="gpu",
        index=3,
        named=True,
        queues=("images", "mail"),
        slots=Slots(total=8, reserved=Reserved(high=2, normal=1)),
        started_at=clock.now(),
        lease=20.0,
        remaining=20.0,
        running=(0, 0, 0),
    )
    assert await store.sessions() == [answer]


async def test_registering_again_answers_the_same_and_renews(store: Store, kit: Kit, clock: ManualClock) -> None:
    new = NewSession(id="first", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=2))
    first = await store.register(new)
    clock.advance(10)

    again = await store.register(new)

    assert again == first
    assert again.remaining == 15.0
    assert len(await store.sessions()) == 1


async def test_registering_again_leaves_the_jobs_of_the_session_alone(kit: Kit, store: Store) -> None:
    new = NewSession(id="first", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=2))
    await store.register(new)
    worker = await kit.worker(id="second")
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    await kit.worker(id="second")

    assert (await worker.complete(job)).verdicts == (Verdict("job", Acceptance.APPLIED, JobState.COMPLETED),)


async def test_only_workers_have_an_index(kit: Kit, store: Store) -> None:
    waiter = await kit.waiter()
    manager = await store.register(NewSession(id="manager", kind=SessionKind.MANAGER))

    assert (waiter.session.index, manager.index) == (None, None)
    assert (await kit.worker()).session.index == 0


async def test_sessions_are_listed_newest_first_with_what_they_run(kit: Kit, store: Store, clock: ManualClock) -> None:
    older = await kit.worker()
    clock.advance(1)
    newer = await kit.worker()
    for priority in (Priority.HIGH, Priority.LOW, Priority.LOW):
        await kit.enqueue(priority=priority)
    await older.claim(5)

    listed = await store.sessions()

    assert [session.id for session in listed] == [newer.id, older.id]
    assert [session.running for session in listed] == [(0, 0, 0), (1, 0, 2)]


# -- renewal ---------------------------------------------------------------------------------------


async def test_a_renewal_extends_the_lease_by_its_whole_length(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker(lease=15)
    clock.advance(10)
    assert (await seen(store, worker.id)).remaining == pytest.approx(5)

    renewal = await worker.renew()

    assert renewal == Renewal(lost=(), cancel=(), taken_back=(), now=clock.now())
    assert (await seen(store, worker.id)).remaining == pytest.approx(15)


async def test_a_renewal_names_claims_that_are_not_the_sessions_own(kit: Kit) -> None:
    worker, other = await kit.worker(), await kit.worker()
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(3)])
    held, ended = await worker.claim(2)
    [theirs] = await other.claim()
    await worker.complete(ended)
    wrong = [ended.held, theirs.held, Held(held.id, held.fence + 1), Held("unknown", 1)]

    renewal = await worker.renew(held, *wrong)

    assert set(renewal.lost) == set(wrong)
    assert (renewal.cancel, renewal.taken_back) == ((), ())
    assert await kit.state(held.id) is RUNNING


async def test_a_renewal_names_the_jobs_to_cancel_until_they_have_ended(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])
    one, two = await worker.claim(2)
    await kit.store.cancel(["two"])

    assert (await worker.renew(one, two)).cancel == ("two",)
    assert (await worker.renew(one, two)).cancel == ("two",)
    await worker.fail(two)
    assert (await worker.renew(one)).cancel == ()


async def test_what_a_renewal_does_not_name_is_taken_back_uncharged(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="kept"), kit.new(id="never heard of")])
    kept, _ = await worker.claim(2)

    renewal = await worker.renew(kept)

    assert renewal.taken_back == ("never heard of",)
    job = await kit.job("never heard of")
    assert (job.state, job.suspect, job.attempts[0].outcome) == (PENDING, False, "taken_back")
    assert await kit.state("kept") is RUNNING
    [again] = await worker.claim()
    assert (again.id, again.fence, again.attempt) == ("never heard of", 2, 1)


async def test_a_claim_whose_reply_is_still_on_its_way_is_not_taken_back(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])
    [one] = await worker.claim()
    answered = worker.last_claim
    [two] = await worker.claim()

    assert (await worker.renew(one, claim=answered)).taken_back == ()
    assert await kit.state("two") is RUNNING
    assert (await worker.renew(one, claim=worker.last_claim)).taken_back == ("two",)
    assert (await worker.renew(one, two)).lost == (two.held,)


async def test_a_repeated_renewal_takes_nothing_more(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await worker.claim()
    await worker.renew()

    assert (await worker.renew()).taken_back == ()


async def test_what_is_taken_back_after_a_cancel_request_is_cancelled(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await worker.claim()
    await kit.store.cancel(["job"])

    await worker.renew()

    job = await kit.job("job")
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.BY_USER)
    assert await worker.claim() == []


async def test_a_job_that_was_taken_back_and_cancelled_is_no_write_of_the_session(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await kit.store.cancel(["job"])
    await worker.renew()

    # The session never wrote anything about the job, so there is nothing to repeat.
    for finished in (await worker.hand_back(job), await worker.fail(job), await worker.complete(job)):
        assert finished.verdicts == (Verdict("job", Acceptance.STALE, JobState.CANCELLED),)


async def test_a_turn_is_never_taken_back(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    waiter = await kit.waiter()
    await store.enqueue([kit.new(id="turn", kind=JobKind.TURN, lane="ann", waiter=waiter.id)])
    assert await kit.state("turn") is RUNNING

    renewal = await waiter.renew(claim=1_000)

    assert renewal.taken_back == ()
    assert await kit.state("turn") is RUNNING


async def test_a_session_that_was_never_registered_cannot_renew(store: Store) -> None:
    with pytest.raises((SessionLost, NotFound)):
        await store.renew("unknown", [], claim=0)


# -- stopping --------------------------------------------------------------------------------------


async def test_stopping_is_for_good(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await worker.renew(stopping=True)
    assert (await seen(store, worker.id)).state is SessionState.STOPPING

    await worker.renew(stopping=False)

    assert (await seen(store, worker.id)).state is SessionState.STOPPING


async def test_a_stopping_session_finishes_what_it_has(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()

    assert (await worker.renew(job, stopping=True)).lost == ()

    assert (await worker.complete(job)).verdicts == (Verdict("job", Acceptance.APPLIED, JobState.COMPLETED),)


# -- expired, dead ---------------------------------------------------------------------------------


async def test_an_expired_session_may_renew_and_finish(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker(lease=15)
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])
    one, two = await worker.claim(2)
    clock.advance(60)
    assert (await seen(store, worker.id)).remaining == pytest.approx(-45)

    assert (await worker.complete(one)).verdicts == (Verdict("one", Acceptance.APPLIED, JobState.COMPLETED),)
    assert (await worker.renew(two)).lost == ()

    assert (await store.rescue()).declared == ()
    session = await seen(store, worker.id)
    assert session.state is SessionState.LIVE
    assert session.remaining == pytest.approx(15)
    assert await kit.state("two") is RUNNING


async def test_a_lease_holds_to_its_last_moment(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker(lease=15)
    clock.advance(14.9)
    assert (await store.rescue()).declared == ()

    clock.advance(0.2)
    assert (await store.rescue()).declared == (worker.id,)


@pytest.mark.parametrize("lease", [0.05, 0.1, 0.3, 1.7, 15.1])
async def test_a_lease_counts_from_whatever_fraction_of_a_second_it_began(
    kit: Kit, store: Store, clock: ManualClock, lease: float
) -> None:
    # Sums of such numbers are rounded: a lease must not look longer than it is, and so like one of another boot.
    for _ in range(40):
        clock.advance(0.7)
        worker = await kit.worker(lease=lease)
        assert worker.session.remaining == pytest.approx(lease)
        assert (await store.rescue()).declared == ()
        await worker.leave()


async def test_declared_dead_is_final(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await die(kit, worker)
    assert (await seen(store, worker.id)).state is SessionState.DEAD

    with pytest.raises(SessionLost):
        await worker.renew(job)
    with pytest.raises(SessionLost):
        await worker.claim()
    assert (await worker.complete(job)).verdicts == (Verdict("job", Acceptance.STALE, PENDING),)

    assert (await seen(store, worker.id)).state is SessionState.DEAD
    assert await kit.state("job") is PENDING


async def test_a_dead_session_cannot_be_registered_back_to_life(kit: Kit, store: Store) -> None:
    worker = await kit.worker(id="dead")
    await die(kit, worker)

    with suppress(FairlaneError):
        await kit.worker(id="dead")

    assert (await seen(store, "dead")).state is SessionState.DEAD
    with pytest.raises(SessionLost):
        await worker.renew()


async def test_leases_ignore_a_step_of_the_wall_clock(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await kit.worker(lease=15)

    clock.step_wall(86_400)
    assert (await store.rescue()).declared == ()
    assert (await seen(store, worker.id)).remaining == pytest.approx(15)

    clock.step_wall(-2 * 86_400)
    clock.advance(16)
    assert (await store.rescue()).declared == (worker.id,)


async def test_a_reboot_ends_every_lease(kit: Kit, store: Store, clock: ManualClock) -> None:
    before = await kit.worker(lease=15)
    await kit.enqueue(id="job")
    await before.claim()

    # The new boot's monotonic clock reads less than the lease's end did: that must not make it longer.
    clock.reboot()
    after = await survivor(kit)
    rescued = await store.rescue()

    assert rescued.declared == (before.id,)
    assert await after.claim_ids() == ["job"]


async def test_a_lease_made_after_a_reboot_counts_as_usual(kit: Kit, store: Store, clock: ManualClock) -> None:
    clock.reboot()
    worker = await kit.worker(lease=15)
    clock.advance(14)
    assert (await store.rescue()).declared == ()

    clock.advance(2)
    assert (await store.rescue()).declared == (worker.id,)


async def test_readers_see_which_tasks_a_session_knows(kit: Kit) -> None:
    old = await kit.worker(tasks=("mail", "images"))
    same = await kit.worker(tasks=("mail", "images"))
    new = await kit.worker(tasks=("mail", "images", "videos"))
    none = await kit.worker(tasks=())
    silent = await kit.worker()
    assert new.session.tasks is not None
    assert set(new.session.tasks) == {"mail", "images", "videos"}
    known = {session.id: session.tasks for session in await kit.store.sessions()}
    assert known[silent.id] is None
    assert known[none.id] == ()
    assert {id: set(known[id] or ()) for id in (old.id, same.id, new.id)} == {
        old.id: {"mail", "images"},
        same.id: {"mail", "images"},
        new.id: {"mail", "images", "videos"},
    }
