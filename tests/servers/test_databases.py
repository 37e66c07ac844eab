"""Databases for tests: one that is used again does not differ from a new one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fairlane.model.settings import LaneRule
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from tests.conformance.kit import Kit

from . import databases, postgresql
from .databases import SEQUENCES, TABLES, Databases
from .stores import PostgresqlStores


@pytest.fixture
def made() -> Iterator[Databases]:
    """Databases of their own on the shared server."""
    own = Databases(lambda: postgresql.server().url)
    yield own
    own.close(drop=True)


def content(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """All that a database holds."""
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        read = "SELECT * FROM {} AS t ORDER BY t::text"
        held = {name: connection.execute(read.format(name)).fetchall() for (name,) in connection.execute(TABLES)}
        read = "SELECT last_value, is_called FROM {}"
        return held | {s: connection.execute(read.format(s)).fetchall() for (s,) in connection.execute(SEQUENCES)}


async def live(url: str) -> None:
    """Make many changes through a store, and leave a table behind as a failed test does."""
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    await kit.settings("default", LaneRule(pattern="one:*", limit=1))
    worker = await kit.worker()
    await kit.enqueue_all([kit.new(lane=f"one:{n}", unique=f"u{n}") for n in range(20)])
    await kit.enqueue(sticky="plan", delay=60.0)
    await worker.complete(*await worker.claim(5))
    await store.lead("leader", lease=10.0)
    await store.close()
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        connection.execute("CREATE TABLE left_behind (id serial PRIMARY KEY)")


@pytest.mark.parametrize("large", [1, 1_000_000_000], ids=["truncated", "deleted"])
async def test_a_database_that_is_used_again_is_as_new(
    made: Databases, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "LARGE", large)
    url, new = made.fresh(), content(made.fresh())
    await live(url)
    changed = [name for name, rows in content(url).items() if rows != new.get(name)]
    assert len(changed) > 10
    made.done(url)
    assert made.fresh() == url
    assert content(url) == new
    await live(url)


async def test_open_connections_to_a_database_are_ended_when_it_is_reused(made: Databases) -> None:
    url = made.fresh()
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as late:
        made.done(url)
        late.execute("SELECT 1")
        assert made.fresh() == url
        with pytest.raises(psycopg.OperationalError):
            late.execute("SELECT 1")


async def test_a_database_without_a_schema_is_never_one_that_was_used(made: Databases) -> None:
    bare = made.fresh(migrated=False)
    assert content(bare) == {}
    made.done(bare)
    made.done(made.fresh())
    assert made.fresh(migrated=False) != bare
    assert bare not in {made.fresh() for _ in range(2)}


async def test_a_store_is_taken_back_when_it_is_closed() -> None:
    stores = PostgresqlStores(postgresql.server())
    url = stores.next()
    store = await open_store(url)
    await store.queues()
    assert not stores.closed(url)
    await store.close()
    while not stores.closed(url):
        pass  # the server notices a little later
    assert stores.next() == url
    stores.close()
