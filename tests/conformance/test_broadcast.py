"""Broadcasts: one copy for each worker of a pool, once, and a parent that runs until all copies are final."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.model.job import Claimed, Job, JobKind, JobState, Reason
from fairlane.model.states import cancel

from .kit import Kit, Worker
from .runs import everything


async def _broadcast(kit: Kit, **fields: Any) -> str:
    return await kit.enqueue("purge", kind=JobKind.BROADCAST, **fields)


async def _children(kit: Kit, parent: str) -> list[Job]:
    """The copies of a broadcast, in the order of their ids."""
    children = [job for job in await everything(kit, task="purge") if job.parent == parent]
    return sorted(children, key=lambda child: child.id)


async def _workers(kit: Kit, parent: str) -> list[str | None]:
    """The workers that the copies of a broadcast are for."""
    return [child.worker for child in await _children(kit, parent)]


async def _run_copy(worker: Worker) -> Claimed:
    [claimed] = await worker.claim(10)
    await worker.complete(claimed)
    return claimed


async def test_each_live_worker_of_the_pool_gets_one_copy_of_its_own(kit: Kit) -> None:
    workers = [await kit.worker("something-else", index=index) for index in range(3)]
    stranger = await kit.worker("default", pool="elsewhere")
    gone = await kit.worker(index=3)
    await gone.leave()
    parent = await _broadcast(kit, payload=b'[["model-3"],{}]')
    assert await kit.state(parent) is JobState.RUNNING
    children = {child.worker: child for child in await _children(kit, parent)}
    assert sorted(await _workers(kit, parent), key=str) == ["default/0", "default/1", "default/2"]
    assert len({child.id for child in children.values()} | {parent}) == 4
    for worker in workers:
        [claimed] = await worker.claim(10)
        assert claimed.id == children[worker.name].id
        assert (claimed.task, claimed.payload, claimed.kind) == ("purge", b'[["model-3"],{}]', JobKind.JOB)
    assert await stranger.claim(10) == []


async def test_the_parent_is_never_claimed_and_completes_with_its_last_copy(kit: Kit) -> None:
    workers = [await kit.worker() for _ in range(2)]
    parent = await _broadcast(kit)
    await _run_copy(workers[0])
    assert await kit.state(parent) is JobState.RUNNING
    await _run_copy(workers[1])
    job = await kit.job(parent)
    assert (job.state, job.finished_at) == (JobState.COMPLETED, kit.clock.now())


async def test_a_copy_that_failed_is_final_too(kit: Kit) -> None:
    worker = await kit.worker()
    parent = await _broadcast(kit)
    [claimed] = await worker.claim()
    await worker.fail(claimed)
    assert await kit.state(parent) is JobState.COMPLETED
    [child] = await _children(kit, parent)
    assert child.state is JobState.FAILED


async def test_a_copy_that_is_retried_keeps_the_parent_running(kit: Kit) -> None:
    worker = await kit.worker()
    parent = await _broadcast(kit)
    [claimed] = await worker.claim()
    await worker.retry(claimed, delay=5)
    assert await kit.state(parent) is JobState.RUNNING
    kit.clock.advance(5)
    await kit.store.promote()
    assert (await _run_copy(worker)).attempt == 2
    assert await kit.state(parent) is JobState.COMPLETED


async def test_a_broadcast_without_time_to_join_does_not_reach_a_worker_that_comes_later(kit: Kit) -> None:
    await kit.worker(index=0)
    parent = await _broadcast(kit)
    late = await kit.worker(index=1)
    assert await late.claim(10) == []
    assert await _workers(kit, parent) == ["default/0"]


async def test_a_worker_that_registers_in_time_joins_and_a_later_one_does_not(kit: Kit) -> None:
    first = await kit.worker(index=0, lease=1_000)
    parent = await _broadcast(kit, ttl=60)
    kit.clock.advance(59)
    second = await kit.worker(index=1)
    kit.clock.advance(2)
    third = await kit.worker(index=2)
    await _run_copy(first)
    await _run_copy(second)
    assert await third.claim(10) == []
    assert await _workers(kit, parent) == ["default/0", "default/1"]


async def test_who_joins_gets_copies_in_the_order_in_which_the_broadcasts_were_sent(kit: Kit) -> None:
    # Not in that of their ends, nor, where those are equal, in that of their numbers as text.
    parents = [await _broadcast(kit, ttl=ttl) for ttl in (60, 30, 90, *[30] * 9)]
    worker = await kit.worker(slots=20)
    copies = {child.id: child.parent for parent in parents for child in await _children(kit, parent)}
    assert [copies[claimed.id] for claimed in await worker.claim(20)] == parents


async def test_a_worker_that_joins_in_time_gets_one_copy_across_restarts(kit: Kit) -> None:
    parent = await _broadcast(kit, ttl=60)
    worker = await kit.worker(index=4)
    await _run_copy(worker)
    for _ in range(2):
        await worker.leave()
        kit.clock.advance(5)
        worker = await kit.worker(index=4)
        assert await worker.claim(10) == [], "this index has run it"
    assert await _workers(kit, parent) == ["default/4"]


async def test_a_worker_that_restarts_before_it_ran_its_copy_runs_that_one(kit: Kit) -> None:
    worker = await kit.worker(index=0)
    parent = await _broadcast(kit, ttl=60)
    [child] = await _children(kit, parent)
    await worker.leave()
    again = await kit.worker(index=0)
    assert await again.claim_ids(10) == [child.id]
    assert len(await _children(kit, parent)) == 1


async def test_an_automatic_index_that_is_given_out_again_gets_no_second_copy(kit: Kit) -> None:
    worker = await kit.worker()
    parent = await _broadcast(kit, ttl=60)
    await _run_copy(worker)
    await worker.leave()
    again = await kit.worker()
    assert again.name == worker.name
    assert await again.claim(10) == []
    assert len(await _children(kit, parent)) == 1


async def test_while_workers_may_join_the_parent_runs_and_then_time_completes_it(kit: Kit) -> None:
    worker = await kit.worker(lease=1_000)
    parent = await _broadcast(kit, ttl=60)
    await _run_copy(worker)
    assert await kit.state(parent) is JobState.RUNNING
    kit.clock.advance(59)
    await kit.store.promote()
    assert await kit.state(parent) is JobState.RUNNING
    kit.clock.advance(2)
    await kit.store.promote()
    assert await kit.state(parent) is JobState.COMPLETED


async def test_copies_that_end_after_the_time_to_join_complete_the_parent(kit: Kit) -> None:
    worker = await kit.worker(lease=1_000)
    parent = await _broadcast(kit, ttl=60)
    kit.clock.advance(61)
    await kit.store.promote()
    assert await kit.state(parent) is JobState.RUNNING
    await _run_copy(worker)
    assert await kit.state(parent) is JobState.COMPLETED


async def test_a_broadcast_without_workers_is_complete_when_none_can_join_any_more(kit: Kit) -> None:
    now, later = await _broadcast(kit), await _broadcast(kit, ttl=60)
    await kit.store.promote()
    assert await kit.state(now) is JobState.COMPLETED
    assert await kit.state(later) is JobState.RUNNING
    kit.clock.advance(61)
    await kit.store.promote()
    assert await kit.state(later) is JobState.COMPLETED


async def test_enqueueing_a_broadcast_returns_its_state(kit: Kit) -> None:
    requests = [kit.new("purge", kind=JobKind.BROADCAST, ttl=ttl) for ttl in (0.0, 60.0)]
    for request in requests:
        [answer] = await kit.store.enqueue([request])
        assert answer.state is await kit.state(request.id)


@pytest.mark.parametrize("index", [None, 4])
@pytest.mark.parametrize("leaves", [True, False])
async def test_a_copy_for_a_worker_that_never_comes_back_does_not_keep_the_parent_for_ever(
    kit: Kit, index: int | None, leaves: bool
) -> None:
    gone, stays = await kit.worker(index=index), await kit.worker(index=9, lease=1e6)
    parent = await _broadcast(kit)
    await _run_copy(stays)
    if leaves:
        await gone.leave()
    kit.clock.advance(3_600)
    await kit.store.rescue()
    await kit.store.promote()
    assert await kit.state(parent) is JobState.COMPLETED
    assert [child.reason for child in await _children(kit, parent)] == [Reason.WORKER_LOST, None]


async def test_cancelling_a_broadcast_cancels_its_waiting_copies(kit: Kit) -> None:
    workers = [await kit.worker() for _ in range(2)]
    parent = await _broadcast(kit, ttl=60)
    await kit.store.cancel([parent])
    assert [child.state for child in await _children(kit, parent)] == [JobState.CANCELLED] * 2
    assert await kit.state(parent) is JobState.CANCELLED
    for worker in workers:
        assert await worker.claim(10) == []
    joiner = await kit.worker()
    assert await joiner.claim(10) == [], "nobody joins a broadcast that was cancelled"


async def test_a_copy_that_never_ran_still_names_its_worker(kit: Kit) -> None:
    await kit.worker(index=3)
    parent = await _broadcast(kit)
    await kit.store.cancel([parent])
    [child] = await _children(kit, parent)
    assert child.worker == "default/3"
    assert child.as_new("again").worker == 3


async def test_cancelling_a_broadcast_asks_its_running_copies_to_stop(kit: Kit) -> None:
    busy, _ = await kit.worker(), await kit.worker()
    parent = await _broadcast(kit)
    [claimed] = await busy.claim()
    await kit.store.cancel([parent])
    assert (await busy.renew(claimed)).cancel == (claimed.id,)
    assert await kit.state(parent) is JobState.RUNNING, "a body has not ended yet"
    await busy.finish(cancel(claimed.held))
    assert await kit.state(parent) is JobState.CANCELLED
    assert {child.state for child in await _children(kit, parent)} == {JobState.CANCELLED}


async def test_sending_a_broadcast_twice_under_one_id_sends_it_once(kit: Kit) -> None:
    await kit.worker()
    request = kit.new("purge", kind=JobKind.BROADCAST)
    answers = [(await kit.store.enqueue([request]))[0] for _ in range(2)]
    assert [answer.created for answer in answers] == [True, False]
    assert len(await _children(kit, request.id)) == 1


async def test_a_copy_does_not_count_as_a_binding(kit: Kit) -> None:
    worker = await kit.worker()
    await _broadcast(kit)
    assert await kit.store.bindings() == []
    await _run_copy(worker)
    assert (await kit.store.recount()).differences == ()


async def test_copies_of_a_lost_worker_end_however_many_other_broadcasts_wait(kit: Kit) -> None:
    await kit.worker(lease=1e6)
    await kit.enqueue_all([kit.new(kind=JobKind.BROADCAST) for _ in range(1_010)])
    gone = await kit.worker(pool="others")
    parent = await kit.enqueue(kind=JobKind.BROADCAST, pool="others")
    await gone.leave()
    for _ in range(100):
        await kit.store.rescue()
        if (await kit.state(parent)).final:
            break
        kit.clock.advance(2)
    assert await kit.state(parent) is JobState.COMPLETED
    assert [child.reason for child in await kit.store.get([f"{parent}/0"]) if child] == [Reason.WORKER_LOST]
