"""A PostgreSQL store by the server's own clock and another client on its database; a Redis store whose lanes settle
job by job; and, for the tests of wake-ups, the servers that carry them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fairlane.store.clock import ManualClock
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.store import PostgresqlStore
from fairlane.store.redis.store import RedisStore
from tests.conformance.kit import Kit
from tests.servers import valkey
from tests.servers.postgresql import server

from .carriers import SERVERS, Carrier, Open, carried_by, opening, shared_server
from .notices import Tap
from .settling import Settling


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    """A store that uses the server's own clock."""
    url = server().fresh_database()
    store = await PostgresqlStore.open(url)
    yield Kit(store, ManualClock())
    await store.close()
    server().done(url)


@pytest.fixture
async def other(kit: Kit) -> AsyncIterator[Any]:
    """A connection of another program."""
    assert isinstance(kit.store, PostgresqlStore)
    connection = await driver().connect(kit.store._address.dsn)
    yield connection
    await connection.close()


@pytest.fixture
async def settling(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Settling]:
    """A Redis store in which the jobs of a lane whose limit changes are changed one by one."""
    clock = ManualClock()
    store = await RedisStore.open(valkey.server().fresh_namespace(), clock=clock)
    yield Settling(store, Kit(store, clock), monkeypatch)
    await store.close()


@pytest.fixture(params=SERVERS)
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    """A schema or a namespace of its own, on every server that carries wake-ups unless the test says on which."""
    with carried_by(shared_server(str(request.param))) as made:
        yield made


@pytest.fixture
def opened(carrier: Carrier) -> Iterator[Open]:
    """Opens wake-ups there. Two of them stand for two processes."""
    with opening(carrier) as open_one:
        yield open_one


@pytest.fixture
async def tap(carrier: Carrier) -> AsyncIterator[Tap]:
    """Records the messages that are sent there."""
    async with carrier.tapping() as tapped:
        yield tapped
