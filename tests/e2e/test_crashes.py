"""Processes that die, stop or block the interpreter: which jobs run again, how soon, and which must not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from random import Random

import pytest

from fairlane.model.intervals import Intervals
from fairlane.model.job import JobState, Reason
from fairlane.model.session import SessionState
from tests.sizes import sized, strict

from ..frozen import freeze
from . import figures, tasks
from .fleet import QUICK
from .ledger import BEGIN, END, Entry, now
from .world import Stage, World, play_on_all

SHORT = Intervals(**{**{f: getattr(QUICK, f) for f in QUICK.__struct_fields__}, "lease": 2.5, "heartbeat": 0.4})
ALONE_SECONDS = sized(60.0, 20.0)
SUPERVISED_SECONDS = sized(30.0, 1.5)
SUPERVISED = sized(Intervals(lease=90.0), Intervals())
"""With a lease that would take far longer than other tests can hold up this one."""


@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["alone", "supervised"])
async def test_a_job_that_kills_its_process_fails_alone(stage: Stage, processes: tuple[str, ...]) -> None:
    async def scenario(world: World) -> None:
        go = str(world.file("go"))
        bystanders = [(await world.send(tasks.sleep.call(1.0))).id for _ in range(3)]
        poison = await world.send(tasks.end_process_when.call(go))
        first = world.fleet.worker("-c", "6", *processes)
        await world.began(poison.id, *bystanders)
        world.file("go").touch()
        if not processes:
            await world.gone(first)
            await world.ready(world.fleet.worker("-c", "6"))
        [failed, *others] = await world.final(poison.id, *bystanders)
        assert (failed.state, failed.reason) == (JobState.FAILED, Reason.CRASHED)
        assert failed.error
        assert {job.state for job in others} == {JobState.COMPLETED}
        assert {job.attempt for job in others} == {2}, "only the first crash took them along"
        starts = world.ledger.begins([poison.id])
        assert [entry.attempt for entry in starts] == [1, 2, 3, 4]
        assert [company(world, start) for start in starts] == [3, 0, 0, 0], "it was not alone after the first time"

    await stage.play(scenario)


async def test_a_bystander_that_has_not_begun_is_not_charged_for_a_crash(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        poison = await world.send(tasks.end_process.call())
        bystander = await world.send(tasks.noop.call())
        async with world.sampled(lambda: world.jobs(task=tasks.end_process.name), every=0.02) as samples:
            world.fleet.worker("-c", "2", "--reserved", "high=0", "--processes", "2")
            [failed, other] = await world.final(poison.id, bystander.id)
        assert {len(sample) for sample in samples} == {1}, "it is there once, not twice"
        assert (failed.state, failed.reason) == (JobState.FAILED, Reason.CRASHED)
        assert failed.error
        assert [attempt.attempt for attempt in failed.attempts] == [1, 2, 3, 4]
        assert (other.state, other.attempt) == (JobState.COMPLETED, 1)
        # Long enough for a fifth start, if there were one.
        await world.final((await world.send(tasks.sleep.call(1.0))).id)
        assert [entry.attempt for entry in world.ledger.begins([poison.id])] == [1, 2, 3, 4]
        assert len(world.ledger.begins([bystander.id])) == 1

    await stage.play(scenario)


async def test_a_job_that_raises_uses_the_same_budget_on_every_worker(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        await world.workers("w0", "w1")
        for worker in (0, 1):
            stumbling = tasks.stumble.options(worker=worker)
            hopeless = await world.send(stumbling.call(9, "out of ink"))
            in_time = await world.send(stumbling.call(3, "almost"))
            [failed, completed] = await world.final(hopeless.id, in_time.id)
            assert (failed.state, failed.reason) == (JobState.FAILED, Reason.ERROR)
            assert "out of ink" in (failed.error or "")
            assert [entry.attempt for entry in world.ledger.begins([hopeless.id])] == [1, 2, 3, 4]
            assert (completed.state, completed.attempt) == (JobState.COMPLETED, 4)

    await stage.play(scenario)


@pytest.mark.parametrize(
    ("task", "processes"),
    [("compute", ()), ("compute_in_thread", ()), ("hold_interpreter", ("--processes", "1"))],
    ids=["on the loop", "in a thread", "without the interpreter"],
)
async def test_a_body_that_computes_for_longer_than_the_lease_runs_once(
    stages: dict[str, Stage], task: str, processes: tuple[str, ...]
) -> None:
    """Another worker with a manager would get the job if the busy one were declared dead."""

    async def scenario(world: World) -> None:
        busy = world.fleet.worker(*processes, name="busy")
        await world.ready(busy, sessions=1)
        job = await world.send(getattr(tasks, task).call(round(3 * world.intervals.lease + 0.5)))
        await world.began(job.id)
        await world.ready(world.fleet.worker(name="other"))
        [done] = await world.final(job.id)
        assert (done.state, done.attempt, done.fence) == (JobState.COMPLETED, 1, 1)
        assert [entry.event for entry in world.ledger.of(job.id)] == [BEGIN, END]
        assert SessionState.DEAD not in {session.state for session in await world.client.sessions()}

    await play_on_all(stages, scenario, times=sized(1, 2), intervals=SHORT)


async def test_a_worker_that_stood_still_past_its_lease_is_refused(stage: Stage) -> None:
    """When the process continues, one body ends and its completion is rejected; the other one is stopped."""

    async def scenario(world: World) -> None:
        # The worker that is paused must not lead, so that the test need not wait for the end of its term.
        first = world.fleet.worker("--no-manager", "--index", "0", name="first")
        await world.ready(first)
        go = str(world.file("go"))
        held = await world.send(tasks.hold.call(go))
        await world.began(held.id)
        # It holds the loop, so that nothing can stop it before it has ended.
        late = await world.send(tasks.compute.call(1.0))
        await world.began(late.id)
        await freeze(first.pause, first.proceed, await world.app.connection.store(), first.pid)
        await world.ready(world.fleet.worker("--index", "1", name="second"))
        await world.began(held.id, late.id, times=2)
        first.proceed()

        async def over() -> bool:
            mine = [entry for entry in world.ledger.entries() if entry.worker == "first"]
            return {(entry.job, entry.event) for entry in mine} >= {(held.id, "cancelled"), (late.id, END)}

        await world.until(over, "both bodies of the first worker have ended")
        assert (await held.state()) is JobState.RUNNING, "the second worker still has it"
        world.file("go").touch()
        jobs = await world.final(held.id, late.id)
        for job in jobs:
            assert (job.state, job.attempt, job.worker) == (JobState.COMPLETED, 2, "default/1")
            assert [attempt.outcome for attempt in job.attempts] == ["crashed", "completed"]
        # The history counts the late completion, which was rejected.
        assert [attempt.refused for attempt in jobs[1].attempts] == [1, 0]
        dead = [session for session in await world.client.sessions() if session.state is SessionState.DEAD]
        assert [session.pid for session in dead] == [first.pid]

        async def anew() -> bool:
            return (await world.session_of(first)).state is SessionState.LIVE

        await world.until(anew, "the first worker has registered anew")

    await stage.play(scenario, times=sized(1, 3), at_once=3, intervals=SHORT)


@strict
@pytest.mark.timeout(180)
async def test_a_job_of_a_killed_worker_runs_again_within_twenty_seconds(stages: dict[str, Stage]) -> None:
    """Five kills at different moments of the heartbeat, at the default intervals; in a full run on four stores of each
    kind.
    """
    async with asyncio.TaskGroup() as at_once:
        for kind, stage in stages.items():
            at_once.create_task(runs_again_after_a_kill(kind, stage))


async def runs_again_after_a_kill(kind: str, stage: Stage) -> None:
    """The kills on one kind of store."""
    times: list[float] = []

    async def scenario(world: World) -> None:
        # One of the victims leads, so that the leader's death is among them too.
        victims = [world.fleet.worker("-c", "1", name=f"v{n}") for n in range(5)]
        await world.ready(*victims)
        go = str(world.file("go"))
        jobs = [(await world.send(tasks.hold.call(go))).id for _ in victims]
        await world.began(*jobs)
        await world.ready(world.fleet.worker("-c", "10", name="survivor"))
        killed: dict[str, int] = {}
        draw = Random(world.directory.name)
        begun = time.monotonic()
        for victim, moment in zip(victims, sorted(draw.random() for _ in victims), strict=True):
            await asyncio.sleep(max(0.0, begun + moment * world.intervals.heartbeat - time.monotonic()))
            [job] = [entry.job for entry in world.ledger.begins() if entry.worker == victim.name]
            victim.kill()
            killed[job] = now()
        await world.began(*jobs, times=2)
        for job, at in killed.items():
            again = world.ledger.of(job, BEGIN)[1]
            assert (again.worker, again.attempt) == ("survivor", 2)
            times.append((again.at - at) / 1e9)
        world.file("go").touch()
        assert {job.state for job in await world.final(*jobs)} == {JobState.COMPLETED}

    await stage.play(scenario, times=sized(1, 4), at_once=4, intervals=Intervals())
    assert len(times) == sized(5, 20)
    figures.record(
        f"again after a kill, alone, {kind}",
        kills=len(times),
        median=round(figures.median(times), 2),
        p99=round(figures.percentile(times, 0.99), 2),
        most=round(max(times), 2),
    )
    assert max(times) <= ALONE_SECONDS


@strict
@pytest.mark.timeout(180)
async def test_a_job_of_a_killed_child_of_a_supervisor_runs_again_at_once(stage: Stage) -> None:
    """A supervisor sees the death itself, no lease has to end."""
    times: list[float] = []

    async def scenario(world: World) -> None:
        supervisor = world.fleet.worker("--processes", "2", "-c", "4")
        go = str(world.file("go"))
        for _ in range(2):
            # Both are there, also the one that was started again.
            await world.ready(supervisor, sessions=2)
            job = (await world.send(tasks.hold.call(go))).id
            await world.began(job)
            child = world.ledger.of(job)[0].pid
            assert child in supervisor.family()
            os.kill(child, signal.SIGKILL)
            killed = now()
            await world.began(job, times=2)
            again = world.ledger.of(job, BEGIN)[1]
            assert again.attempt == 2
            times.append((again.at - killed) / 1e9)
        world.file("go").touch()

    await stage.play(scenario, times=sized(1, 10), at_once=1, intervals=SUPERVISED)
    assert len(times) == sized(2, 20)
    figures.record(
        "again after a kill, supervised",
        kills=len(times),
        median=round(figures.median(times), 2),
        p99=round(figures.percentile(times, 0.99), 2),
        most=round(max(times), 2),
    )
    assert max(times) <= SUPERVISED_SECONDS


def company(world: World, start: Entry) -> int:
    """How many other bodies ran in a process at the same time as one that did not survive."""
    others = [entry for entry in world.ledger.entries() if entry.pid == start.pid and entry.job != start.job]
    ended = [entry for entry in others if entry.event != BEGIN and entry.at < start.at]
    return len(others) - 2 * len(ended)
