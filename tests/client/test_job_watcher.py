"""Many callers that wait for jobs at once: the cost, and the behaviour when the store does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from fairlane import Fairlane, Intervals, Settings, StoreError, StoreUnavailable
from fairlane.handle import Handle
from fairlane.model.job import Job
from fairlane.runtime.job_watcher import _watchers

from .conftest import eventually, kit_of


async def _sent(app: Fairlane, count: int) -> list[Handle[int]]:
    @app.task(name="count")
    async def number(value: int) -> int:
        return value

    return await app.enqueue_many([number.call(n) for n in range(count)])


class Reads:
    """Counts the reads of a store, and makes them fail on demand."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        self.error: Exception | None = None
        self.begun = asyncio.Event()
        self.failed = asyncio.Event()
        self._get = store.inner.get
        monkeypatch.setattr(store.inner, "get", self.get)

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        self.calls.append(len(ids))
        self.begun.set()
        if self.error is not None:
            self.failed.set()
            raise self.error
        found: list[Job | None] = await self._get(ids)
        return found


async def _complete_all(app: Fairlane, count: int) -> None:
    worker = await (await kit_of(app)).worker(slots=count)
    done = 0
    while done < count:
        for claimed in await worker.claim(25):
            await worker.complete(claimed, result=claimed.payload[2:].partition(b"]")[0])
            done += 1


async def test_two_hundred_wait_at_once_and_each_gets_its_own_result(app: Fairlane) -> None:
    handles = await _sent(app, 200)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(handle.result(timeout=60)) for handle in handles]
        await asyncio.sleep(0)
        await _complete_all(app, 200)
    assert [task.result() for task in waiting] == list(range(200))


async def test_a_thousand_waiting_callers_share_one_read_per_poll(
    app: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlane.runtime.job_watcher.POLL", 0.2)
    handles = await _sent(app, 1_000)
    reads = Reads(await app.connection.store(), monkeypatch)
    waiting = [asyncio.create_task(handle.result()) for handle in handles]
    # Counted per read and not per second: how many reads fit into a second depends on the machine.
    async with asyncio.timeout(60):
        while reads.calls.count(1_000) < 3:
            reads.begun.clear()
            await reads.begun.wait()
    assert max(reads.calls) <= 1_000
    assert len(reads.calls) <= 20, "a few reads for hints that came late, and one for each look at everything"
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_nothing_is_left_behind_when_no_job_is_watched_any_more(app: Fairlane) -> None:
    [handle] = await _sent(app, 1)
    before = len(asyncio.all_tasks())
    with pytest.raises(TimeoutError):
        await handle.result(timeout=0.1)
    async for _ in handle.watch():
        break

    async def over() -> bool:
        return not _watchers[asyncio.get_running_loop()] and len(asyncio.all_tasks()) <= before

    await eventually(over)


async def test_waiting_callers_are_not_disturbed_by_an_outage(app: Fairlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.runtime.job_watcher.POLL", 0.05)
    [handle] = await _sent(app, 1)
    reads = Reads(await app.connection.store(), monkeypatch)
    waiting = asyncio.create_task(handle.result(timeout=60))
    async with asyncio.timeout(30):
        await reads.begun.wait()
        reads.error = StoreUnavailable("the disk is away")
        await reads.failed.wait()
        reads.failed.clear()
        await reads.failed.wait()
        assert not waiting.done()
        with pytest.raises(StoreUnavailable, match="the disk is away"):
            await handle.result(timeout=60)
        reads.error = None
        await _complete_all(app, 1)
        assert await waiting == 0


@pytest.mark.parametrize("verb", ["result", "watch"])
async def test_an_error_that_will_not_pass_ends_every_watch(
    app: Fairlane, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("fairlane.runtime.job_watcher.POLL", 0.05)
    handles = await _sent(app, 2)
    reads = Reads(await app.connection.store(), monkeypatch)

    async def wait(handle: Handle[int]) -> Any:
        return await handle.result() if verb == "result" else [update async for update in handle.watch()]

    waiting = [asyncio.create_task(wait(handle)) for handle in handles]
    async with asyncio.timeout(30):
        await reads.begun.wait()
        reads.error = StoreError("damaged")
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, StoreError)
        reads.error = None
        await _complete_all(app, 2)
        assert await handles[1].result() == 1


async def test_closing_the_application_ends_waiting_callers_and_opens_nothing_again(
    app: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlane.runtime.job_watcher.POLL", 0.1)
    [handle] = await _sent(app, 1)
    waiting = asyncio.create_task(handle.result())
    await asyncio.sleep(0.2)
    await app.connection.close()
    async with asyncio.timeout(30):
        with pytest.raises(StoreError, match="closed"):
            await waiting
    assert app.connection._state.get().opening is None


def test_two_event_loops_wait_at_once_on_one_application(url: str) -> None:
    app = Fairlane(settings=Settings(url=url, intervals=Intervals().scaled(0.1)))
    loops = 3
    barrier = threading.Barrier(loops)
    results: dict[int, list[int]] = {}

    async def one(which: int) -> None:
        handles = await _sent(app, 20)
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(handle.result(timeout=60)) for handle in handles]
            await asyncio.to_thread(barrier.wait, 60)
            await _complete_all(app, 20)
        results[which] = [task.result() for task in waiting]

    threads = [threading.Thread(target=lambda n=n: asyncio.run(one(n))) for n in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert results == {n: list(range(20)) for n in range(loops)}
    asyncio.run(app.close())
