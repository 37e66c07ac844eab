"""Forgetting jobs by id: final ones only, with their ids remembered as after a prune."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairlane.errors import Conflict, InvalidInput
from fairlane.model.job import MOST_JOBS_PER_CALL, JobState
from fairlane.model.maintenance import DAY, Retention
from fairlane.model.reading import Filter
from fairlane.model.states import complete

from .kit import Kit

KEEP = Retention()


async def ended(kit: Kit, **fields: Any) -> dict[str, str]:
    """One job in each final state, by the name of the state."""
    worker = await kit.worker(lease=1e6)
    done, failed, cancelled = [await kit.enqueue(**fields) for _ in range(3)]
    first, second = await worker.claim(2)
    await worker.complete(first)
    await worker.fail(second)
    await kit.store.cancel([cancelled])
    await worker.leave()
    return {"completed": done, "failed": failed, "cancelled": cancelled}


async def test_final_jobs_are_forgotten_and_found_no_more(kit: Kit) -> None:
    ids = await ended(kit, lane="user:ann")
    [other] = [await kit.enqueue(lane="user:ann")]
    assert await kit.store.forget(list(ids.values()), KEEP) == [True, True, True]
    assert await kit.store.get([*ids.values(), other]) == [None, None, None, await kit.job(other)]
    for where in (
        Filter(),
        Filter(queue="default"),
        Filter(queue="default", lane="user:ann"),
        Filter(task="task"),
        *(Filter(state=state) for state in JobState if state.final),
    ):
        assert {job.id for job in (await kit.store.find(where)).jobs} <= {other}
    assert (await kit.store.recount()).differences == ()


async def test_what_is_not_final_or_not_known_is_left_alone(kit: Kit) -> None:
    worker = await kit.worker()
    runs, waits = await kit.enqueue(), await kit.enqueue()
    later = await kit.enqueue(delay=60)
    [claimed] = await worker.claim()
    assert await kit.store.forget([runs, "nobody", waits, "\ud800", later], KEEP) == [False] * 5
    assert [await kit.state(id) for id in (runs, waits, later)] == ["running", "pending", "scheduled"]
    await worker.complete(claimed)
    assert await kit.store.forget([waits, runs], KEEP) == [False, True]


async def test_forgetting_again_finds_nothing(kit: Kit) -> None:
    ids = list((await ended(kit)).values())
    assert await kit.store.forget([ids[0], ids[0]], KEEP) == [True, True]
    assert await kit.store.forget(ids, KEEP) == [False, True, True]
    assert await kit.store.forget(ids, KEEP) == [False, False, False]
    assert await kit.store.forget([], KEEP) == []


async def test_a_forgotten_id_stays_taken_for_its_time(kit: Kit) -> None:
    worker = await kit.worker(lease=1e6)
    await kit.enqueue(id="once")
    await worker.complete(*await worker.claim())
    assert await kit.store.forget(["once"], KEEP) == [True]
    [again] = await kit.store.enqueue([kit.new(id="once")])
    assert (again.created, again.state) == (False, JobState.COMPLETED)
    with pytest.raises(Conflict):
        await kit.enqueue(id="once", payload=b'[["other"],{}]')
    kit.clock.advance(DAY + 1)
    await kit.store.prune(Retention())
    [anew] = await kit.store.enqueue([kit.new(id="once")])
    assert anew.created


async def test_the_retention_determines_how_long_an_id_stays_taken(kit: Kit) -> None:
    worker = await kit.worker(lease=1e6)
    await kit.enqueue(id="once")
    await worker.complete(*await worker.claim())
    kit.clock.advance(2)
    await kit.store.forget(["once"], Retention(id_seconds=1))
    [anew] = await kit.store.enqueue([kit.new(id="once")])
    assert anew.created


@pytest.mark.parametrize("by", ["forget", "prune"])
async def test_the_id_of_a_retry_outlives_the_job_it_retries(kit: Kit, by: str) -> None:
    """Otherwise retrying all failed jobs again would repeat those that were retried."""
    worker = await kit.worker(lease=1e6)
    first = await kit.enqueue()
    await worker.fail(*await worker.claim())
    again = (await kit.job(first)).as_new("retry-1")
    await kit.store.enqueue([again])
    await worker.complete(*await worker.claim())
    if by == "forget":
        assert await kit.store.forget(["retry-1"], KEEP) == [True]
    else:
        assert (await kit.store.prune(Retention(completed_count=0))).jobs == 1
    kit.clock.advance(7 * DAY - 60)
    await kit.store.prune(Retention())
    assert await kit.state(first) == "failed"
    [answer] = await kit.store.enqueue([again])
    assert not answer.created


async def test_a_retry_that_is_pruned_by_age_is_remembered_too(kit: Kit) -> None:
    worker = await kit.worker(lease=1e6)
    first = await kit.enqueue()
    await worker.fail(*await worker.claim())
    again = (await kit.job(first)).as_new("retry-1")
    await kit.store.enqueue([again])
    await worker.complete(*await worker.claim())
    kit.clock.advance(2 * DAY)
    assert (await kit.store.prune(Retention())).jobs == 1
    [answer] = await kit.store.enqueue([again])
    assert not answer.created


async def test_counts_of_ended_jobs_outlive_those_that_are_forgotten(kit: Kit) -> None:
    await kit.store.forget(list((await ended(kit)).values()), KEEP)
    [queue] = await kit.store.queues()
    assert (queue.counts.completed, queue.counts.failed, queue.counts.cancelled) == (1, 1, 1)


async def test_a_late_write_about_a_forgotten_job_is_stale(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="once")
    [claimed] = await worker.claim()
    await worker.complete(claimed)
    await kit.store.forget(["once"], KEEP)
    [verdict] = (await worker.finish(complete(claimed.held, b"2"))).verdicts
    assert (verdict.accepted, verdict.state) == (False, None)


async def test_too_many_at_once_are_refused(kit: Kit) -> None:
    with pytest.raises(InvalidInput, match="ids"):
        await kit.store.forget([f"job-{number}" for number in range(MOST_JOBS_PER_CALL + 1)], KEEP)


async def test_two_that_forget_the_same_jobs_at_once_forget_each_once(kit: Kit) -> None:
    worker = await kit.worker(slots=100)
    ids = [await kit.enqueue() for _ in range(60)]
    await worker.complete(*await worker.claim(60))
    one, other = await asyncio.gather(kit.store.forget(ids, KEEP), kit.store.forget(ids[::-1], KEEP))
    assert sum(one) + sum(other) == 60
    assert await kit.store.get(ids) == [None] * 60
