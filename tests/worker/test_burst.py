"""A worker that stops when no job is left: it runs what is due by then, and waits for no other queue."""

from __future__ import annotations

import asyncio

from fairlane.model.job import JobState

from .faulty import Faulty
from .yard import PATIENCE, Yard


async def test_burst_ends_when_there_is_nothing_left(yard: Yard) -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)

    yard.task(work)
    ids = [await yard.enqueue("work") for _ in range(25)]
    worker = yard.make(burst=True)
    await asyncio.wait_for(worker.run(), PATIENCE)
    assert {(await yard.job(id)).state for id in ids} == {JobState.COMPLETED}
    assert worker.done == 25


async def test_burst_runs_jobs_that_are_due_without_a_leader(yard: Yard) -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)

    yard.task(work)
    due, later = await yard.enqueue("work", delay=0.1), await yard.enqueue("work", delay=600)
    await asyncio.sleep(0.2)
    await asyncio.wait_for(yard.make(burst=True, manager=False).run(), PATIENCE)
    assert [(await yard.job(id)).state for id in (due, later)] == [JobState.COMPLETED, JobState.SCHEDULED]


async def test_burst_ends_although_jobs_of_other_queues_become_due_all_the_time(yard: Yard) -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)

    yard.task(work)
    faulty = Faulty(yard.store)

    async def another_is_due(verb: str, answer: object) -> None:
        if verb == "promote":
            await yard.enqueue("work", queue="elsewhere", delay=0.001)
            await asyncio.sleep(0.01)

    await another_is_due("promote", None)
    faulty.answered = another_is_due
    due = await yard.enqueue("work", delay=0.001)
    await asyncio.sleep(0.01)
    await asyncio.wait_for(yard.make(store=faulty, burst=True, manager=False).run(), PATIENCE)
    assert (await yard.job(due)).state is JobState.COMPLETED
    assert faulty.calls["promote"] == 2, "once before and once after the job that was due"
