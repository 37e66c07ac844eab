"""A PostgreSQL store by the server's own clock, and somebody else on the same database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fairlane.backends.postgresql.address import driver
from fairlane.backends.postgresql.store import PostgresqlStore
from fairlane.clock import ManualClock
from tests.conformance.kit import Kit
from tests.servers.postgresql import server


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    """A store by the server's own clock."""
    url = server().fresh_database()
    store = await PostgresqlStore.open(url)
    yield Kit(store, ManualClock())
    await store.close()
    server().done(url)


@pytest.fixture
async def other(kit: Kit) -> AsyncIterator[Any]:
    """A connection of somebody else."""
    assert isinstance(kit.store, PostgresqlStore)
    connection = await driver().connect(kit.store._address.dsn)
    yield connection
    await connection.close()
