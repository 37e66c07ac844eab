"""Leaving and taking over: what happens to the jobs of a session, and which session gets its index."""

from __future__ import annotations

import pytest

from fairlane.errors import IndexTaken, NotFound, SessionLost
from fairlane.model.binding import BindingState
from fairlane.model.job import Acceptance, JobKind, JobState, Reason
from fairlane.model.session import SessionState
from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import die, survivor
from .kit import Kit

PENDING, RUNNING, CANCELLED = JobState.PENDING, JobState.RUNNING, JobState.CANCELLED


async def test_leaving_gives_everything_back_uncharged_when_nothing_had_begun(kit: Kit) -> None:
    worker, heir = await kit.worker(), await kit.worker()
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])
    await worker.claim(2)

    await worker.leave()

    again = await heir.claim(5)
    assert [(job.id, job.fence, job.attempt, job.suspect) for job in again] == [
        ("one", 2, 1, False),
        ("two", 2, 1, False),
    ]


async def test_leaving_charges_only_what_had_begun(kit: Kit) -> None:
    worker, heir = await kit.worker(), await kit.worker()
    await kit.store.enqueue([kit.new(id="begun"), kit.new(id="not begun")])
    begun, _ = await worker.claim(2)

    await worker.leave(begun.held)

    assert (await kit.job("begun")).attempts[0].outcome == "crashed"
    assert (await kit.job("not begun")).attempts[0].outcome != "crashed"
    again = {job.id: (job.fence, job.attempt, job.suspect) for job in await heir.claim(5)}
    assert again == {"begun": (2, 2, True), "not begun": (2, 1, False)}


async def test_leaving_without_a_word_counts_everything_as_begun(kit: Kit, store: Store) -> None:
    worker, heir = await kit.worker(), await kit.worker()
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two", retries=0)])
    await worker.claim(2)

    await store.leave(worker.id)

    [one] = await heir.claim(5)
    assert (one.id, one.attempt, one.suspect) == ("one", 2, True)
    two = await kit.job("two")
    assert (two.state, two.reason) == (JobState.FAILED, Reason.CRASHED)


async def test_a_fence_that_is_not_held_does_not_count_as_begun(kit: Kit) -> None:
    worker, heir = await kit.worker(), await kit.worker()
    await kit.enqueue(id="job")
    [first] = await worker.claim()
    await worker.hand_back(first)
    await worker.claim()

    await worker.leave(first.held)

    [again] = await heir.claim(5)
    assert (again.fence, again.attempt, again.suspect) == (3, 1, False)


async def test_a_cancel_that_was_asked_for_comes_true_when_the_session_leaves(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="begun"), kit.new(id="not begun")])
    begun, _ = await worker.claim(2)
    await kit.store.cancel(["begun", "not begun"])

    await worker.leave(begun.held)

    for id in ("begun", "not begun"):
        job = await kit.job(id)
        assert (job.state, job.reason) == (CANCELLED, Reason.BY_USER)


