"""Calls to the database: what errors mean, what is repeated, and what a block promises."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fairlane.errors import (
    Busy,
    Conflict,
    FairlaneError,
    IndexTaken,
    InvalidInput,
    NotFound,
    QueueFull,
    SchemaMismatch,
    SessionLost,
    Stale,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TermLost,
)
from fairlane.store.postgresql import database as module
from fairlane.store.postgresql.address import driver, parse
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.driver_errors import FullQueue, translate
from tests.servers.postgresql import server

from ..postgresql_urls import as_role

pytestmark = pytest.mark.anyio
asyncpg = driver()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A database that the tests of this module share; they need no schema in it."""
    made = server().fresh_database(migrated=False)
    yield made
    server().done(made)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    opened = Database(parse(url))
    yield opened
    await opened.close()


def raising(code: str, message: str = "so it is", detail: str = "") -> str:
    """A statement that fails as the functions of the schema do."""
    using = f"ERRCODE = '{code}', MESSAGE = '{message}'" + (f", DETAIL = '{detail}'" if detail else "")
    return f"DO $$ BEGIN RAISE EXCEPTION USING {using}; END $$"


async def failure(database: Database, sql: str, *args: object) -> FairlaneError:
    with pytest.raises(FairlaneError) as caught:
        await database.execute(sql, *args)
    return caught.value


# -- what errors mean -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("FL001", NotFound),
        ("FL002", Conflict),
        ("FL003", QueueFull),
        ("FL004", IndexTaken),
        ("FL005", Stale),
        ("FL006", SessionLost),
        ("FL007", TermLost),
        ("FL009", Busy),
    ],
)
async def test_what_a_function_raises_is_our_error_with_its_words(
    database: Database, code: str, kind: type[FairlaneError]
) -> None:
    error = await failure(database, raising(code, "job a is not there"))

    assert isinstance(error, kind)
    assert str(error) == "job a is not there"
    assert error.__cause__ is None, "the driver's error would only repeat it"


async def test_details_of_what_a_function_raises(database: Database) -> None:
    full = await failure(database, raising("FL003", detail='{"queue": 7, "class": 1}'))
    taken = await failure(database, raising("FL004", detail="7.25"))
    refused = await failure(database, raising("FL008", "is closed", detail="lane"))

    assert isinstance(full, FullQueue)
    assert isinstance(taken, IndexTaken)
    assert isinstance(refused, InvalidInput)
    assert full.where == {"queue": 7, "class": 1}
    assert taken.retry_after == 7.25
    assert (refused.field, refused.problem) == ("lane", "is closed")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("53100", StoreFull),
        ("25006", StoreReadOnly),
        ("55P03", Busy),
        ("42P01", SchemaMismatch),
        *(
            (code, StoreUnavailable)
            for code in ("57P01", "57P02", "57P03", "57014", "08006", "53200", "53300", "58030")
        ),
        *((code, StoreUnavailable) for code in ("25P03", "40003")),
        *((code, StoreError) for code in ("XX000", "23505", "P0001", "0A000")),
    ],
)
async def test_what_the_server_reports(database: Database, code: str, kind: type[FairlaneError]) -> None:
    error = await failure(database, raising(code))

    assert type(error) is kind
    assert "so it is" in str(error)


async def test_a_pooler_in_between_is_recognised(database: Database) -> None:
    for code in ("26000", "42P05"):
        error = await failure(database, raising(code))
        assert type(error) is StoreError
        assert "listen=off" in str(error)


async def test_what_is_missing_calls_for_a_migration(database: Database) -> None:
    for sql in ("SELECT * FROM nowhere.job", "SELECT nothing()", "SELECT * FROM nothing"):
        error = await failure(database, sql)
        assert type(error) is SchemaMismatch
        assert "fairlane migrate" in str(error)


async def test_a_right_that_is_missing_is_named(database: Database, url: str) -> None:
    await database.execute("DROP ROLE IF EXISTS nobody_special; CREATE ROLE nobody_special LOGIN")
    await database.execute("DROP TABLE IF EXISTS private; CREATE TABLE private ()")
    try:
        other = Database(parse(as_role(url, "nobody_special")))
        error = await failure(other, "SELECT * FROM private")
        await other.close()
    finally:
        await database.execute("DROP ROLE nobody_special; DROP TABLE private")

    assert type(error) is StoreError
    assert "permission denied for table private" in str(error)
    assert "grant" in str(error)


async def test_a_server_that_may_not_be_written(url: str) -> None:
    database = Database(parse(url + "?default_transaction_read_only=on"))
    error = await failure(database, "CREATE TABLE never ()")
    await database.close()

    assert type(error) is StoreReadOnly
    assert "default_transaction_read_only" in str(error)


async def test_a_standby_is_not_there_just_now_and_is_left(database: Database) -> None:
    class Standby:
        in_hot_standby = "on"

        def is_closed(self) -> bool:
            return False

        def get_settings(self) -> Standby:
            return self

    error = translate(asyncpg.ReadOnlySQLTransactionError("cannot execute INSERT"), database.address, Standby())

    assert type(error) is StoreUnavailable
    assert "standby" in str(error)


