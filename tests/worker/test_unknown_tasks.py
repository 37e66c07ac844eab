"""Jobs of tasks that a worker does not know: another application on the same queue, or a deploy in progress."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from fairlane.model.job import JobState, NewJob, Reason
from fairlane.model.reading import Gate
from fairlane.model.settings import LaneRule

from .yard import PATIENCE, QUICK, Yard


async def works() -> str:
    return "done"


async def draws() -> str:
    return "drawn"


def beside(yard: Yard) -> Yard:
    """Another application on the same store."""
    return Yard(yard.store, yard.url)


async def send(yard: Yard, task: str, *ids: str, lane: str | None = None) -> None:
    await yard.store.enqueue([NewJob(id=id, task=task, lane=lane, retries=0) for id in ids])


async def declined(yard: Yard, id: str) -> None:
    """Wait until a worker has declined a job."""
    async with asyncio.timeout(PATIENCE):
        while not (await yard.job(id)).attempts or (await yard.job(id)).state is JobState.RUNNING:
            await asyncio.sleep(0.01)


async def test_two_applications_on_one_queue_lose_no_attempt(yard: Yard) -> None:
    other = beside(yard)
    yard.task(works)
    other.task(draws)
    await send(yard, "works", *(f"work-{number}" for number in range(20)))
    await send(yard, "draws", *(f"draw-{number}" for number in range(20)))
    async with yard.worker() as mine, other.worker() as theirs:
        jobs = [await yard.until(f"{kind}-{number}") for kind in ("work", "draw") for number in range(20)]
    assert {(job.state, job.attempt) for job in jobs} == {(JobState.COMPLETED, 1)}
    assert (mine.done, theirs.done) == (20, 20)


async def test_a_task_that_comes_with_the_deploy_waits_for_it(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fairlane.worker")
    old, new = yard, beside(yard)
    old.task(works)
    new.task(works)
    new.task(draws)
    async with old.worker() as worker:
        await send(yard, "draws", "early", "too")
        await declined(yard, "early")
        [position] = await yard.store.positions(["early"])
        assert position is not None
        assert (position.gate, position.why()) == (Gate.UNKNOWN_TASK, "no live worker knows task draws")
        await send(yard, "works", "known")
        assert (await yard.until("known")).state is JobState.COMPLETED
        async with new.worker():
            job = await yard.until("early")
        assert worker.done == 1
    assert (job.state, job.attempt, job.result) == (JobState.COMPLETED, 1, b'"drawn"')
    assert job.attempts[0].outcome == "declined"
    assert caplog.text.count("task draws is unknown to this worker") == 1


async def test_it_fails_when_no_worker_knew_it_for_too_long(yard: Yard) -> None:
    yard.task(works)
    await send(yard, "draws", "odd")
    async with yard.worker(intervals=replace(QUICK, unknown_task=0.5)) as worker:
        job = await yard.until("odd")
    assert (job.state, job.reason, job.attempt) == (JobState.FAILED, Reason.UNKNOWN_TASK, 0)
    assert job.error == "no worker that claimed it had a task 'draws'; deploy one that has, or rename the task back"
    assert worker.done == 0


async def test_a_burst_ends_although_a_job_of_an_unknown_task_is_left(yard: Yard) -> None:
    yard.task(works)
    await send(yard, "draws", *(f"odd-{number}" for number in range(10)))
    await send(yard, "works", "last")
    worker = yard.make(slots=2, burst=True)
    await asyncio.wait_for(worker.run(), PATIENCE)
    assert worker.done == 1
    assert (await yard.job("last")).state is JobState.COMPLETED
    odd = await yard.job("odd-0")
    assert odd.attempt == 0
    assert not odd.state.final


async def test_an_ordered_lane_is_kept_for_its_declined_head(yard: Yard) -> None:
    await yard.lanes(LaneRule(pattern="doc", limit=1))
    other = beside(yard)
    yard.task(works)
    other.task(draws)
    other.task(works)
    async with yard.worker():
        await send(yard, "draws", "head", lane="doc")
        await declined(yard, "head")
        await send(yard, "works", "next", lane="doc")
        [position] = await yard.store.positions(["next"])
        assert position is not None
        assert position.gate is Gate.LANE_TASK
        async with other.worker():
            head, after = await yard.until("head"), await yard.until("next")
    assert head.finished_at is not None
    assert after.started_at is not None
    assert head.finished_at <= after.started_at
