"""Lanes in strict order, for jobs that workers run."""

from __future__ import annotations

import pytest

from fairlane import InvalidInput, NotFound
from fairlane.handle import Cancellation
from fairlane.model.job import JobState, Reason
from tests.sizes import strict

from . import figures, tasks
from .ledger import END, most_at_once, now
from .world import Stage, World, play_on_all

FEW = ("-Q", "models", "-c", "4", "--reserved", "high=0")
GAP = 0.2


async def request(world: World, lane: str, seconds: float) -> str:
    """A request for a model that takes some seconds."""
    return (await world.send(tasks.sleep.options(queue="models", lane=lane).call(seconds))).id


@strict
async def test_jobs_of_a_lane_start_strictly_in_order_of_arrival(stage: Stage) -> None:
    """Starts are the store's alone, so there is no call that could ask for one out of turn; a worker with room for all
    four stands in for it. A position belongs to a job, and no lane has to be named.
    """

    async def scenario(world: World) -> None:
        # The head ends when it is told to, so that the places are read while nothing moves.
        head = await world.send(tasks.hold.options(queue="models", lane="flux").call(str(world.file("go"))))
        lane = [head.id, *[await request(world, "flux", 0.4) for _ in range(3)]]
        assert [await world.place(id) for id in lane] == [1, 2, 3, 4]
        await world.ready(world.fleet.worker(*FEW), world.fleet.worker(*FEW))
        await world.began(lane[0])
        assert [await world.place(id) for id in lane] == [None, 1, 2, 3]
        assert await world.place("unknown") is None
        world.file("go").touch()
        await world.final(*lane)
        assert await world.place(lane[0]) is None
        assert [entry.job for entry in world.ledger.begins()] == lane, "started out of turn, or twice"
        assert world.ledger.most_at_once() == 1
        gaps = world.ledger.gaps(lane)
        figures.record("gaps in a lane of jobs", most_ms=round(max(gaps) * 1_000, 1))
        assert len(gaps) == 3
        assert figures.met(gaps, GAP), gaps

    await stage.play(scenario)


@strict
async def test_lanes_are_independent_of_each_other(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        await world.ready(world.fleet.worker(*FEW), world.fleet.worker(*FEW))
        begun = now()
        sent = {lane: [await request(world, lane, 0.4) for _ in range(5)] for lane in ("flux", "sdxl")}
        await world.final(*sent["flux"], *sent["sdxl"])
        entries = world.ledger.entries()
        for lane, ids in sent.items():
            assert [entry.job for entry in world.ledger.begins(ids)] == ids
            assert most_at_once(entry for entry in entries if entry.lane == lane) == 1
            ended = max(entry.at for entry in entries if entry.lane == lane)
            assert 2.0 <= (ended - begun) / 1e9 <= 2.0 + figures.LATE
        assert world.ledger.most_at_once() == 2

    await stage.play(scenario, at_once=2)


async def test_a_lane_goes_on_after_failures_cancels_and_refusals(stages: dict[str, Stage]) -> None:
    """A record is forgotten by retention; there is no other way to remove one, and none at all while it is not final.
    So "clean up while it runs" is a cancel, which keeps the lane until the body has ended.
    """

    async def scenario(world: World) -> None:
        env = {"FAIRLANE_RETENTION_COMPLETED_SECONDS": "2"}
        await world.ready(world.fleet.worker(*FEW, env=env), world.fleet.worker(*FEW, env=env))
        lane = tasks.stumble.options(queue="models", lane="flux", retries=0)
        failing = await world.send(lane.call(9, "the model has no such style"))
        after = await request(world, "flux", 0.05)
        [failed, _] = await world.final(failing.id, after)
        assert (failed.state, failed.reason) == (JobState.FAILED, Reason.ERROR)
        assert failed.error is not None
        assert "the model has no such style" in failed.error

        running = await request(world, "flux", 60)
        waiting = [await request(world, "flux", 0.05) for _ in range(3)]
        await world.began(running)
        with pytest.raises(InvalidInput):
            await world.client.retry(running)
        assert await world.client.handle(running).cancel() is Cancellation.REQUESTED
        [cancelled, *others] = await world.final(running, *waiting)
        assert (cancelled.state, cancelled.reason) == (JobState.CANCELLED, Reason.BY_USER)
        assert {job.state for job in others} == {JobState.COMPLETED}
        assert [entry.job for entry in world.ledger.begins(waiting)] == waiting
        assert world.ledger.most_at_once() == 1

        before = await world.counts("models")
        known = len(await world.jobs())
        with pytest.raises(InvalidInput, match="lane"):
            await request(world, "dalle", 0.1)
        assert await world.counts("models") == before
        assert len(await world.jobs()) == known
        assert await world.client.lanes("models") == []

        async def forgotten() -> bool:
            try:
                await world.client.job(after)
            except NotFound:
                return True
            return False

        go = str(world.file("go"))
        hold = tasks.hold.options(queue="models", lane="flux")
        line = [(await world.send(hold.call(go))).id for _ in range(3)]
        await world.until(forgotten, "retention has forgotten a finished job")
        assert [await world.place(id) for id in line] == [None, 1, 2]
        world.file("go").touch()

        async def ended() -> bool:
            return bool(world.ledger.of(line[-1], END))

        # Read from the ledger: the store may have pruned the job by now.
        await world.until(ended, "the last one has run")
        assert [entry.job for entry in world.ledger.begins(line)] == line

    await play_on_all(stages, scenario)


async def test_a_lane_of_jobs_keeps_its_order_when_every_process_is_killed(stages: dict[str, Stage]) -> None:
    async def scenario(world: World) -> None:
        first = [world.fleet.worker(*FEW) for _ in range(2)]
        await world.ready(*first)
        go = world.file("go")
        head = await world.send(tasks.hold.options(queue="models", lane="flux").call(str(go)))
        lane = [head.id, *[await request(world, "flux", 0.2) for _ in range(3)]]
        await world.began(lane[0])
        for process in first:
            process.kill()
        await world.gone(*first)
        go.touch()
        await world.ready(*(world.fleet.worker(*FEW) for _ in range(2)))
        assert [await world.place(id) for id in lane[1:]] == [1, 2, 3]
        assert (await world.client.job(lane[0])).attempt == 1
        jobs = await world.final(*lane)
        assert [job.attempt for job in jobs] == [2, 1, 1, 1]
        assert [(entry.job, entry.attempt) for entry in world.ledger.begins()] == [
            (lane[0], 1),
            (lane[0], 2),
            (lane[1], 1),
            (lane[2], 1),
            (lane[3], 1),
        ]
        # The body that was killed never wrote an end; it had, before the second one began.
        live = [entry for entry in world.ledger.entries() if (entry.job, entry.attempt) != (lane[0], 1)]
        assert most_at_once(live) == 1

    await play_on_all(stages, scenario)
