"""Connections of users on which no job can be stored, and the errors that are raised."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from fairlane import Fairlane, InvalidInput, NewJob, Settings, StoreError
from fairlane.model.job import JobKind
from fairlane.task import Task
from tests.servers.postgresql import server
from tests.servers.template import SUPERUSER
from tests.worker.yard import QUICK

from ..own_connections import (
    Asyncpg,
    Django,
    Own,
    Psycopg,
    SqlalchemyAsyncSession,
    SqlalchemySession,
    asyncpg,
    connected,
    opened,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def url() -> Iterator[str]:
    """A database with a schema and a table of the user's."""
    databases = server()
    fresh = databases.fresh_database()
    yield fresh
    databases.done(fresh)


@pytest.fixture
async def app(url: str) -> AsyncIterator[Fairlane]:
    """An application, and a table of the user's beside it."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    async with app, connected(url) as connection:
        await connection.execute("CREATE TABLE orders (id text)")
        yield app
        await connection.execute("DROP TABLE orders")


@pytest.fixture
def double(app: Fairlane) -> Task[[int], int]:
    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    return double


@pytest.mark.parametrize(
    "connection",
    [object(), None, "postgresql://", sqlite3.connect(":memory:"), Fairlane],
    ids=["object", "none", "text", "sqlite", "class"],
)
async def test_an_object_that_is_no_connection_raises_an_error_that_lists_the_drivers(
    app: Fairlane, double: Task[[int], int], connection: object
) -> None:
    for call in (app.enqueue_on, lambda *given: asyncio.to_thread(app.blocking.enqueue_on, *given)):
        with pytest.raises(InvalidInput, match=r"asyncpg.*psycopg.*SQLAlchemy.*psycopg.*SQLAlchemy.*Django") as refusal:
            await call(connection, double.call(1))
        assert refusal.value.field == "connection"


@pytest.mark.parametrize("kind", [Asyncpg, Psycopg, SqlalchemyAsyncSession, Django])
async def test_a_connection_to_another_database_is_refused(
    app: Fairlane, double: Task[[int], int], kind: Callable[[], Own]
) -> None:
    databases = server()
    elsewhere = databases.fresh_database()
    async with opened(kind, elsewhere) as own:
        with pytest.raises(InvalidInput, match=r"another database|leads to the database"):
            await own.enqueue(app, double.call(1))
        await own.rollback()
    databases.done(elsewhere)
    empty = databases.fresh_database(migrated=False)
    async with opened(kind, empty) as own:
        with pytest.raises(InvalidInput, match="store's own database") as refusal:
            await own.enqueue(app, double.call(1))
        assert refusal.value.field == "connection"
        await own.rollback()
    databases.done(empty)


@pytest.mark.parametrize("kind", [Asyncpg, SqlalchemySession, Django])
async def test_a_role_without_permission_gets_an_error_that_names_the_grant(
    app: Fairlane, double: Task[[int], int], url: str, kind: Callable[[], Own]
) -> None:
    async with connected(url) as connection:
        await connection.execute("DROP ROLE IF EXISTS stranger")
        await connection.execute("CREATE ROLE stranger LOGIN")
    async with opened(kind, url.replace(f"://{SUPERUSER}@", "://stranger@")) as own:
        with pytest.raises(StoreError, match=r"docs/postgresql\.md"):
            await own.enqueue(app, double.call(1))
        await own.rollback()
    async with connected(url) as connection:
        await connection.execute("DROP ROLE stranger")


async def test_errors_of_the_users_own_stay_as_they_are(app: Fairlane, double: Task[[int], int], url: str) -> None:
    async with opened(Asyncpg, url) as own:
        with pytest.raises(asyncpg.PostgresSyntaxError):
            await own.execute("SELEC 1")
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await own.enqueue(app, double.call(1))
        await own.rollback()


async def test_only_plain_jobs_can_be_stored(app: Fairlane, url: str) -> None:
    store: Any = await app.connection.store()
    with pytest.raises(InvalidInput, match="plain jobs"):
        await store.inner.transactions.prepare([NewJob(id="a", task="t", kind=JobKind.BROADCAST)])
