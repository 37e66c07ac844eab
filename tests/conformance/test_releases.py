"""Releasing a sticky key: clean-up first and alone, release last, and what a late job does to it."""

from __future__ import annotations

from fairlane.model.binding import Binding, BindingState, Release
from fairlane.model.job import Claimed, JobKind, JobState, NewJob, Reason
from fairlane.model.reading import Gate

from .kit import Kit, Worker


async def _binding(kit: Kit) -> Binding:
    """The one binding the key ever had."""
    [binding] = await kit.store.bindings("default", "plan")
    return binding


def _cleanup(kit: Kit, **fields: int) -> NewJob:
    return kit.new("tidy", kind=JobKind.CLEANUP, **fields)


async def _idle_key(kit: Kit) -> Worker:
    """A worker that ran the only job of the key."""
    worker = await kit.worker(index=0)
    await kit.worker(index=1)
    await kit.enqueue(sticky="plan")
    await worker.complete(*await worker.claim())
    return worker


async def _started_cleanup(kit: Kit, **fields: int) -> tuple[Worker, Claimed]:
    worker = await _idle_key(kit)
    await kit.store.release("default", "plan", _cleanup(kit, **fields))
    [claimed] = await worker.claim()
    assert claimed.kind is JobKind.CLEANUP
    return worker, claimed


async def test_releasing_a_key_that_is_not_bound_is_nothing_and_makes_no_clean_up(kit: Kit) -> None:
    await kit.worker()
    cleanup = _cleanup(kit)
    assert await kit.store.release("default", "plan", cleanup) is Release.NOTHING
    assert await kit.store.release("default", "plan") is Release.NOTHING
    assert await kit.store.get([cleanup.id]) == [None]
    assert await kit.store.bindings() == []


async def test_an_idle_key_without_a_clean_up_is_released_at_once(kit: Kit) -> None:
    await _idle_key(kit)
    kit.clock.advance(5)
    assert await kit.store.release("default", "plan") is Release.RELEASED
    binding = await _binding(kit)
    assert (binding.state, binding.closed_at) == (BindingState.RELEASED, kit.clock.now())


async def test_a_key_with_jobs_drains_and_is_released_by_the_end_of_the_last(kit: Kit) -> None:
    worker = await kit.worker()
    for _ in range(2):
        await kit.enqueue(sticky="plan")
    first, second = await worker.claim(10)
    assert await kit.store.release("default", "plan") is Release.DRAINING
    await worker.complete(first)
    assert (await _binding(kit)).state is BindingState.DRAINING
    await worker.complete(second)
    assert (await _binding(kit)).state is BindingState.RELEASED


async def test_the_clean_up_runs_last_and_alone_on_the_bound_worker(kit: Kit) -> None:
    worker, other = await kit.worker(index=0), await kit.worker(index=1)
    ids = [await kit.enqueue(sticky="plan") for _ in range(2)]
    [first] = await worker.claim(1)
    cleanup = _cleanup(kit)
    assert await kit.store.release("default", "plan", cleanup) is Release.DRAINING
    assert (await _binding(kit)).cleanup == cleanup.id
    position = await kit.positions(cleanup.id)
    assert position is not None
    assert position.gate is Gate.CLEANUP
    second = await worker.claim(10)
    assert [job.id for job in second] == ids[1:]
    await worker.complete(first)
    assert await worker.claim(10) == [], "one job of the key is still running"
    await worker.complete(*second)
    assert await other.claim(10) == []
    [claimed] = await worker.claim(10)
    assert (claimed.id, claimed.kind, claimed.sticky) == (cleanup.id, JobKind.CLEANUP, "plan")
    assert (await _binding(kit)).state is BindingState.DRAINING
    await worker.complete(claimed)
    binding = await _binding(kit)
    assert (binding.state, binding.cleanup_failed) == (BindingState.RELEASED, False)
    assert binding.closed_at == kit.clock.now()


async def test_cancelling_the_last_job_of_a_key_lets_its_clean_up_start(kit: Kit) -> None:
    worker = await _idle_key(kit)
    waiting = await kit.enqueue(sticky="plan")
    cleanup = _cleanup(kit)
    assert await kit.store.release("default", "plan", cleanup) is Release.DRAINING
    await kit.store.cancel([waiting])
    assert await worker.claim_ids(10) == [cleanup.id]


