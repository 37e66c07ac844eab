"""Places in line are pushed: with the poll made rare they are still reported."""

from __future__ import annotations

import asyncio

import pytest

from fairlane import Fairlane
from fairlane.runtime import job_watcher

PATIENCE = 30.0


@pytest.fixture(autouse=True)
def _no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_watcher, "POLL", 600.0)


async def test_a_waiting_turn_is_notified_of_each_place_at_once(url: str) -> None:
    app = Fairlane(url)
    app.queue("models").lane("flux", limit=1)
    told: list[int] = []
    done = [asyncio.Event() for _ in range(3)]

    async def hold(number: int) -> None:
        async with app.turn("flux", queue="models"):
            await done[number].wait()

    async with app:
        holders = []
        for number in range(3):
            holders.append(asyncio.create_task(hold(number)))
            async with asyncio.timeout(PATIENCE):
                while sum(q.counts.running + q.counts.pending for q in await app.client.queues()) <= number:
                    await asyncio.sleep(0.01)

        async def last() -> None:
            async with app.turn("flux", queue="models", on_position=lambda position: told.append(position.place)):
                return

        waiting = asyncio.create_task(last())
        for number in range(3):
            async with asyncio.timeout(PATIENCE):
                while told != [3, 2, 1][: number + 1]:
                    await asyncio.sleep(0.01)
            done[number].set()
        await asyncio.wait_for(asyncio.gather(waiting, *holders), PATIENCE)
    assert told == [3, 2, 1]


async def test_a_job_in_a_limited_lane_is_notified_when_its_place_changes(url: str) -> None:
    app = Fairlane(url)
    app.queue("default").lane("doc", limit=1)

    @app.task(lane="doc")
    async def step() -> None:
        return None

    async with app:
        handles = [await step.enqueue() for _ in range(3)]
        places: list[int | None] = []

        async def watch() -> None:
            async for update in handles[2].watch():
                places.append(None if update.position is None else update.position.place)  # noqa: PERF401 - looked at while it grows

        watching_it = asyncio.create_task(watch())
        async with asyncio.timeout(PATIENCE):
            while places != [3]:
                await asyncio.sleep(0.01)
        await handles[1].cancel()
        async with asyncio.timeout(PATIENCE):
            while places != [3, 2]:
                await asyncio.sleep(0.01)
        await app.worker(burst=True).run()
        await asyncio.wait_for(watching_it, PATIENCE)
    assert places[:2] == [3, 2]
    assert places[-1] is None
