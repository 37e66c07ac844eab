"""A store that does not answer, and a suspended fleet: no process is declared dead, and no job runs twice."""

from __future__ import annotations

import asyncio
from typing import Any

from fairlane.model.job import JobState
from fairlane.model.session import SessionState
from fairlane.task import Call
from tests.sizes import sized

from . import tasks
from .ledger import most_at_once
from .world import Stage, World, play_on_all


async def test_jobs_outlive_an_outage_that_is_longer_than_the_lease(stages: dict[str, Stage]) -> None:
    async def scenario(world: World) -> None:
        await world.workers("w0", "w1", options=("-c", "8"))
        calls: list[Call[Any]] = [tasks.rest_in_thread.call(2.0), *(tasks.sleep.call(0.5 * n) for n in range(1, 10))]
        running = [(await world.send(call)).id for call in calls]
        await world.began(*running)
        with world.deployment.down():
            await asyncio.sleep(1.5 * world.intervals.lease)
        jobs = await world.final(*running)
        assert {(job.state, job.attempt) for job in jobs} == {(JobState.COMPLETED, 1)}
        assert world.ledger.starts() == dict.fromkeys(running, 1)
        assert SessionState.DEAD not in {session.state for session in await world.client.sessions()}
        assert (await world.client.recount()).differences == ()

    await play_on_all(stages, scenario, times=sized(1, 3))


async def test_a_job_of_a_limited_lane_ends_before_another_could_be_given_its_place(stages: dict[str, Stage]) -> None:
    """Without contact its worker cannot know whether it still has the place, so the body is stopped in time."""

    async def scenario(world: World) -> None:
        await world.workers("w0", "w1")
        lane = tasks.sleep.options(queue="models", lane="flux")
        ids = [(await world.send(lane.call(seconds))).id for seconds in (60, 0.1, 0.1)]
        await world.began(ids[0])
        with world.deployment.down():
            await asyncio.sleep(1.5 * world.intervals.lease)
            assert [entry.event for entry in world.ledger.of(ids[0])] == ["begin", "cancelled"]
        await world.began(ids[0], times=2)
        first = await world.client.job(ids[0])
        # The other worker may have claimed it with a call from before the outage; then nothing of it has begun there.
        outcomes = [attempt.outcome for attempt in first.attempts if attempt.outcome != "taken_back"]
        assert (first.attempt, outcomes) == (1, ["handed_back", None])
        await world.client.handle(ids[0]).cancel()
        await world.final(*ids)
        assert [entry.job for entry in world.ledger.begins()] == [ids[0], ids[0], ids[1], ids[2]]
        assert most_at_once(world.ledger.entries()) == 1

    await play_on_all(stages, scenario, times=sized(1, 3))


async def test_a_fleet_that_stood_still_as_a_whole_goes_on_where_it_was(stages: dict[str, Stage]) -> None:
    async def scenario(world: World) -> None:
        workers = await world.workers("w0", "w1", options=("-c", "8"))
        # The rescuer has been at work for long enough to trust itself.
        await world.final((await world.send(tasks.sleep.call(2 * world.intervals.caution))).id)
        running = [(await world.send(tasks.sleep.call(1.0))).id for _ in range(10)]
        await world.began(*running)
        for worker in workers:
            worker.pause()
        await asyncio.sleep(1.5 * world.intervals.lease)
        for worker in workers:
            worker.proceed()
        jobs = await world.final(*running)
        assert {(job.state, job.attempt) for job in jobs} == {(JobState.COMPLETED, 1)}
        assert set(world.ledger.starts().values()) == {1}
        assert SessionState.DEAD not in {session.state for session in await world.client.sessions()}

    await play_on_all(stages, scenario, times=sized(1, 3))
