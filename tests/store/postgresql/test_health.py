"""Deadlocks that the server has counted are reported, and calls that collided are logged."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fairlane import Fairlane
from fairlane.events import Events
from fairlane.integrations.prometheus import Metrics
from fairlane.store.diagnosis import Finding, Level
from fairlane.store.postgresql.collisions import LOG_SECONDS, Collisions
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.store import PostgresqlStore
from tests.conformance.kit import Kit

pytestmark = pytest.mark.anyio

COLLIDING = """DO $$ BEGIN
    IF nextval('collisions') <= 2 THEN
        RAISE EXCEPTION USING ERRCODE = 'deadlock_detected';
    END IF;
END $$"""


async def _deadlock(database: Database) -> None:
    """Two transactions that take two locks in opposite orders."""
    together = asyncio.Barrier(2)

    async def lock(first: int, second: int) -> None:
        async with database.connection() as connection:
            try:
                async with connection.transaction():
                    await connection.execute("SET LOCAL deadlock_timeout = '20ms'")
                    await connection.execute("SELECT pg_advisory_xact_lock($1)", first)
                    await together.wait()
                    await connection.execute("SELECT pg_advisory_xact_lock($1)", second)
            finally:
                # Otherwise the server's counts appear a second later.
                await connection.execute("SELECT pg_stat_force_next_flush()")

    await asyncio.gather(lock(1, 2), lock(2, 1), return_exceptions=True)


async def _deadlocks_found(store: PostgresqlStore) -> Finding:
    [found] = [each for each in await store.findings() if each.topic == "deadlocks"]
    return found


async def test_deadlocks_of_the_database_are_a_finding_and_a_metric(kit: Kit, other: Any) -> None:
    store = kit.store
    assert isinstance(store, PostgresqlStore)
    await other.execute("SELECT pg_stat_reset()")
    assert (await _deadlocks_found(store)).level is Level.OK
    assert await store.counters() == {"deadlocks": 0}

    await _deadlock(store._database)

    found = await _deadlocks_found(store)
    assert found.level is Level.WARN
    assert "1 deadlock in this database since" in found.what
    counters = await store.counters()
    assert counters == {"deadlocks": 1}
    registry = CollectorRegistry()
    Metrics(Events(), registry, counters=lambda: counters)
    assert registry.get_sample_value("fairlane_server_incidents_total", {"what": "deadlocks"}) == 1
    # Another test may use this database.
    await other.execute("SELECT pg_stat_reset()")


async def test_an_application_reads_what_its_server_has_counted(store_url: str) -> None:
    app = Fairlane(store_url)
    async with app:
        counters = await app.client.counters()
    assert set(counters) <= {"deadlocks"}


async def test_calls_that_collide_are_repeated_and_logged(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(kit.store, PostgresqlStore)
    database = kit.store._database
    await database.execute("CREATE SEQUENCE collisions")

    with caplog.at_level(logging.WARNING, "fairlane.store"):
        await database.execute(COLLIDING)

    [told] = [record.getMessage() for record in caplog.records if "collided" in record.getMessage()]
    assert "1 call since the last such line collided and was repeated" in told
    assert "40P01" in told


async def test_collisions_are_logged_once_a_minute_with_their_number(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(kit.store, PostgresqlStore)
    moment = 0.0
    collisions = Collisions(kit.store._address, lambda: moment)
    with caplog.at_level(logging.WARNING, "fairlane.store"):
        for _ in range(4):
            collisions.add(Exception())
        moment = LOG_SECONDS
        collisions.add(Exception())

    first, second = [record.getMessage() for record in caplog.records]
    assert " 1 call since" in first
    assert " 4 calls since" in second