async def test_a_claim_that_cancels_the_last_job_of_a_key_as_expired_lets_its_clean_up_start(kit: Kit) -> None:
    worker = await _idle_key(kit)
    await kit.enqueue(sticky="plan", expires=5)
    cleanup = _cleanup(kit)
    assert await kit.store.release("default", "plan", cleanup) is Release.DRAINING
    kit.clock.advance(6)
    # At the latest the next claim starts it: this one may not examine its queue again.
    assert [*await worker.claim_ids(10), *await worker.claim_ids(10)] == [cleanup.id]


async def test_a_repeated_release_while_draining_changes_nothing(kit: Kit) -> None:
    worker = await _idle_key(kit)
    cleanup, another = _cleanup(kit), _cleanup(kit)
    assert await kit.store.release("default", "plan", cleanup) is Release.DRAINING
    before = await _binding(kit)
    for again in (cleanup, another, None):
        assert await kit.store.release("default", "plan", again) is Release.DRAINING
    assert await _binding(kit) == before
    assert await kit.store.get([another.id]) == [None]
    assert await worker.claim_ids(10) == [cleanup.id]
    for again in (cleanup, another, None):
        assert await kit.store.release("default", "plan", again) is Release.DRAINING
    assert await worker.claim(10) == []


async def test_a_repeated_release_of_what_is_released_changes_nothing(kit: Kit) -> None:
    worker, claimed = await _started_cleanup(kit)
    await worker.complete(claimed)
    before = await _binding(kit)
    another = _cleanup(kit)
    kit.clock.advance(5)
    for again in (another, None):
        assert await kit.store.release("default", "plan", again) is not Release.DRAINING
    assert await _binding(kit) == before
    assert await kit.store.get([another.id]) == [None]
    assert await worker.claim(10) == []


async def test_a_released_key_is_bound_anew_and_its_history_stays(kit: Kit) -> None:
    worker, claimed = await _started_cleanup(kit)
    await worker.complete(claimed)
    kit.clock.advance(5)
    await kit.enqueue(sticky="plan")
    now, before = await kit.store.bindings("default", "plan")
    assert (now.state, now.opened_at) == (BindingState.OPEN, kit.clock.now())
    assert before.state is BindingState.RELEASED


async def test_a_job_that_arrives_before_the_clean_up_starts_cancels_it_and_reopens_the_binding(
    kit: Kit,
) -> None:
    worker = await _idle_key(kit)
    opened = (await _binding(kit)).opened_at
    cleanup = _cleanup(kit)
    await kit.store.release("default", "plan", cleanup)
    kit.clock.advance(5)
    late = await kit.enqueue(sticky="plan")
    job = await kit.job(cleanup.id)
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.REOPENED)
    binding = await _binding(kit)
    assert (binding.state, binding.index, binding.opened_at) == (BindingState.OPEN, 0, opened)
    [claimed] = await worker.claim(10)
    assert claimed.id == late
    await worker.complete(claimed)
    again = _cleanup(kit)
    assert await kit.store.release("default", "plan", again) is Release.DRAINING
    assert await worker.claim_ids(10) == [again.id]


