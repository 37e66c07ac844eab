"""Databases on the shared server, with tokens on a Redis that is shared or the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.servers import postgresql, valkey
from tests.servers.valkey import ValkeyServer

from .bench import Bench, bench_at


@pytest.fixture
def database() -> Iterator[str]:
    """The URL of an empty database."""
    url = postgresql.server().fresh_database()
    yield url
    postgresql.server().done(url)


@pytest.fixture
async def bench(database: str) -> AsyncIterator[Bench]:
    """A store whose Redis answers all the time. Its keys are its own, the server is not."""
    async with bench_at(database, valkey.server()) as made:
        yield made


@pytest.fixture
def own_redis() -> Iterator[ValkeyServer]:
    """A Redis that the test may kill, freeze and flush."""
    with valkey.own_server() as server:
        yield server


@pytest.fixture
async def fragile(database: str, own_redis: ValkeyServer) -> AsyncIterator[Bench]:
    """A store with such a Redis."""
    async with bench_at(database, own_redis) as made:
        yield made
