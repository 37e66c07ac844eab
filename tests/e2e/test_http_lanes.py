"""Strict lanes through HTTP: people send to a lane, see their place change, and are served in order."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from fairlane import InvalidInput, JobFailed, NotFound, Update
from fairlane.handle import Cancellation, Handle
from fairlane.model.job import JobState
from tests.sizes import strict

from . import figures, tasks
from .instances import Site, sites
from .ledger import most_at_once, now
from .world import Stage, World

ROOM = {"MAX_CONCURRENT_TASKS": "4", "HIGH_PRIORITY_RESERVED": "0"}


async def request(site: Site, lane: str, seconds: float) -> Handle[float]:
    """A request for a model."""
    return await site.client.enqueue(tasks.sleep.options(queue="models", lane=lane), seconds)


async def place(handle: Handle[float] | Handle[None]) -> int | None:
    """Its place in line."""
    position = await handle.position()
    return None if position is None else position.place


async def watched(handle: Handle[float] | Handle[None], seen: list[Update] | None = None) -> list[Update]:
    """All that a person in front of a screen sees, also while it is being seen."""
    seen = [] if seen is None else seen
    async for update in handle.watch():
        seen.append(update)
    return seen


async def shown(world: World, *screens: list[Update]) -> None:
    """Wait until every screen shows something."""

    async def all_show() -> bool:
        return all(screens)

    await world.until(all_show, "every screen shows something")


@strict
async def test_a_lane_is_strictly_first_in_first_out_and_positions_show_it(stage: Stage) -> None:
    async with stage.world() as world, sites(world, 2, env=ROOM) as [site, other]:
        hold = tasks.hold.options(queue="models", lane="flux")
        head = await site.client.enqueue(hold, str(world.file("go")))
        lane = [await request(site, "flux", 0.3) for _ in range(3)]
        ids = [head.id, *[handle.id for handle in lane]]
        await world.began(head.id)
        # Through the other instance: places are the store's.
        handles = [other.client.handle(id) for id in ids]
        assert [await place(handle) for handle in handles] == [None, 1, 2, 3]
        assert await place(other.client.handle("unknown")) is None
        seen: list[list[Update]] = [[] for _ in lane]
        screens = [asyncio.create_task(watched(*each)) for each in zip(handles[1:], seen, strict=True)]
        await shown(world, *seen)
        world.file("go").touch()
        await asyncio.wait_for(asyncio.gather(*screens), 60)
        assert [entry.job for entry in world.ledger.begins()] == ids, "started out of turn, or twice"
        assert world.ledger.most_at_once() == 1
        assert figures.met(world.ledger.gaps(ids), 0.2)
        for number, updates in enumerate(seen, start=1):
            places = [u.position.place for u in updates if u.position is not None]
            assert places[0] == number
            assert places == sorted(places, reverse=True), "a job was moved back"
            assert updates[-1].state is JobState.COMPLETED
            assert updates[-1].position is None
        assert await place(handles[0]) is None
        assert await handles[-1].result(timeout=5) == 0.3


async def test_lanes_are_independent_and_go_on_after_failures_and_refusals(stage: Stage) -> None:
    async with stage.world() as world, sites(world, 2, env=ROOM) as [site, _]:
        begun = now()
        sent = {lane: [(await request(site, lane, 0.2)).id for _ in range(5)] for lane in ("flux", "sdxl")}
        await world.final(*sent["flux"], *sent["sdxl"])
        entries = world.ledger.entries()
        for lane, ids in sent.items():
            mine = [entry for entry in entries if entry.lane == lane]
            assert [entry.job for entry in world.ledger.begins(ids)] == ids
            assert most_at_once(mine) == 1
            assert 1.0 <= (max(entry.at for entry in mine) - begun) / 1e9 <= 1.5 + figures.LATE
        assert world.ledger.most_at_once() == 2

        stumble = tasks.stumble.options(queue="models", lane="flux", retries=0)
        failing = await site.client.enqueue(stumble, 9, "the model has no such style")
        after = await request(site, "flux", 0.05)
        with pytest.raises(JobFailed, match="the model has no such style"):
            await failing.result(timeout=30)
        assert await after.result(timeout=30) == 0.05

        running = await request(site, "flux", 60)
        waiting = [await request(site, "flux", 0.05) for _ in range(2)]
        await world.began(running.id)
        with pytest.raises(InvalidInput, match="running"):
            await running.retry()
        assert await running.cancel() is Cancellation.REQUESTED
        assert [await handle.result(timeout=30) for handle in waiting] == [0.05, 0.05]
        assert await running.state() is JobState.CANCELLED

        known = len(await world.jobs())
        with pytest.raises(InvalidInput) as refused:
            await request(site, "dalle", 0.1)
        assert refused.value.field == "lane"
        with pytest.raises(NotFound):
            await site.client.handle("unknown").state()
        assert len(await world.jobs()) == known
        again = await after.retry()
        assert await again.result(timeout=30) == 0.05


async def test_a_lane_keeps_its_order_when_every_instance_is_killed(stage: Stage) -> None:
    async with stage.world() as world, sites(world, 2, env=ROOM) as [site, other]:
        hold = tasks.hold.options(queue="models", lane="flux")
        go = str(world.file("go"))
        lane = [await site.client.enqueue(hold, go) for _ in range(4)]
        await world.began(lane[0].id)
        seen: list[Update] = []
        screen = asyncio.create_task(watched(lane[3], seen))
        poll = asyncio.create_task(lane[2].result())
        await shown(world, seen)
        site.process.kill()
        other.process.kill()
        await world.gone(site.process, other.process)
        assert [await world.place(handle.id) for handle in lane[1:]] == [1, 2, 3]
        world.file("go").touch()
        addresses = [httpx.URL(each.address) for each in (site, other)]
        anew = [world.fleet.instance(name=f"anew{url.port}", port=url.port or 0, env=ROOM) for url in addresses]
        await world.ready(*anew)
        ids = [handle.id for handle in lane]
        jobs = await world.final(*ids)
        assert [entry.job for entry in world.ledger.begins()] == [ids[0], *ids]
        assert [job.attempt for job in jobs] == [2, 1, 1, 1]
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        # Who watched and waited through it all sees the line move on, and the end.
        updates = await asyncio.wait_for(screen, 30)
        # Place 4: after the kill, the rescued job waits for a moment before the others.
        assert {u.position.place for u in updates if u.position is not None} <= {1, 2, 3, 4}
        assert updates[0].position is not None
        assert updates[0].position.place == 3
        assert updates[-1].state is JobState.COMPLETED
        await asyncio.wait_for(poll, 30)
        # A screen that is opened now gets the true state first.
        [update] = await watched(lane[0])
        assert update.state is JobState.COMPLETED


async def test_streams_and_long_polls_end_when_the_instance_stops(stage: Stage) -> None:
    async with stage.world() as world, sites(world, env=ROOM) as [site]:
        waiting = await request(site, "flux", 0.1)
        await waiting.result(timeout=30)
        await world.client.pause("models")
        waiting = await request(site, "flux", 0.1)
        seen: list[Update] = []
        screen = asyncio.create_task(watched(waiting, seen))
        poll = asyncio.create_task(waiting.result())
        await shown(world, seen)
        begun = now()
        site.process.stop()
        await world.gone(site.process)
        assert (now() - begun) / 1e9 < 2.0 + figures.LATE, "it waited for a client that only watches"
        screen.cancel()
        poll.cancel()
