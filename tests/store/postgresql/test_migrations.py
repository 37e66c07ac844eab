"""The schema: created, migrated by any role that may, shared by old and new code, and unchanged by roles that may
not."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote

import pytest

from fairlane.errors import SchemaMismatch, StoreError, StoreUnavailable
from fairlane.model.job import NewJob
from fairlane.store import open_store
from fairlane.store.postgresql import migrator
from fairlane.store.postgresql.address import driver, parse
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.migrator import migrate
from fairlane.store.postgresql.statements import Change, changes, placed, quoted
from tests.servers.installation import system, wheel
from tests.servers.postgresql import server

from ..postgresql_urls import as_role

pytestmark = pytest.mark.anyio
asyncpg = driver()
VERSIONS = [name for name, found in (("wheel", wheel()), ("system", system())) if found is not None] or ["any"]
NEWEST = changes("fairlane")[-1].number
OPEN = """
import asyncio, sys
from fairlane.store.postgresql.address import parse
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.migrator import migrate

async def main():
    database = Database(parse(sys.argv[1]))
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    sys.stdin.readline()
    sys.stdout.write(f"{await migrate(database)}\\n")
    await database.close()

asyncio.run(main())
"""
"""Migrates when it gets a line, and prints the version of the schema."""


@pytest.fixture
def url() -> Iterator[str]:
    """A database without a schema."""
    made = server().fresh_database(migrated=False)
    yield made
    server().done(made)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    opened = Database(parse(url))
    yield opened
    await opened.close()


@pytest.fixture
async def modest(url: str, database: Database) -> AsyncIterator[Database]:
    """The same database, for a role without any right."""
    name = f"modest_{database.address.dsn.partition('_test_')[2].partition('?')[0]}"
    await database.execute(f"CREATE ROLE {name} LOGIN")
    opened = Database(parse(as_role(url, name)))
    yield opened
    await opened.close()
    await database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def role_of(database: Database) -> str:
    return database.address.dsn.partition("//")[2].partition("@")[0]


async def recorded(database: Database) -> list[tuple[int, str, int]]:
    rows = await database.fetch("SELECT number, name, needs FROM fairlane.migration ORDER BY number")
    return [(row["number"], row["name"], row["needs"]) for row in rows]


async def names(database: Database, schema: str) -> set[str]:
    """The tables, views and functions of a schema."""
    rows = await database.fetch(
        "SELECT relname AS name FROM pg_class WHERE relnamespace = to_regnamespace($1) UNION "
        "SELECT proname FROM pg_proc WHERE pronamespace = to_regnamespace($1)",
        quoted(schema),
    )
    return {row["name"] for row in rows}


def started(url: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", OPEN, url], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


async def test_an_empty_database_gets_everything_once(database: Database) -> None:
    assert await migrate(database) == NEWEST
    assert await recorded(database) == [(c.number, c.name, c.needs) for c in changes("fairlane")]
    assert {"job", "active_job", "outcome", "migration"} <= await names(database, "fairlane")


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_version_of_the_server(version: str) -> None:
    made = server(version).fresh_database(migrated=False)
    database = Database(parse(made))
    assert [await migrate(database) for _ in range(2)] == [NEWEST, NEWEST]
    await database.close()
    server(version).done(made)


async def test_the_second_time_writes_nothing(database: Database) -> None:
    await migrate(database)
    when = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text AS xid"
    before = await database.fetchrow(when)
    assert await migrate(database) == NEWEST
    assert await database.fetchrow(when) == before


async def test_eight_processes_at_once(url: str, database: Database) -> None:
    processes = [await asyncio.to_thread(started, url) for _ in range(8)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("now\n")
        process.stdin.flush()
    said = [await asyncio.to_thread(process.communicate, timeout=60) for process in processes]

    assert said == [(f"{NEWEST}\n", "")] * 8
    assert len(await recorded(database)) == len(changes("fairlane"))


async def test_only_what_is_missing_is_applied(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    known = changes("fairlane")
    first = Change(NEWEST + 1, "first", "CREATE TABLE fairlane.first (); INSERT INTO fairlane.first DEFAULT VALUES", 1)
    second = Change(
        NEWEST + 2, "second", "CREATE TABLE fairlane.second (); INSERT INTO fairlane.first DEFAULT VALUES", 1
    )
    monkeypatch.setattr(migrator, "changes", lambda _: (*known, first))
    assert await migrate(database) == NEWEST + 1
    monkeypatch.setattr(migrator, "changes", lambda _: (*known, first, second))
    assert await migrate(database) == NEWEST + 2

    assert len(await database.fetch("SELECT FROM fairlane.first")) == 2
    assert (await recorded(database))[-2:] == [(NEWEST + 1, "first", 1), (NEWEST + 2, "second", 1)]


async def test_a_migration_that_fails_leaves_nothing_behind(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = changes("fairlane")
    bad = Change(NEWEST + 1, "bad", "CREATE TABLE fairlane.half (); SELECT 1 / 0", 2)
    monkeypatch.setattr(migrator, "changes", lambda _: (*known, bad))
    with pytest.raises(StoreError):
        await migrate(database)

    assert not await database.fetch("SELECT FROM pg_namespace WHERE nspname = 'fairlane'")


def test_migrations_create_no_function() -> None:
    for change in changes("fairlane"):
        assert not re.search(r"\bCREATE\b[^;]*\b(FUNCTION|PROCEDURE|TRIGGER)\b", change.script), change.name


# -- old and new code --------------------------------------------------------------------------------------------------


async def test_older_code_works_on_when_the_new_schema_allows_it(database: Database) -> None:
    await migrate(database)
    await database.execute("INSERT INTO fairlane.migration VALUES (9001, 'later', now(), $1)", NEWEST)

    assert await migrate(database) == 9001


async def test_older_code_is_refused_by_a_schema_it_cannot_use(database: Database) -> None:
    await migrate(database)
    await database.execute("INSERT INTO fairlane.migration VALUES (9001, 'later', now(), 9001)")
    # A later migration that needs less does not change that.
    await database.execute("INSERT INTO fairlane.migration VALUES (9002, 'last', now(), 1)")

    with pytest.raises(SchemaMismatch, match=r"9001.*Upgrade"):
        await migrate(database)


async def test_what_a_migration_needs_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from fairlane.store.postgresql import statements
    from fairlane.store.shared.queries import Migration

    def needs(script: str) -> int:
        return statements._change(Migration(7, "seventh", script), "x").needs

    assert needs("-- Words.\nSELECT 1;") == 7
    assert needs("-- Words.\n-- needs: 5\nSELECT 1;") == 5
    for wrong in ("-- needs: 8\n", "-- needs: 5\n-- needs: 6\n"):
        with pytest.raises(ValueError, match="migration 7"):
            needs(wrong)


# -- rights ------------------------------------------------------------------------------------------------------------


async def test_without_rights_an_up_to_date_schema_is_just_used(database: Database, modest: Database) -> None:
    await migrate(database)
    await database.execute(f"GRANT USAGE ON SCHEMA fairlane TO {role_of(modest)}")
    await database.execute(f"GRANT SELECT ON fairlane.migration TO {role_of(modest)}")

    assert await migrate(modest) == NEWEST


async def test_without_rights_an_older_schema_calls_for_its_owner(
    database: Database, modest: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(database)
    await database.execute(f"GRANT USAGE ON SCHEMA fairlane TO {role_of(modest)}")
    await database.execute(f"GRANT SELECT ON fairlane.migration TO {role_of(modest)}")
    newer = Change(9001, "later", "ALTER TABLE fairlane.job ADD COLUMN new text", 9001)
    monkeypatch.setattr(migrator, "changes", lambda schema: (*changes(schema), newer))

    with pytest.raises(SchemaMismatch, match="fairlane migrate"):
        await migrate(modest)


async def test_without_rights_an_empty_database_calls_for_its_owner(modest: Database) -> None:
    with pytest.raises(SchemaMismatch, match="fairlane migrate"):
        await migrate(modest)


async def test_without_any_grant_the_error_says_so(database: Database, modest: Database) -> None:
    await migrate(database)

    with pytest.raises(StoreError, match=r"permission denied for schema fairlane.*grant"):
        await migrate(modest)


async def test_an_owner_needs_no_right_on_the_database_once_the_schema_is_there(
    database: Database, modest: Database
) -> None:
    await database.execute(f"CREATE SCHEMA fairlane AUTHORIZATION {role_of(modest)}")

    assert await migrate(modest) == NEWEST


# -- surroundings ------------------------------------------------------------------------------------------------------


async def test_a_migration_waits_for_a_table_lock_and_then_reports_its_holder(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(database)
    newer = Change(9001, "later", "ALTER TABLE fairlane.job ADD COLUMN new text", 9001)
    monkeypatch.setattr(migrator, "changes", lambda schema: (*changes(schema), newer))
    monkeypatch.setattr(migrator, "LOCK_SECONDS", 0.2)
    async with database.transaction() as connection:
        await connection.fetch("SELECT * FROM fairlane.job")
        with pytest.raises(StoreUnavailable, match="a long transaction holds its tables"):
            await migrate(database)

        late = asyncio.create_task(migrate(database))
        await asyncio.sleep(0.3)
    assert await late == 9001


async def test_nothing_stays_set_on_the_connection(url: str) -> None:
    database = Database(parse(url + "?pool=1"))
    settings = "SELECT current_setting('lock_timeout') AS a, current_setting('statement_timeout') AS b"
    before = await database.fetchrow(settings)
    await migrate(database)

    assert await database.fetchrow(settings) == before
    assert not await database.fetch("SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
    await database.close()


@pytest.mark.parametrize("schema", ["Jobs", "select", "1st", "größe", "a-b.c", "任務", "x" * 63])
async def test_odd_names(url: str, schema: str) -> None:
    store = await open_store(f"{url}?schema={quote(schema)}")
    await store.enqueue([NewJob(id="a", task="task", lane="user:ann", sticky="key")])
    [job] = await store.get(["a"])
    await store.close()

    assert job is not None


async def test_schemas_of_one_database_know_nothing_of_each_other(url: str, database: Database) -> None:
    one, two = [await open_store(f"{url}?schema={schema}") for schema in ("one", "two")]
    await one.enqueue([NewJob(id="a", task="task")])

    assert await one.get(["a"]) != [None]
    assert await two.get(["a"]) == [None]
    assert await names(database, "one") == await names(database, "two")
    # No function of one schema refers to the other, or to the default schema.
    for schema, other in (("one", "two"), ("two", "one")):
        rows = await database.fetch(
            "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = to_regnamespace($1)", quoted(schema)
        )
        assert rows
        for row in rows:
            assert f'"{other}".' not in row["prosrc"], row["proname"]
            assert "fairlane." not in row["prosrc"], row["proname"]
    await one.close()
    await two.close()


async def test_a_foreign_table_under_our_name(database: Database) -> None:
    await database.execute("CREATE SCHEMA fairlane; CREATE TABLE fairlane.migration (version text)")

    with pytest.raises(SchemaMismatch):
        await migrate(database)


async def test_a_database_that_cannot_hold_every_text(url: str, database: Database) -> None:
    name = f"{url.rpartition('/')[2]}_ascii"
    await database.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'SQL_ASCII'")
    narrow = Database(parse(url.rpartition("/")[0] + "/" + name))
    with pytest.raises(StoreError, match="UTF8"):
        await migrate(narrow)
    await narrow.close()
    await database.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_a_server_that_is_too_old(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrator, "OLDEST_SERVER", 990_000)

    with pytest.raises(StoreError, match="Fairlane needs 99"):
        await migrate(database)


def test_the_statements_of_the_migrator_are_for_the_chosen_schema() -> None:
    for text in (migrator.APPLIED, migrator.RECORDED, migrator.FIRST):
        assert '"x".migration' in placed(text, "x")
