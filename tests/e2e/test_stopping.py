"""Stops: by signal, with time to end and without, and one after another under load."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from fairlane.model.job import JobState
from fairlane.model.session import SessionState
from fairlane.task import Call
from tests.sizes import sized

from . import tasks
from .fleet import alive
from .ledger import BEGIN, END
from .world import Stage, World

STOPS = sized(4, 12)
RESTARTS = sized(5, 20)


async def test_jobs_end_within_the_grace_and_none_runs_again(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        worker = world.fleet.worker("--grace", "20", "-c", "10", name="first")
        await world.ready(worker)
        bodies: list[Call[Any]] = [tasks.sleep.call(1.0), tasks.rest_in_thread.call(1.0), tasks.rest_apart.call(1.0)]
        running = [(await world.send(call)).id for call in bodies]
        await world.began(*running)
        worker.stop()
        waiting = await world.send(tasks.noop.options(delay=0.2).call())
        assert await world.gone(worker) == [0]
        assert await world.states(running) == [JobState.COMPLETED] * 3
        assert (await world.session_of(worker)).state is SessionState.ENDED

        await world.ready(world.fleet.worker(name="second"))
        await world.final(waiting.id)
        assert world.ledger.starts() == dict.fromkeys([*running, waiting.id], 1)

    await stage.play(scenario, times=sized(1, 3), at_once=3)


async def test_jobs_beyond_the_grace_are_handed_back_uncharged(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        worker = world.fleet.worker("--grace", "0.5", "-c", "10", name="first")
        await world.ready(worker)
        bodies: list[Call[Any]] = [tasks.sleep.call(30), tasks.rest_apart.call(30), tasks.rest_in_thread.call(30)]
        running = [(await world.send(call)).id for call in bodies]
        await world.began(*running)
        worker.stop()
        assert await world.gone(worker) == [0]
        for id in running:
            job = await world.client.job(id)
            assert job.state is JobState.PENDING
            assert [attempt.outcome for attempt in job.attempts] == ["handed_back"]
        await world.ready(world.fleet.worker("-c", "10", name="second"))
        await world.began(*running, times=2)
        assert {entry.attempt for entry in world.ledger.begins(running)} == {1}
        assert {entry.fence for entry in world.ledger.begins(running) if entry.worker == "second"} == {2}
        assert {entry.event for entry in world.ledger.entries() if entry.worker == "first"} >= {BEGIN, "cancelled"}

    await stage.play(scenario, times=sized(1, 3), at_once=3)


async def test_a_second_signal_stops_at_once(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        worker = world.fleet.worker("--grace", "60")
        await world.ready(worker)
        running = await world.send(tasks.sleep.call(60))
        await world.began(running.id)
        worker.stop()

        async def stopping() -> bool:
            return (await world.session_of(worker)).state is SessionState.STOPPING

        await world.until(stopping, "the store knows that it stops")
        assert worker.ended is None
        worker.stop()
        async with asyncio.timeout(15):
            await world.gone(worker)
        job = await running.job()
        assert (job.state, [attempt.outcome for attempt in job.attempts]) == (JobState.PENDING, ["handed_back"])

    await stage.play(scenario, times=sized(1, 3), at_once=3)


async def test_a_signal_at_any_moment_of_the_start_leaves_no_session_behind(stage: Stage) -> None:
    async with stage.world() as world:
        worker = world.fleet.worker(fork=False)
        begun = time.monotonic()
        await world.ready(worker)
        usual = time.monotonic() - begun
        worker.stop()
        workers = [worker]
        for number in range(STOPS):
            worker = world.fleet.worker(fork=False)
            # From well before the session is there until a little after.
            await asyncio.sleep(usual * (0.7 + 0.6 * number / STOPS))
            worker.stop()
            workers.append(worker)
            await world.gone(worker)
        assert {session.state for session in await world.client.sessions()} == {SessionState.ENDED}


async def test_a_supervisor_stops_its_processes_in_good_order(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        supervisor = world.fleet.worker("--processes", "2", "--grace", "20", "-c", "2")
        await world.ready(supervisor, sessions=2)
        running = [(await world.send(tasks.sleep.call(1.0))).id for _ in range(2)]
        await world.began(*running)
        supervisor.stop()
        assert await world.gone(supervisor) == [0]
        jobs = [await world.client.job(id) for id in running]
        assert {(job.state, job.attempt) for job in jobs} == {(JobState.COMPLETED, 1)}
        assert {session.state for session in await world.client.sessions()} == {SessionState.ENDED}

    await stage.play(scenario, times=sized(1, 3), at_once=3)


async def test_processes_whose_supervisor_was_killed_end_what_they_run_and_stop(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        supervisor = world.fleet.worker("--processes", "2", "--grace", "20", "-c", "2")
        await world.ready(supervisor, sessions=2)
        children = supervisor.family()
        running = await world.send(tasks.sleep.call(1.0))
        await world.began(running.id)
        supervisor.kill()

        async def ended() -> bool:
            return {session.state for session in await world.client.sessions()} == {SessionState.ENDED}

        await world.until(ended, "both sessions have ended")
        job = await running.job()
        assert (job.state, job.attempt) == (JobState.COMPLETED, 1)

        async def gone() -> bool:
            return not any(alive(pid) for pid in children)

        await world.until(gone, "no process is left")

    await stage.play(scenario, times=sized(1, 3), at_once=3)


@pytest.mark.timeout(180)
async def test_rolling_restarts_under_load_run_every_job_once(stage: Stage) -> None:
    async with stage.world() as world:
        workers = [world.fleet.worker("-c", "4", name=f"w{n}") for n in range(2)]
        await world.ready(*workers)
        sent: list[str] = []

        enough = asyncio.Event()

        async def load() -> None:
            while not enough.is_set():
                calls: list[Call[Any]] = [tasks.sleep.call(0.05), tasks.noop.call(), tasks.rest_in_thread.call(0.05)]
                sent.extend(handle.id for handle in await world.client.enqueue_many(calls))
                await asyncio.sleep(0.05)

        loading = asyncio.ensure_future(load())
        for number in range(RESTARTS):
            old = workers.pop(0)
            new = world.fleet.worker("-c", "4", name=f"r{number}")
            await world.ready(new)
            old.stop()
            workers.append(new)
            assert await world.gone(old) == [0]
        enough.set()
        await loading
        jobs = await world.final(*sent)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert {job.attempt for job in jobs} == {1}
        assert world.ledger.starts() == dict.fromkeys(sent, 1)
        assert len([entry for entry in world.ledger.entries() if entry.event == END]) == len(sent)
