"""Stores under test. A store is one parameter: add its opener to `open_empty` and the whole suite runs on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path

import pytest

from fairlane.backends import open_store
from fairlane.clock import ManualClock
from fairlane.store import Store

from .kit import Kit

Opener = Callable[[ManualClock], Awaitable[Store]]
STORE_NAMES = ("sqlite",)


def empty_url(name: str, directory: Path) -> str:
    """The URL of an empty store, in a directory that nothing else uses."""
    return {"sqlite": f"sqlite:///{directory / 'fairlane.db'}"}[name]


async def open_empty(name: str, clock: ManualClock, directory: Path) -> Store:
    """An empty store of the kind `name`."""
    return await open_store(empty_url(name, directory), clock=clock)


@pytest.fixture(params=STORE_NAMES)
def store_name(request: pytest.FixtureRequest) -> str:
    """The kind of store under test."""
    return str(request.param)


@pytest.fixture
def store_url(store_name: str, tmp_path: Path) -> str:
    """The URL of an empty store."""
    return empty_url(store_name, tmp_path)


@pytest.fixture
def opener(store_name: str, tmp_path: Path) -> Opener:
    """Opens empty stores, as many as a test wants; whoever opens one closes it."""
    numbers = count(1)

    async def open_next(clock: ManualClock) -> Store:
        directory = tmp_path / f"store-{next(numbers)}"
        directory.mkdir()
        return await open_empty(store_name, clock, directory)

    return open_next


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the store under test."""
    return ManualClock()


@pytest.fixture
async def store(store_url: str, clock: ManualClock) -> AsyncIterator[Store]:
    """An empty store on a manual clock."""
    opened = await open_store(store_url, clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: Store, clock: ManualClock) -> Kit:
    """The store with short words for what tests do all the time."""
    return Kit(store, clock)
