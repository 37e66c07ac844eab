"""Array types: what one connection reads about PostgreSQL's own types is not queried again on the next one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fairlane.store.postgresql import array_types
from fairlane.store.postgresql.address import parse
from fairlane.store.postgresql.database import Database
from tests.servers.postgresql import server

pytestmark = pytest.mark.anyio

VALUES = "SELECT $1::int4[] AS integers, $2::float8[] AS floats"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """As in a process that has not connected yet."""
    types: dict[int, Any] = {}
    monkeypatch.setattr(array_types, "_known", types)
    return types


@pytest.fixture(params=["", "listen=off"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database, and the same as it is used behind PgBouncer, where statements have no names."""
    made = server().fresh_database(migrated=False)
    yield f"{made}?{request.param}"
    server().done(made)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    """The way to it."""
    opened = Database(parse(url))
    yield opened
    await opened.close()


async def sent_by_a_new_connection(database: Database, sql: str, *args: object) -> tuple[list[str], Any]:
    """What the driver sends for a statement on a connection of its own, and the row that it returns."""
    sent: list[str] = []
    async with database.connection() as connection:
        any_connection: Any = connection
        any_connection.add_query_logger(lambda logged: sent.append(logged.query))
        row = await connection.fetchrow(sql, *args)
        await any_connection.close()
    return sent, row


async def test_a_type_of_postgresql_is_asked_about_once_for_a_process(database: Database) -> None:
    first, row = await sent_by_a_new_connection(database, VALUES, [1, 2], [0.5])
    second, again = await sent_by_a_new_connection(database, VALUES, [3], [1.5, None])

    assert any("pg_type" in query for query in first)
    assert second == [VALUES]
    assert tuple(row) == ([1, 2], [0.5])
    assert tuple(again) == ([3], [1.5, None])


async def test_a_statement_with_one_more_type_asks_about_that_one(database: Database, known: dict[int, Any]) -> None:
    await sent_by_a_new_connection(database, "SELECT $1::int4[]", [1])
    assert len(known) == 1

    sent, row = await sent_by_a_new_connection(database, VALUES, [1], [2.0])
    assert any("pg_type" in query for query in sent)
    assert tuple(row) == ([1], [2.0])
    assert len(known) == 2


async def test_a_type_of_the_user_is_asked_about_each_time(database: Database, known: dict[int, Any]) -> None:
    # Its OID means another type in another database.
    await database.execute("CREATE TYPE mood AS ENUM ('fine', 'tired')")
    moods = "SELECT $1::mood[] AS moods"
    for _ in range(2):
        sent, row = await sent_by_a_new_connection(database, moods, ["fine"])
        assert any("pg_type" in query for query in sent)
        assert row["moods"] == ["fine"]
    assert not known
