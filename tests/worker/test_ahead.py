"""What a worker prepares in advance, and what happens to it if something changes meanwhile."""

from __future__ import annotations

import asyncio
import time

import msgspec

from fairlane.model.job import JobState

from .faulty import wait_for
from .yard import QUICK, Yard


async def test_a_stop_while_half_of_a_claim_has_begun_gives_the_other_half_back_uncharged(yard: Yard) -> None:
    begun: list[str] = []

    async def work(name: str) -> None:
        begun.append(name)
        if len(begun) == 1:
            worker.stop(now=True)
            # As the loop would, before its next iteration starts the others.
            worker._shutdown.hand_back(worker._executor, worker._runs.values(), time.monotonic())

    yard.task(work)
    ids = {name: await yard.enqueue("work", name) for name in map(str, range(40))}
    worker = yard.make(slots=40)
    await asyncio.wait_for(worker.run(), 10)
    jobs = {name: await yard.job(id) for name, id in ids.items()}

    assert len(begun) <= 20
    for name, job in jobs.items():
        if name in begun:
            assert job.state in (JobState.COMPLETED, JobState.PENDING)
        else:
            assert (job.state, job.attempt) == (JobState.PENDING, 0)
    assert (await yard.store.recount()).differences == ()


async def test_a_claim_that_was_made_for_a_lost_session_is_not_sent_in_the_next(yard: Yard) -> None:
    """Claims are numbered by session: one with a number of the old one would make the next ones look stale."""

    async def work() -> None: ...

    yard.task(work)
    async with yard.worker() as worker:
        # Each is a claim of its own: many more than the next session will need.
        for _ in range(40):
            await yard.until(await yard.enqueue("work"))
        await wait_for(lambda: worker._fetcher._ready is not None)
        first = worker.session.id
        await yard.store.leave(first)
        # As the keeper does, before a poll of the worker finds out.
        worker._lose_session(first)
        ids = [await yard.enqueue("work") for _ in range(5)]
        jobs = [await yard.until(id) for id in ids]
        assert worker.session.id != first
        assert worker._fetcher.number < 40
    assert {job.state for job in jobs} == {JobState.COMPLETED}


async def test_jobs_that_come_together_do_not_wait_for_a_poll(yard: Yard) -> None:
    """An idle worker may be sent one of them, and is notified of the others at the same moment."""
    go_on = asyncio.Event()
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)
        await go_on.wait()

    yard.task(work)
    seldom = msgspec.structs.replace(QUICK, poll=600.0)
    async with yard.worker(slots=10, intervals=seldom) as worker:
        for round in range(1, 6):
            # It has claimed since it became idle, and the next poll is minutes away.
            await wait_for(lambda: worker._fetcher._ready is not None)
            ids = await asyncio.gather(*(yard.enqueue("work", number) for number in range(3)))
            await wait_for(lambda round=round: len(begun) == 3 * round)
            go_on.set()
            for id in ids:
                await yard.until(id)
            go_on.clear()


async def test_a_paused_worker_claims_nothing(yard: Yard) -> None:
    async def work() -> None: ...

    yard.task(work)
    worker = yard.make()
    worker.pause(True)
    running = asyncio.ensure_future(worker.run())
    await worker.ready.wait()
    id = await yard.enqueue("work")
    await asyncio.sleep(QUICK.poll * 4)
    assert (await yard.job(id)).state is JobState.PENDING
    worker.pause(False)
    assert (await yard.until(id)).state is JobState.COMPLETED
    worker.stop()
    await asyncio.wait_for(running, 10)
