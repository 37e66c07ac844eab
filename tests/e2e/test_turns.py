"""Turns: lanes in strict order for code that runs where it is, without any worker."""

from __future__ import annotations

import asyncio
import time

import pytest

from fairlane import InvalidInput
from fairlane.errors import JobCancelled
from fairlane.handle import Cancellation
from fairlane.model.job import JobState, Reason
from fairlane.turn import Turn
from tests.sizes import strict

from . import figures
from .ledger import BEGIN, END, Entry, append, most_at_once, now
from .world import Stage, World, play_on_all

GAP = 0.2


async def hold(
    world: World, turn: Turn, seconds: float, name: str | None = None, until: asyncio.Event | None = None
) -> None:
    """Wait for a turn, hold it for some seconds, or until an event, and write both into the ledger."""
    async with turn:
        for event in (BEGIN, END):
            entry = Entry(
                job=name or turn.id,
                task="turn",
                event=event,
                attempt=1,
                fence=turn.fence,
                pid=0,
                worker="here",
                at=now(),
                lane=turn.lane,
            )
            append(world.ledger.path, entry)
            if event == BEGIN:
                await (asyncio.sleep(seconds) if until is None else until.wait())


async def in_line(world: World, turn: Turn) -> None:
    """Wait until a turn is in line."""

    async def waits() -> bool:
        return await world.place(turn.id) is not None

    await world.until(waits, "the turn is in line")


@strict
async def test_turns_of_a_lane_are_granted_strictly_in_order_of_arrival(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        told: dict[str, list[int]] = {name: [] for name in "ABCD"}

        def turn(name: str) -> Turn:
            return world.app.turn("flux", queue="models", on_position=lambda at: told[name].append(at.place))

        turns = {name: turn(name) for name in "ABCD"}
        takers = []
        # The first one ends when it is told to, so that the places are read while nothing moves.
        go = asyncio.Event()
        for name, one in turns.items():
            takers.append(asyncio.ensure_future(hold(world, one, 0.4, name, go if name == "A" else None)))
            await (world.began(name) if name == "A" else in_line(world, one))
        assert [await world.place(turns[name].id) for name in "ABCD"] == [None, 1, 2, 3]

        async def all_told() -> bool:
            return all(told[name] for name in "BCD")

        await world.until(all_told, "every waiter in line has a place")
        go.set()
        await asyncio.gather(*takers)
        assert [entry.job for entry in world.ledger.begins()] == list("ABCD")
        assert world.ledger.most_at_once() == 1
        # The first place is reported when the turn gets in line; no turn is ever moved back.
        assert [places[:1] for places in told.values()] == [[], [1], [2], [3]]
        assert all(places == sorted(places, reverse=True) for places in told.values()), told
        gaps = world.ledger.gaps("ABCD")
        figures.record("gaps in a lane of turns", most_ms=round(max(gaps) * 1_000, 1))
        assert len(gaps) == 3
        assert figures.met(gaps, GAP), gaps
        assert await world.place(turns["A"].id) is None

    await stage.play(scenario)


@strict
async def test_lanes_of_turns_are_independent_of_each_other(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        begun = now()
        turns = {lane: [world.app.turn(lane, queue="models") for _ in range(5)] for lane in ("flux", "sdxl")}
        await asyncio.gather(*(hold(world, turn, 0.4) for lane in turns.values() for turn in lane))
        for lane in turns:
            mine = [entry for entry in world.ledger.entries() if entry.lane == lane]
            assert most_at_once(mine) == 1
            assert 2.0 <= (mine[-1].at - begun) / 1e9 <= 2.0 + figures.LATE
        assert world.ledger.most_at_once() == 2

    await stage.play(scenario, at_once=2)


async def test_a_lane_of_turns_goes_on_after_failures_cancels_and_refusals(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        turn = world.app.turn("flux", queue="models")
        next_one = world.app.turn("flux", queue="models")

        async def stumble() -> None:
            async with turn:
                await in_line(world, next_one)
                raise RuntimeError("the model has no such style")

        stumbling = asyncio.ensure_future(stumble())
        await world.until(lambda: world.is_running(turn.id), "the first one has its turn")
        waiting = asyncio.ensure_future(hold(world, next_one, 0.0))
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(stumbling, 10)
        await asyncio.wait_for(waiting, 10)
        failed = await world.client.job(turn.id)
        assert (failed.state, failed.reason) == (JobState.FAILED, Reason.ERROR)
        assert "the model has no such style" in (failed.error or "")

        running, behind = world.app.turn("flux", queue="models"), world.app.turn("flux", queue="models")
        holding = asyncio.ensure_future(hold(world, running, 60))
        await world.began(running.id)
        waiting = asyncio.ensure_future(hold(world, behind, 0.0))
        await in_line(world, behind)
        assert await world.client.handle(running.id).cancel() is Cancellation.REQUESTED
        with pytest.raises(JobCancelled):
            await asyncio.wait_for(holding, 10)
        await asyncio.wait_for(waiting, 10)
        assert await world.states([running.id, behind.id]) == [JobState.CANCELLED, JobState.COMPLETED]

        known, before = len(await world.jobs()), await world.counts("models")
        with pytest.raises(InvalidInput, match="lane"):
            await hold(world, world.app.turn("dalle", queue="models"), 0.0)
        assert (len(await world.jobs()), await world.counts("models")) == (known, before)
        assert await world.client.lanes("models") == []

    await stage.play(scenario)


async def test_a_lane_of_turns_goes_on_when_a_holder_is_killed(stages: dict[str, Stage]) -> None:
    """A turn is its caller's own code, so it is not run again: the place goes to the next in line."""

    async def scenario(world: World) -> None:
        holder = world.fleet.program("tests.e2e.turner", "flux", "60", name="holder")

        async def held() -> bool:
            return bool(world.ledger.begins())

        await world.until(held, "the first turn is held")
        others = []
        for number in range(2):
            others.append(world.fleet.program("tests.e2e.turner", "flux", "0.2", name=f"next {number}"))

            async def in_line(expected: int = number + 1) -> bool:
                return (await world.counts("models")).pending == expected

            await world.until(in_line, "the next one waits")
        holder.kill()
        killed = time.monotonic()
        assert await world.gone(*others) == [0, 0]
        took = time.monotonic() - killed
        figures.record("a lane of turns after its holder was killed", seconds=round(took, 2))
        assert [entry.worker for entry in world.ledger.begins()] == ["holder", "next 0", "next 1"]
        first = await world.client.job(world.ledger.begins()[0].job)
        assert (first.state, first.reason) == (JobState.CANCELLED, Reason.WAITER_GONE)
        assert most_at_once(entry for entry in world.ledger.entries() if entry.worker != "holder") == 1

    await play_on_all(stages, scenario)