async def test_a_job_that_arrives_while_a_key_drains_without_a_clean_up_reopens_it(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(sticky="plan")
    [claimed] = await worker.claim()
    await kit.store.release("default", "plan")
    late = await kit.enqueue(sticky="plan")
    assert (await _binding(kit)).state is BindingState.OPEN
    await worker.complete(claimed)
    assert await worker.claim_ids(10) == [late]
    assert (await _binding(kit)).state is BindingState.OPEN


async def test_a_job_that_arrives_during_the_clean_up_waits_and_then_runs_on_the_same_binding(
    kit: Kit,
) -> None:
    worker, cleanup = await _started_cleanup(kit)
    before = await _binding(kit)
    late = await kit.enqueue(sticky="plan")
    assert await worker.claim(10) == []
    position = await kit.positions(late)
    assert position is not None
    assert position.gate is Gate.CLEANUP
    await worker.complete(cleanup)
    assert await worker.claim_ids(10) == [late]
    binding = await _binding(kit)
    assert (binding.state, binding.index, binding.opened_at) == (
        BindingState.OPEN,
        before.index,
        before.opened_at,
    )
    assert binding.closed_at is None


async def test_no_job_of_the_key_starts_while_the_clean_up_waits_for_its_retry(kit: Kit) -> None:
    worker, cleanup = await _started_cleanup(kit)
    await worker.retry(cleanup, delay=30)
    assert (await _binding(kit)).state is BindingState.DRAINING
    kit.clock.advance(30)
    await worker.renew()
    await kit.store.promote()
    [again] = await worker.claim(10)
    assert (again.id, again.attempt) == (cleanup.id, 2)
    await worker.complete(again)
    assert (await _binding(kit)).state is BindingState.RELEASED


async def test_a_clean_up_that_failed_for_good_still_releases_and_is_marked(kit: Kit) -> None:
    worker, cleanup = await _started_cleanup(kit)
    await worker.fail(cleanup)
    binding = await _binding(kit)
    assert (binding.state, binding.cleanup_failed) == (BindingState.RELEASED, True)


async def test_a_clean_up_that_failed_for_good_lets_the_job_behind_it_run(kit: Kit) -> None:
    worker, cleanup = await _started_cleanup(kit)
    late = await kit.enqueue(sticky="plan")
    await worker.fail(cleanup)
    assert await worker.claim_ids(10) == [late]


async def test_a_scheduled_job_does_not_hold_the_binding_of_its_key(kit: Kit) -> None:
    await _idle_key(kit)
    later = await kit.enqueue(sticky="plan", delay=60)
    assert await kit.store.release("default", "plan") is Release.RELEASED
    assert await kit.state(later) is JobState.SCHEDULED


async def test_a_job_that_waits_for_its_retry_holds_the_binding_of_its_key(kit: Kit) -> None:
    worker = await kit.worker()
    id = await kit.enqueue(sticky="plan")
    [claimed] = await worker.claim()
    await worker.retry(claimed, delay=60)
    cleanup = _cleanup(kit)
    assert await kit.store.release("default", "plan", cleanup) is Release.DRAINING
    assert await worker.claim(10) == []
    kit.clock.advance(60)
    await worker.renew()
    await kit.store.promote()
    assert await kit.state(cleanup.id) is JobState.PENDING, "a retry is no late job: it does not re-open"
    [again] = await worker.claim(10)
    assert again.id == id
    await worker.complete(again)
    assert await worker.claim_ids(10) == [cleanup.id]


async def test_a_clean_up_handed_back_starts_again_and_releases(kit: Kit) -> None:
    worker, cleanup = await _started_cleanup(kit)
    await worker.hand_back(cleanup)
    [again] = await worker.claim(10)
    assert again.id == cleanup.id
    await worker.complete(again)
    assert (await _binding(kit)).state is BindingState.RELEASED


async def test_cancelling_the_clean_up_ends_the_draining(kit: Kit) -> None:
    worker = await _idle_key(kit)
    cleanup = _cleanup(kit)
    await kit.store.release("default", "plan", cleanup)
    await kit.store.cancel([cleanup.id])
    assert await kit.state(cleanup.id) is JobState.CANCELLED
    # No job is left whose end would release it: such a binding must not drain for ever.
    assert (await _binding(kit)).state in (BindingState.RELEASED, BindingState.OPEN)
    assert await worker.claim(10) == []


async def test_cancelling_a_clean_up_before_its_turn_leaves_the_jobs_of_the_key_their_binding(kit: Kit) -> None:
    first, second = await kit.worker(), await kit.worker()
    job = await kit.enqueue(sticky="plan")
    tidy = NewJob(id="tidy", task="tidy", kind=JobKind.CLEANUP)
    assert await kit.store.release("default", "plan", tidy) is Release.DRAINING
    await kit.store.cancel([tidy.id])
    [binding] = await kit.store.bindings(key="plan")
    assert binding.state is BindingState.DRAINING
    await first.leave()
    assert await second.claim_ids() == [job], "a worker that is gone must not keep it"
