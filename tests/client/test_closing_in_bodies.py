"""A body may close the application it belongs to: its worker, the other bodies and their turns continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fairlane import Fairlane, JobState
from fairlane.errors import StoreError
from fairlane.handle import Handle
from fairlane.model.session import SessionKind, SessionState
from fairlane.store.instrumented import InstrumentedStore
from fairlane.store.port import Store
from fairlane.testing import embedded, embedded_blocking
from fairlane.worker.worker import Worker

from .conftest import store_class

PATIENCE = 30.0


def closing_tasks(app: Fairlane) -> dict[str, Any]:
    """Tasks that close the application in every possible way, and then use it once more."""

    @app.task(retries=0)
    async def other(n: int) -> int:
        await asyncio.sleep(0.05)
        return n

    @app.task(name="with", retries=0)
    async def leaves_a_block() -> str:
        async with app:
            await other.enqueue(100)
        return (await other.enqueue(101)).id

    @app.task(name="close", retries=0)
    async def closes() -> str:
        await app.close()
        return (await other.enqueue(102)).id

    @app.task(name="blocking", retries=0)
    def closes_blocking() -> str:
        with app.blocking as client:
            client.queues()
        return other.blocking.enqueue(103).id

    return {"other": other, "with": leaves_a_block, "close": closes, "blocking": closes_blocking}


def inner(store: Store) -> Store:
    """The store that the application watches."""
    assert isinstance(store, InstrumentedStore)
    return store.inner


@asynccontextmanager
async def working(app: Fairlane) -> AsyncIterator[Worker]:
    worker = app.worker(slots=4, grace=1)
    serving = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        worker.stop(now=True)
        await asyncio.wait_for(serving, PATIENCE)


@pytest.mark.parametrize("how", ["with", "close", "blocking"])
async def test_a_body_that_closes_the_application_does_not_stop_its_worker(app: Fairlane, url: str, how: str) -> None:
    tasks = closing_tasks(app)
    observer = Fairlane(url)
    try:
        sent: list[Handle[Any]] = [await tasks[how].enqueue()]
        sent += [await tasks["other"].enqueue(n) for n in range(10)]
        async with working(app):
            ends = [await observer.handle(handle.id).result(PATIENCE) for handle in sent]
            # The results of the calls that the body made after it had closed the application.
            assert await observer.handle(ends[0]).result(PATIENCE) >= 100
        assert ends[1:] == list(range(10))
        workers = [session for session in await observer.client.sessions() if session.kind is SessionKind.WORKER]
        assert [session.state for session in workers] == [SessionState.ENDED]
    finally:
        await observer.close()


@pytest.mark.parametrize("how", ["with", "close", "blocking"])
async def test_a_body_that_closes_the_application_leaves_the_turns_of_others_alone(app: Fairlane, how: str) -> None:
    app.queue("models").lane("*", limit=1)
    tasks = closing_tasks(app)
    entered, closed = asyncio.Event(), asyncio.Event()

    @app.task(retries=0)
    async def holds() -> str:
        async with app.turn("flux", queue="models", timeout=PATIENCE) as turn:
            entered.set()
            await closed.wait()
            return "lost" if turn.lost else "held"

    async with working(app):
        holder = await holds.enqueue()
        await asyncio.wait_for(entered.wait(), PATIENCE)
        await (await tasks[how].enqueue()).result(PATIENCE)
        closed.set()
        assert await holder.result(PATIENCE) == "held"


async def test_a_plain_body_that_closes_the_application_does_not_end_the_calls_of_another(app: Fairlane) -> None:
    tasks = closing_tasks(app)
    waiting = asyncio.Event()
    loop = asyncio.get_running_loop()

    @app.task(retries=0)
    def waits(id: str) -> int:
        loop.call_soon_threadsafe(waiting.set)
        return int(app.blocking.handle(id).result(PATIENCE))

    @app.task(retries=0)
    async def awaited() -> int:
        await waiting.wait()
        await (await tasks["blocking"].enqueue()).result(PATIENCE)
        return 7

    async with working(app):
        handle = await waits.enqueue((await awaited.enqueue()).id)
        assert await handle.result(PATIENCE) == 7


async def test_the_store_is_closed_when_the_application_and_its_workers_are_done_with_it(
    app: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    usual = store_class(app).close

    async def close(store: object) -> None:
        closed.append(store)
        await usual(store)

    monkeypatch.setattr(store_class(app), "close", close)

    @app.task
    async def unused() -> None: ...

    async with working(app) as worker:
        await worker.ready.wait()
        mine = inner(worker._store)
        await app.close()
        assert mine not in closed
    assert mine in closed
    assert not app.connection.opened
    # Only the application uses it: then it stays open when a worker ends.
    await app.client.queues()
    async with working(app) as worker:
        await worker.ready.wait()
    opened = inner(await app.connection.store())
    assert opened not in closed
    await app.close()
    assert opened in closed


async def test_a_program_may_close_the_application_before_its_worker(app: Fairlane) -> None:
    tasks = closing_tasks(app)
    async with working(app) as worker:
        await worker.ready.wait()
        await app.close()
        handle = await tasks["other"].enqueue(5)
        assert await handle.result(PATIENCE) == 5
        await app.close()


@pytest.mark.parametrize("how", ["with", "close", "blocking"])
async def test_a_body_in_a_lab_may_close_the_application(app: Fairlane, how: str) -> None:
    tasks = closing_tasks(app)
    async with embedded(app) as lab:
        first = await tasks[how].enqueue()
        await tasks["other"].enqueue(1)
        drained = await lab.drain()
        assert drained.failed == 0
        assert await first.state() is JobState.COMPLETED
        # The lab continues.
        assert await lab.run(await tasks["other"].enqueue(2)) == 2


def test_a_plain_body_in_a_lab_may_close_the_application(url: str) -> None:
    app = Fairlane(url)
    tasks = closing_tasks(app)
    with embedded_blocking(app) as lab:
        first = tasks["blocking"].blocking.enqueue()
        assert lab.drain().failed == 0
        assert first.state() is JobState.COMPLETED
        assert lab.run(tasks["other"].blocking.enqueue(2)) == 2


@pytest.mark.parametrize("opens", [2, 3])
async def test_what_is_held_often_is_closed_once(app: Fairlane, opens: int) -> None:
    first = await app.connection.hold()
    others = [await app.connection.hold() for _ in range(opens - 1)]
    assert all(store is first for store in others)
    for _ in range(opens - 1):
        await app.connection.release()
        assert await first.queues() == []
    await app.connection.release()
    with pytest.raises(StoreError, match="closed"):
        await first.queues()
    assert await app.client.queues() == []
