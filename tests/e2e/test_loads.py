"""What counts as waiting: cancelled, expired and refused work leaves the load at once and for good."""

from __future__ import annotations

import asyncio

from fairlane.handle import Cancellation
from fairlane.model.job import JobState, Reason

from . import tasks
from .world import Stage, World, play_on_all

OUTAGE = 5.0
STREAM = 500


async def test_cancelled_and_expired_jobs_leave_the_load(stage: Stage) -> None:
    """No worker is there, so a manager alone watches the clock."""

    async def scenario(world: World) -> None:
        await world.ready(world.fleet.manager())
        expiring = await world.send(tasks.noop.options(expires=0.5).call())
        others = [await world.send(tasks.noop.call()) for _ in range(4)]
        assert (await world.counts()).pending == 5

        answers = [await handle.cancel() for handle in others[:2]]
        assert answers == [Cancellation.CANCELLED] * 2
        [expired] = await world.final(expiring.id)
        cancelled = await world.final(*(handle.id for handle in others[:2]))
        assert (await world.counts()).pending == 2
        assert (expired.state, expired.reason) == (JobState.CANCELLED, Reason.EXPIRED)
        assert [(job.state, job.reason) for job in cancelled] == [(JobState.CANCELLED, Reason.BY_USER)] * 2

        assert await others[0].cancel() is Cancellation.CANCELLED
        assert await expiring.cancel() is Cancellation.CANCELLED
        assert await world.final(others[0].id, expiring.id) == [cancelled[0], expired], (
            "a second cancel changes nothing"
        )
        assert (await world.counts()).pending == 2

        await world.ready(world.fleet.worker())
        await world.final(*(handle.id for handle in others[2:]))
        counts = await world.counts()
        assert (counts.pending, counts.running, counts.completed) == (0, 0, 2)
        assert world.ledger.starts() == {handle.id: 1 for handle in others[2:]}

    await stage.play(scenario)


async def test_an_outage_during_a_stream_of_submissions_leaves_nothing_behind(stages: dict[str, Stage]) -> None:
    """A submission without an answer may be stored or not: it is repeated under its own id, and then there is one.

    Before that, the load counts exactly what is there, and nothing that was confirmed is missing.
    """

    async def scenario(world: World) -> None:
        calls = [tasks.noop.call() for _ in range(STREAM)]
        confirmed: set[str] = set()
        failed: set[str] = set()
        half = asyncio.Event()

        async def submit(mine: list[int]) -> None:
            for number in mine:
                try:
                    async with asyncio.timeout(0.5):
                        handle = await world.send(calls[number])
                except Exception:
                    failed.add(calls[number].job.id)
                else:
                    assert handle.id == calls[number].job.id
                    confirmed.add(handle.id)
                if len(confirmed) >= STREAM // 4:
                    half.set()
                await asyncio.sleep(0.01)

        stream = [asyncio.ensure_future(submit(list(range(start, STREAM, 10)))) for start in range(10)]
        await half.wait()
        with world.deployment.down():
            await asyncio.sleep(OUTAGE)
        await asyncio.gather(*stream)
        assert len(confirmed) + len(failed) == STREAM
        assert failed, "the outage was not noticed"

        stored = [job.id for job in await world.jobs()]
        assert len(stored) == len(set(stored)), "an id is there twice"
        assert confirmed <= set(stored)
        assert (await world.counts()).pending == len(stored)

        again = [await world.send(call) for call in calls if call.job.id in failed]
        assert {handle.id for handle in again if handle.created} == failed - set(stored)
        stored = [job.id for job in await world.jobs()]
        assert sorted(stored) == sorted(call.job.id for call in calls)
        assert (await world.counts()).pending == STREAM
        assert (await world.client.recount()).differences == ()

    await play_on_all(stages, scenario)
