"""Priorities, slots and reservations of real workers."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from fairlane import InvalidInput
from fairlane.model.job import Priority
from fairlane.task import PriorityWord

from . import figures, tasks
from .ledger import BEGIN, END, Entry, most_at_once, now
from .world import Stage, World, play_on_all

THREE = ("-c", "3", "--reserved", "high=1")
FLOOR = 10
"""Every class keeps one start in this many."""


def sleeping(seconds: float, priority: PriorityWord) -> Any:
    """A call of some length and priority."""
    return tasks.sleep.options(priority=priority).call(seconds)


async def send(world: World, count: int, seconds: float, priority: PriorityWord) -> list[str]:
    """Send jobs of one priority."""
    handles = await world.client.enqueue_many([sleeping(seconds, priority) for _ in range(count)])
    return [handle.id for handle in handles]


def below_high(entry: Entry) -> bool:
    """Whether the reserved slots are closed to it."""
    return entry.priority != "high"


async def test_an_urgent_job_starts_next_whatever_waits(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        await send(world, 5_000, 0.2, "low")
        full = world.fleet.worker("-c", "2", "--reserved", "high=0", name="full")
        await world.ready(full)
        await began_some(world)
        urgent = (await send(world, 1, 0.0, "high"))[0]
        sent = now()
        await world.began(urgent)
        between = [e for e in world.ledger.begins() if sent < e.at < world.ledger.of(urgent)[0].at]
        # What was claimed when it arrived may still begin; after that it is the first.
        assert len(between) <= 2, f"{len(between)} jobs started before an urgent one"
        full.kill()

        await world.gone(full)
        # In front of everything else, and in its slot until the urgent one has begun.
        go = world.file("go")
        held = (await world.send(tasks.hold.options(priority="normal").call(str(go)))).id
        room = world.fleet.worker("-c", "2", "--reserved", "high=1", name="room")
        await world.ready(room)
        await world.began(held)
        before = now()
        urgent = (await send(world, 1, 0.0, "high"))[0]
        await world.began(urgent)
        assert not world.ledger.of(held, END), "it waited for the end of another"
        go.touch()
        took = (world.ledger.of(urgent)[0].at - before) / 1e9
        figures.record("an urgent job with a free slot", milliseconds=round(took * 1_000, 1))

    await stage.play(scenario, at_once=2)


async def test_a_job_without_a_priority_is_normal_and_an_unknown_one_is_refused(stage: Stage) -> None:
    async with stage.world() as world:
        plain = await world.send(tasks.noop.call())
        assert (await plain.job()).priority is Priority.NORMAL
        with pytest.raises(InvalidInput, match="priority"):
            tasks.noop.options(priority="urgent")  # type: ignore[arg-type]  # the mistake
        low, high = (await send(world, 1, 0.0, "low"))[0], (await send(world, 1, 0.0, "high"))[0]
        await world.ready(world.fleet.worker("-c", "1"))
        await world.final(plain.id, low, high)
        assert [entry.job for entry in world.ledger.begins()] == [high, plain.id, low]


async def test_low_work_keeps_its_share_under_an_endless_stream_of_high_work(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        low = set(await send(world, 30, 0.01, "low"))
        await send(world, 200, 0.01, "high")
        await world.ready(world.fleet.worker("-c", "2", "--reserved", "high=0"))

        async def enough() -> bool:
            return len(world.ledger.begins()) >= 150

        await world.until(enough, "150 jobs have started")
        first = world.ledger.begins()[:150]
        share = sum(entry.job in low for entry in first)
        figures.record("starts of low work among 150 under high load", starts=share)
        assert share >= 150 // FLOOR - 1
        # Neither do they take more than that: high work is in front.
        assert share <= 2 * 150 // FLOOR

    await stage.play(scenario)


async def test_one_worker_keeps_to_its_slots_and_reservation(stages: dict[str, Stage]) -> None:
    """Bodies run until they are told to end, so that a slot is free or taken whatever the speed of the machine."""

    async def scenario(world: World) -> None:
        await world.ready(world.fleet.worker(*THREE))
        go, again = world.file("go"), world.file("again")
        low = [(await world.send(tasks.hold.options(priority="low").call(str(go)))).id for _ in range(5)]
        await world.began(*low[:2])
        urgent = (await send(world, 1, 0.1, "high"))[0]
        await world.final(urgent)
        assert not [entry for entry in world.ledger.entries() if entry.job != urgent and entry.event != BEGIN]
        go.touch()
        await world.final(*low)
        assert world.ledger.most_at_once(lambda e: e.priority == "low") == 2
        assert world.ledger.most_at_once() == 3

        # Long enough without work that every poll, renewal and sweep has come by several times.
        await asyncio.sleep(2.5)
        high = [(await world.send(tasks.hold.options(priority="high").call(str(again)))).id for _ in range(3)]
        await world.began(*high)
        again.touch()
        await world.final(*high)
        assert world.ledger.most_at_once(lambda e: e.job in high) == 3

    await play_on_all(stages, scenario)


async def test_three_workers_keep_to_their_slots_and_reservations_together(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        await world.workers("w0", "w1", "w2", options=THREE)
        go = world.file("go")

        async def begun(count: int) -> None:
            async def enough() -> bool:
                return len(world.ledger.begins()) >= count

            await world.until(enough, f"{count} jobs have begun")

        held = tasks.hold.options(priority="low").call, tasks.hold.options(priority="high").call
        low = [(await world.send(held[0](str(go)))).id for _ in range(30)]
        await begun(6)
        high = [(await world.send(held[1](str(go)))).id for _ in range(15)]
        await begun(9)
        go.touch()
        await world.final(*low, *high)
        assert world.ledger.most_at_once(lambda e: e.priority == "low") == 6
        assert world.ledger.most_at_once() == 9
        for worker in ("w0", "w1", "w2"):
            own = [entry for entry in world.ledger.entries() if entry.worker == worker]
            assert most_at_once(own) == 3
            assert most_at_once(filter(below_high, own)) == 2
        assert set(world.ledger.starts().values()) == {1}

    await stage.play(scenario)


async def test_never_more_jobs_run_than_slots_with_random_work(stage: Stage) -> None:
    async with stage.world() as world:
        draw = Random(20)
        await world.ready(world.fleet.worker("-c", "5", "--reserved", "high=2"))
        calls = [
            sleeping(draw.choice((0.0, 0.01, 0.05, 0.1)), draw.choice(("high", "normal", "low"))) for _ in range(400)
        ]
        handles = []
        while calls:
            part, calls = calls[:40], calls[40:]
            handles += await world.client.enqueue_many(part)
            await asyncio.sleep(draw.random() * 0.2)
        await world.final(*(handle.id for handle in handles))
        assert world.ledger.most_at_once() == 5
        assert world.ledger.most_at_once(below_high) == 3
        assert set(world.ledger.starts().values()) == {1}


async def began_some(world: World) -> None:
    """Wait until bodies run."""

    async def some() -> bool:
        return len(world.ledger.begins()) >= 4

    await world.until(some, "bodies run")
