"""Applications on a store of every kind, and a worker played by the test through the store port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from fairlane import Fairlane, Intervals, ManualClock, Settings
from fairlane.store.postgresql.store import PostgresqlStore
from fairlane.store.redis.store import RedisStore
from fairlane.store.sqlite.store import SqliteStore
from tests.conformance.kit import Kit

QUICK = replace(Intervals().scaled(0.1), lease=6.0)
"""The lease is longer than a busy machine stops a process, and short enough to wait for its end."""


@pytest.fixture
def url(store_url: str) -> str:
    """Where the store of the test lies."""
    return store_url


@pytest.fixture
def clock() -> ManualClock:
    """The clock of `still_app`."""
    return ManualClock()


@pytest.fixture
async def app(url: str) -> AsyncIterator[Fairlane]:
    """An application on the real clock, with short intervals."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    yield app
    await app.close()


@pytest.fixture
async def still_app(url: str, clock: ManualClock) -> AsyncIterator[Fairlane]:
    """An application whose store's clock stands still unless the test moves it."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK), clock=clock)
    yield app
    await app.close()


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float = 30.0) -> None:
    """Wait until `check` holds, for conditions without a notification."""
    async with asyncio.timeout(seconds):
        while True:
            if await check():
                return
            await asyncio.sleep(0.01)


async def kit_of(app: Fairlane, clock: ManualClock | None = None) -> Kit:
    """Short names for what a worker does, on the store of an application."""
    return Kit(await app.connection.store(), clock or ManualClock())


def store_class(app: Fairlane) -> type[Any]:
    """The class of an application's store: a verb that is replaced there is replaced in every thread."""
    kinds: dict[str, type[Any]] = {"sqlite": SqliteStore, "postgresql": PostgresqlStore, "redis": RedisStore}
    return kinds[app.settings.url.partition(":")[0]]