async def test_rows_and_arguments_are_never_shown(database: Database) -> None:
    await database.execute(
        "DROP TABLE IF EXISTS secrets; CREATE TABLE secrets (word text CHECK (length(word) < 3) UNIQUE)"
    )
    told = [
        await failure(database, "INSERT INTO secrets VALUES ('hush')"),
        await failure(database, "SELECT $1::int", "hush"),
        await failure(database, "SELECT $1::text::int", "hush"),
        await failure(database, "SELECT $1::text", "hush\0"),
        await failure(database, "SELECT $1::text", "hush\ud800"),
    ]

    for error in told:
        assert type(error) is StoreError
        assert "hush" not in "".join(traceback.format_exception(error)).replace('"hush', "")
    assert "$1" in str(told[1])


# -- what is repeated -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["40001", "40P01"])
async def test_a_collision_is_repeated_without_an_error(database: Database, code: str) -> None:
    await database.execute("CREATE SEQUENCE tries")
    collide = f"IF nextval('tries') < 4 THEN RAISE EXCEPTION USING ERRCODE = '{code}'; END IF"
    try:
        await database.execute(f"DO $$ BEGIN {collide}; END $$")
        row = await database.fetchrow("SELECT last_value FROM tries")
        assert row is not None
        assert row["last_value"] == 4
    finally:
        await database.execute("DROP SEQUENCE tries")


async def test_endless_collisions_raise_an_error(database: Database) -> None:
    await database.execute("CREATE SEQUENCE tries")
    try:
        error = await failure(
            database, "DO $$ BEGIN PERFORM nextval('tries'); RAISE EXCEPTION USING ERRCODE = '40001'; END $$"
        )
        row = await database.fetchrow("SELECT last_value FROM tries")
    finally:
        await database.execute("DROP SEQUENCE tries")

    assert type(error) is StoreUnavailable
    assert row is not None
    assert row["last_value"] == module.REPEATS + 1


async def test_two_calls_that_lock_each_other_out_both_succeed(database: Database) -> None:
    def locks(first: int, second: int) -> str:
        lock = "PERFORM pg_advisory_xact_lock({})"
        both = f"{lock.format(first)}; PERFORM pg_sleep(0.1); {lock.format(second)}"
        return f"DO $$ BEGIN SET LOCAL deadlock_timeout = '20ms'; {both}; END $$"

    await asyncio.gather(database.execute(locks(1, 2)), database.execute(locks(2, 1)))


async def test_other_errors_are_not_repeated(database: Database) -> None:
    await database.execute("CREATE SEQUENCE tries")
    try:
        await failure(database, "DO $$ BEGIN PERFORM nextval('tries'); RAISE EXCEPTION USING ERRCODE = '57014'; END $$")
        row = await database.fetchrow("SELECT last_value FROM tries")
    finally:
        await database.execute("DROP SEQUENCE tries")

    assert row is not None
    assert row["last_value"] == 1


# -- blocks -----------------------------------------------------------------------------------------------------------


async def test_a_transaction_commits_with_its_block_or_not_at_all(database: Database) -> None:
    await database.execute("CREATE TABLE IF NOT EXISTS kept (number int); TRUNCATE kept")

    async def keep(number: int, then: str = "SELECT 1", error: Exception | None = None) -> None:
        async with database.transaction() as connection:
            await connection.execute(f"INSERT INTO kept VALUES ({number})")
            await connection.execute(then)
            if error is not None:
                raise error

    await keep(1)
    for own in (KeyError("the block's own"), FileNotFoundError("the block's own too")):
        with pytest.raises(type(own)):
            await keep(2, error=own)
    with pytest.raises(NotFound):
        await keep(3, raising("FL001"))

    assert [row["number"] for row in await database.fetch("SELECT number FROM kept")] == [1]


async def test_a_snapshot_sees_one_moment_and_cannot_write(database: Database) -> None:
    await database.execute("CREATE TABLE IF NOT EXISTS seen (number int); TRUNCATE seen")
    async with database.snapshot() as view:
        before = await view.fetch("SELECT * FROM seen")
        await database.execute("INSERT INTO seen VALUES (1)")
        after = await view.fetch("SELECT * FROM seen")
    with pytest.raises(StoreReadOnly):
        async with database.snapshot() as view:
            await view.execute("INSERT INTO seen VALUES (2)")

    assert before == after == []
    assert len(await database.fetch("SELECT * FROM seen")) == 1


async def test_a_bare_connection_leaves_the_errors_of_its_block_alone(database: Database) -> None:
    with pytest.raises(asyncpg.UndefinedTableError):
        async with database.connection() as connection:
            await connection.fetch("SELECT * FROM nothing")


async def test_a_transaction_left_open_is_not_handed_to_the_next(url: str) -> None:
    database = Database(parse(url + "?pool=1"))
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    try:
        async with database.connection() as connection:
            await connection.execute("BEGIN; CREATE TABLE halfway ()")
        error = await failure(database, "SELECT * FROM halfway")
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
        await database.close()

    assert type(error) is SchemaMismatch
    assert "active transaction" in told[0]["message"]
