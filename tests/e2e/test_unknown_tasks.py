"""Workers that do not know every task of their queue: two applications that share it, and a deploy under way."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fairlane.model.job import JobState
from fairlane.task import Call

from . import other_tasks, tasks
from .world import Stage, World

MANY = 100


async def _ran_once(world: World, ids: list[str]) -> None:
    await world.final(*ids)
    jobs = [await world.client.job(id) for id in ids]
    assert {(job.state, job.attempt) for job in jobs} == {(JobState.COMPLETED, 1)}
    assert world.ledger.starts() == dict.fromkeys(ids, 1)


async def test_two_applications_on_one_queue_lose_no_attempt(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        one = world.fleet.worker("-c", "10", name="one")
        other = world.fleet.worker("-c", "10", app="tests.e2e.other_tasks:app", name="other")
        await world.ready(one, other)
        calls: list[Call[Any]] = [call for _ in range(MANY) for call in (tasks.noop.call(), other_tasks.drawn.call())]
        ids = [handle.id for handle in await world.client.enqueue_many(calls)]
        await _ran_once(world, ids)
        by = {(entry.task, entry.worker) for entry in world.ledger.begins(ids)}
        assert by == {(tasks.noop.name, "one"), (other_tasks.drawn.name, "other")}
        # A single job is declined once at the most: then the worker that knows its task gets it at once.
        waits = []
        for _ in range(10):
            began = time.monotonic()
            await (await world.send(other_tasks.drawn.call())).result(timeout=20)
            waits.append(time.monotonic() - began)
        assert sorted(waits)[5] < 0.4, waits

    await stage.play(scenario, times=1)


async def test_a_rolling_deploy_loses_no_attempt_and_why_says_what_is_missing(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        old = [world.fleet.worker("-c", "10", name=f"old-{number}") for number in range(2)]
        await world.ready(*old)
        calls: list[Call[Any]] = [call for _ in range(MANY) for call in (tasks.noop.call(), other_tasks.drawn.call())]
        handles = await world.client.enqueue_many(calls)
        await world.final(*(handle.id for handle in handles[::2]))

        async def told() -> bool:
            return await handles[-1].why() == f"no live worker knows task {other_tasks.drawn.name}"

        await world.until(told, "why() says what is missing")
        await asyncio.sleep(0.5)
        declined = [await world.client.job(handle.id) for handle in handles[1::2]]
        assert {(job.state, job.attempt, job.fence) for job in declined} == {(JobState.PENDING, 0, 1)}

        for number, worker in enumerate(old):
            await world.ready(world.fleet.worker("-c", "10", app="tests.e2e.other_tasks:newer", name=f"new-{number}"))
            worker.stop()
        assert await world.gone(*old) == [0, 0]
        await _ran_once(world, [handle.id for handle in handles])

    await stage.play(scenario, times=1)
