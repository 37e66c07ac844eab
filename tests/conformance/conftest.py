"""Stores under test. A store is one parameter: add its kind to `KINDS` and `empty_stores` in `tests/servers/stores.py`
and the whole suite runs on it.

Every test runs on SQLite, PostgreSQL and Redis, and on PostgreSQL with Redis what is announced to workers (`WAKING`).
If the system has a server of another version than the wheel's, a part runs there as well: the tests that are the first
in their file, or the first there to name a verb of the port, a quarter of all (`tests/servers/test_stores.py` proves
that they call every verb). ``FAIRLANE_TEST_EVERY_VERSION=1`` runs all but those of `LONG`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.servers.stores import (
    COMPOSED,
    EVERY_VERSION,
    KINDS,
    EmptyStores,
    empty_stores,
    runs_on_second_version,
    second_versions,
)
from tests.sizes import FULL

from .kit import Kit

Opener = Callable[[ManualClock], Awaitable[Store]]
WITHOUT_SCHEMA = ("test_migrate",)
"""Modules whose tests make the schema themselves. For the others it is there: making it takes most of a second."""
ABOUT_THE_SUITE = ("test_model_catches",)
"""Modules that test the suite and not a store: one kind will do."""
LONG = (
    *("test_model", "test_fences", "test_eta", "test_crowds", "test_fair_order"),
    *("test_growth", "test_together", "test_notified_claims", "test_lane_pages"),
)
"""Modules that are not repeated on a second version, because they take long and call no verb that others do not."""

WAKING = (
    *(
        "test_wakeups",
        "test_claim",
        "test_enqueue",
        "test_finish",
        "test_grants",
        "test_idle_grants",
        "test_notified_claims",
    ),
    *("test_turns", "test_declines", "test_maintenance", "test_leader", "test_settings", "test_crowds"),
)
"""Modules that run on `COMPOSED` by default: whatever is announced to workers. In a full run all do."""


def kinds_for(test: str, module: ModuleType) -> tuple[str, ...]:
    """The kinds of store a test runs on."""
    name = module.__name__.rpartition(".")[2]
    if name in ABOUT_THE_SUITE:
        return KINDS[:1]
    kinds = (*KINDS, COMPOSED) if FULL or name in WAKING else KINDS
    if (name in LONG and EVERY_VERSION not in os.environ) or not runs_on_second_version(test, module):
        return kinds
    return (*kinds, *second_versions())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its kinds of store."""
    if "store_name" in metafunc.fixturenames:
        kinds = kinds_for(metafunc.function.__name__, metafunc.module)
        metafunc.parametrize("store_name", kinds, indirect=True)


@pytest.fixture
def store_name(request: pytest.FixtureRequest) -> str:
    """The kind of store under test."""
    return str(request.param)


@pytest.fixture
def stores(store_name: str, tmp_path: Path) -> Iterator[EmptyStores]:
    """Empty stores of that kind."""
    with empty_stores(store_name, tmp_path) as given:
        yield given


@pytest.fixture
def store_url(request: pytest.FixtureRequest, stores: EmptyStores) -> str:
    """The URL of an empty store."""
    return stores.next(migrated=request.path.stem not in WITHOUT_SCHEMA)


@pytest.fixture
def opener(stores: EmptyStores) -> Opener:
    """Opens empty stores, as many as a test wants; the test closes each."""
    opened: list[str] = []

    async def open_next(clock: ManualClock) -> Store:
        # A test may want hundreds, one after the other.
        opened[:] = [url for url in opened if not stores.closed(url)]
        url = stores.next()
        store = await open_store(url, clock=clock)
        opened.append(url)
        return store

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
