"""Turns, connections and the blocking thread when callers go away at the worst moment."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context

import pytest

from fairlane import Fairlane, FairlaneError, Settings
from fairlane.runtime.connection import Connection
from fairlane.store import open_store
from fairlane.store.port import Store

from .conftest import QUICK

PATIENCE = 45.0


@pytest.fixture
async def models(url: str) -> AsyncIterator[Fairlane]:
    """An application with a strict lane."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    app.queue("models").lane("*", limit=1)
    yield app
    await app.close()


@asynccontextmanager
async def left_open(app: Fairlane) -> AsyncIterator[None]:
    """Let the block close event loops with open connections of the application; Python warns about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        await app.close()
        gc.collect()


def test_closing_while_other_threads_call_does_not_hang(url: str) -> None:
    app = Fairlane(url)
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            try:
                app.blocking.queues()
            except (FairlaneError, RuntimeError, asyncio.CancelledError, ConnectionAbortedError):
                continue
            except BaseException as exc:  # the future of a loop that was stopped
                if "Cancelled" not in type(exc).__name__:
                    raise

    callers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for caller in callers:
        caller.start()

    def close() -> None:
        for _ in range(60):
            app.blocking.stop()

    closer = threading.Thread(target=close, daemon=True)
    closer.start()
    closer.join(PATIENCE)
    hung = closer.is_alive()
    done.set()
    for caller in callers:
        caller.join(PATIENCE)
    assert not hung
    app.blocking.close()


async def test_a_lane_is_given_away_only_when_its_holder_has_left(models: Fairlane) -> None:
    inside = 0
    most = 0
    begun = asyncio.Event()
    other = Fairlane(settings=models.settings)

    async def hold(app: Fairlane, tidy: float) -> None:
        nonlocal inside, most
        async with app.turn("flux", queue="models"):
            inside += 1
            most = max(most, inside)
            begun.set()
            try:
                await asyncio.sleep(30 if tidy else 0)
            finally:
                await asyncio.sleep(tidy)
                inside -= 1

    first = asyncio.create_task(hold(models, 0.3))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    second = asyncio.create_task(hold(other, 0))
    await asyncio.sleep(0.1)
    await models.close()
    await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), PATIENCE)
    await other.close()
    assert most == 1


async def test_a_turn_whose_loop_was_closed_under_it_does_not_keep_its_lane(models: Fairlane) -> None:
    def hold_and_vanish() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(models.turn("flux", queue="models").__aenter__())
        loop.close()

    async with left_open(models):
        await asyncio.to_thread(hold_and_vanish)
        async with asyncio.timeout(PATIENCE), models.turn("flux", queue="models"):
            pass


async def test_a_turn_that_waits_in_a_loop_that_was_closed_does_not_keep_the_lane_once_granted(
    models: Fairlane,
) -> None:
    left: list[object] = []

    def wait_and_vanish() -> None:
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(models.turn("flux", queue="models").__aenter__())
        loop.run_until_complete(asyncio.wait([waiting], timeout=0.3))
        assert not waiting.done()
        # Kept, so that none of it is unwound: as if the thread had stopped for ever.
        left.append(waiting)
        loop.close()

    async with left_open(models):
        async with models.turn("flux", queue="models"):
            # In a context of its own: it does not wait for a place that it holds itself.
            await asyncio.to_thread(Context().run, wait_and_vanish)
        async with asyncio.timeout(PATIENCE), models.turn("flux", queue="models"):
            pass
        left.clear()


async def test_one_impatient_caller_does_not_fail_the_others_while_the_store_opens(url: str) -> None:
    opened = 0

    async def slowly() -> Store:
        nonlocal opened
        opened += 1
        await asyncio.sleep(0.3)
        return await open_store(url)

    connection = Connection(slowly)
    impatient = asyncio.create_task(connection.store())
    await asyncio.sleep(0)
    patient = asyncio.create_task(connection.store())
    await asyncio.sleep(0.05)
    impatient.cancel()
    store = await asyncio.wait_for(patient, PATIENCE)
    assert await store.queues() == []
    assert opened == 2
    await connection.close()