async def test_leaving_cancels_the_turns_of_the_session_and_hands_their_lane_on(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    leaving, staying = await kit.waiter(), await kit.waiter()
    await store.enqueue(
        [
            kit.new(id="granted", kind=JobKind.TURN, lane="ann", waiter=leaving.id),
            kit.new(id="waiting", kind=JobKind.TURN, lane="ann", waiter=leaving.id),
            kit.new(id="next", kind=JobKind.TURN, lane="ann", waiter=staying.id),
        ]
    )
    assert [await kit.state(id) for id in ("granted", "waiting", "next")] == [RUNNING, PENDING, PENDING]

    await store.leave(leaving.id)

    for id in ("granted", "waiting"):
        job = await kit.job(id)
        assert (job.state, job.reason) == (CANCELLED, Reason.WAITER_GONE)
    job = await kit.job("next")
    assert (job.state, job.session) == (RUNNING, staying.id)


async def test_a_session_that_left_is_over(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await worker.leave()

    [session] = await store.sessions()
    assert session.state is SessionState.ENDED
    with pytest.raises(SessionLost):
        await worker.renew()
    with pytest.raises(SessionLost):
        await worker.claim()


async def test_leaving_twice_is_harmless(kit: Kit, store: Store) -> None:
    worker, heir = await kit.worker(), await kit.worker()
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await worker.leave()
    [again] = await heir.claim()

    await store.leave(worker.id, begun=[job.held])
    await store.leave(worker.id)

    assert (await kit.job("job")).session == heir.id
    assert (await heir.complete(again)).verdicts[0].acceptance is Acceptance.APPLIED


async def test_an_unknown_session_cannot_leave(store: Store) -> None:
    with pytest.raises(NotFound):
        await store.leave("unknown")


# -- automatic indices -----------------------------------------------------------------------------


async def test_an_unnamed_worker_gets_the_lowest_free_index_of_its_pool(kit: Kit) -> None:
    workers = [await kit.worker() for _ in range(3)]
    elsewhere = await kit.worker(pool="other")
    assert [worker.session.index for worker in workers] == [0, 1, 2]
    assert (elsewhere.session.index, elsewhere.session.named) == (0, False)

    await workers[1].leave()

    assert [(await kit.worker()).session.index for _ in range(2)] == [1, 3]


async def test_a_named_index_is_not_given_out(kit: Kit) -> None:
    await kit.worker(index=0)
    await kit.worker(index=2)

    assert [(await kit.worker()).session.index for _ in range(3)] == [1, 3, 4]


async def test_the_index_of_a_dead_worker_is_free(kit: Kit) -> None:
    first = await kit.worker()
    second = await survivor(kit)
    await die(kit, first)

    assert (second.session.index, (await kit.worker()).session.index) == (1, 0)


# -- named indices ---------------------------------------------------------------------------------


async def test_a_named_worker_that_comes_back_on_its_host_takes_its_place_and_its_bindings(
    kit: Kit, store: Store
) -> None:
    await kit.worker(index=0, host="elsewhere")
    await kit.enqueue(id="filler", sticky="other key")
    old = await kit.worker(index=3, host="machine")
    await kit.enqueue(id="bound", sticky="key")
    assert (await kit.job("bound")).worker == "default/3"

    new = await kit.worker(index=3, host="machine")

    sessions = {session.id: session for session in await store.sessions()}
    assert sessions[old.id].state is SessionState.DEAD
    assert (sessions[new.id].state, sessions[new.id].index) == (SessionState.LIVE, 3)
    [binding] = await store.bindings(key="key")
    assert (binding.index, binding.state) == (3, BindingState.OPEN)
    assert await new.claim_ids(5) == ["bound"]
    with pytest.raises(SessionLost):
        await old.renew()


async def test_the_jobs_of_a_worker_that_was_replaced_are_taken_back_as_after_a_crash(kit: Kit) -> None:
    old = await kit.worker(index=3, host="machine")
    await kit.store.enqueue([kit.new(id="again"), kit.new(id="spent", retries=0)])
    again, _ = await old.claim(2)

    new = await kit.worker(index=3, host="machine")

    [job] = await new.claim(5)
    assert (job.id, job.fence, job.attempt, job.suspect) == ("again", 2, 2, True)
    spent = await kit.job("spent")
    assert (spent.state, spent.reason) == (JobState.FAILED, Reason.CRASHED)
    assert (await old.complete(again)).verdicts[0].acceptance is Acceptance.STALE


async def test_the_turns_of_a_worker_that_was_replaced_are_cancelled_and_their_lane_goes_on(
    kit: Kit, store: Store
) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    old, waiter = await kit.worker(index=3, host="machine"), await kit.waiter()
    for id, owner in [("granted", old), ("waiting", old), ("next", waiter)]:
        await store.enqueue([kit.new(id=id, kind=JobKind.TURN, lane="ann", waiter=owner.id)])

    await kit.worker(index=3, host="machine")

    for id in ("granted", "waiting"):
        job = await kit.job(id)
        assert (job.state, job.reason) == (CANCELLED, Reason.WAITER_GONE)
    assert (await kit.job("next")).session == waiter.id


async def test_a_named_index_is_refused_to_another_host_while_its_session_lives(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    old = await kit.worker(index=3, host="machine", lease=15)
    clock.advance(5)

    with pytest.raises(IndexTaken) as refusal:
        await kit.worker(index=3, host="another")

    assert refusal.value.retry_after == pytest.approx(10)
    assert [session.id for session in await store.sessions()] == [old.id]
    await old.renew()


@pytest.mark.parametrize("end", ["left", "declared dead"])
async def test_another_host_may_have_a_named_index_once_its_session_ended(kit: Kit, end: str) -> None:
    old = await kit.worker(index=3, host="machine")
    if end == "left":
        await old.leave()
    else:
        await die(kit, old)

    assert (await kit.worker(index=3, host="another")).session.index == 3


async def test_a_named_index_in_another_pool_is_another_index(kit: Kit) -> None:
    await kit.worker(index=3, host="machine", pool="one")

    assert (await kit.worker(index=3, host="another", pool="two")).name == "two/3"


async def test_a_named_worker_that_left_finds_its_bindings_within_the_lease(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    old = await kit.worker(index=3, host="machine", lease=15)
    await survivor(kit)
    # Of two workers without bindings the lower index takes the first key, so the second one goes to old.
    await kit.enqueue(id="first", sticky="first key")
    await kit.enqueue(id="second", sticky="second key")
    assert (await kit.job("second")).worker == old.name == "default/3"

    await old.leave()
    clock.advance(10)
    await store.rescue()
    new = await kit.worker(index=3, host="machine")

    assert await new.claim_ids(5) == ["second"]
    [binding] = await store.bindings(key="second key")
    assert (binding.index, binding.state) == (3, BindingState.OPEN)
