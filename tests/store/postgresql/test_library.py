"""The function library: installed beside those of other versions, and removed when no process uses it any more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from fairlane.errors import SchemaMismatch
from fairlane.model.job import NewJob
from fairlane.store.postgresql import library, statements
from fairlane.store.postgresql.address import parse
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.migrator import migrate
from fairlane.store.postgresql.statements import changes, grants, placed
from fairlane.store.postgresql.store import PostgresqlStore
from tests.servers.postgresql import server

from ..postgresql_urls import as_role

pytestmark = pytest.mark.anyio
OLD, NEW, NEWER = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"
Switch = Callable[[str], None]


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
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """From then on the code is of another version, for stores opened and functions first called after that."""

    def forget() -> None:
        statements.queries.cache_clear()
        statements.library_scripts.cache_clear()

    def switch(version: str) -> None:
        monkeypatch.setattr(library, "version", lambda: version)
        forget()

    yield switch
    forget()


async def installed(database: Database) -> set[str]:
    """The versions whose functions are in the schema, which all have the same functions."""
    rows = await database.fetch("SELECT proname FROM pg_proc WHERE pronamespace = 'fairlane'::regnamespace")
    versions: dict[str, set[str]] = {}
    for row in rows:
        name, _, version = row["proname"].rpartition("_")
        versions.setdefault(version, set()).add(name)
    assert all(names == library.names() for names in versions.values())
    recorded = await database.fetch("SELECT version FROM fairlane.library")
    assert {row["version"] for row in recorded} == versions.keys()
    return set(versions)


async def age(database: Database, version: str, days: int = library.UNUSED_DAYS + 1) -> None:
    await database.execute(
        "UPDATE fairlane.library SET used_at = now() - make_interval(days => $2) WHERE version = $1", version, days
    )


async def test_two_versions_run_side_by_side(url: str, database: Database, switch: Switch) -> None:
    switch(OLD)
    old = await PostgresqlStore.open(url)
    await old.enqueue([NewJob(id="a", task="task")])
    switch(NEW)
    new = await PostgresqlStore.open(url)
    await new.enqueue([NewJob(id="b", task="task")])
    assert await new.get(["a", "b"]) == await new.get(["a", "b"])
    assert None not in await new.get(["a", "b"])

    switch(OLD)
    await old.enqueue([NewJob(id="c", task="task"), NewJob(id="d", task="task", unique="x")])
    assert None not in await old.get(["a", "b", "c", "d"])
    assert await installed(database) == {OLD, NEW}
    await old.close()
    await new.close()


async def test_a_library_that_was_not_used_for_long_is_removed_by_the_next(database: Database, switch: Switch) -> None:
    for version in (OLD, NEW):
        switch(version)
        await migrate(database)
    assert await installed(database) == {OLD, NEW}
    await age(database, OLD)
    await age(database, NEW, library.UNUSED_DAYS - 1)
    switch(NEWER)
    await migrate(database)

    assert await installed(database) == {NEW, NEWER}
    # Nothing depends on what was removed: the tables and views work, and so does the other library.
    assert await database.fetch("SELECT * FROM fairlane.jobs, fairlane.sessions, fairlane.domains") == []


async def test_a_library_in_use_stays(url: str, database: Database, switch: Switch) -> None:
    switch(OLD)
    old = await PostgresqlStore.open(url)
    await old.enqueue([NewJob(id="a", task="task")])
    await age(database, OLD)
    # Renewed once a day by whatever the process calls next.
    old._database._next_use = 0.0
    await old.enqueue([NewJob(id="b", task="task")])
    switch(NEW)
    await migrate(database)
    assert await installed(database) == {OLD, NEW}

    switch(OLD)
    assert None not in await old.get(["a", "b"])
    await old.close()


async def test_a_library_that_only_transactions_of_users_use_stays(
    url: str, database: Database, switch: Switch
) -> None:
    switch(OLD)
    old = await PostgresqlStore.open(url)
    jobs = [NewJob(id="a", task="task")]
    await old.transactions.prepare(jobs)
    await age(database, OLD)
    old._database._next_use = 0.0
    await old.transactions.prepare(jobs)
    switch(NEW)
    await migrate(database)

    assert await installed(database) == {OLD, NEW}
    await old.close()


async def test_a_process_that_was_idle_for_very_long_installs_its_library_again(
    url: str, database: Database, switch: Switch
) -> None:
    switch(OLD)
    old = await PostgresqlStore.open(url)
    await old.enqueue([NewJob(id="a", task="task")])
    await age(database, OLD)
    switch(NEW)
    await migrate(database)
    assert await installed(database) == {NEW}
    switch(OLD)
    await old.enqueue([NewJob(id="b", task="task")])

    assert None not in await old.get(["a", "b"])
    assert await installed(database) == {OLD, NEW}
    await old.close()


async def test_a_missing_function_that_is_not_of_the_library_is_an_error(url: str) -> None:
    store = await PostgresqlStore.open(url)
    with pytest.raises(SchemaMismatch, match="no_such_function"):
        await store._database.fetchrow("SELECT no_such_function()")
    await store.close()


async def test_opening_renews_the_use_and_writes_nothing_within_the_hour(url: str, database: Database) -> None:
    used = "SELECT used_at FROM fairlane.library"
    for _ in range(2):
        store = await PostgresqlStore.open(url)
        await store.get(["a"])
        await store.close()
    first = await database.fetchrow(used)
    await age(database, library.version(), 1)
    store = await PostgresqlStore.open(url)
    await store.get(["a"])
    await store.close()
    second = await database.fetchrow(used)

    assert first is not None
    assert second is not None
    assert second["used_at"] > first["used_at"]


async def test_a_library_that_was_removed_is_installed_again_when_it_is_opened(
    database: Database, switch: Switch
) -> None:
    switch(OLD)
    await migrate(database)
    await age(database, OLD)
    switch(NEW)
    await migrate(database)
    assert await installed(database) == {NEW}
    switch(OLD)
    await migrate(database)
    assert await installed(database) == {OLD, NEW}


@pytest.mark.parametrize("kind", ["producer", "viewer", "worker"])
async def test_grants_pass_on_to_the_next_library(url: str, database: Database, switch: Switch, kind: str) -> None:
    role = f"{kind}_{url.partition('_test_')[2]}"
    await database.execute(f"CREATE ROLE {role} LOGIN; CREATE ROLE {role}_stranger")
    try:
        switch(OLD)
        await migrate(database)
        await database.execute(grants(kind, role))
        await database.execute(grants("viewer", f"{role}_stranger"))
        await database.execute(placed(f"REVOKE ALL ON FUNCTION fairlane.read_seconds FROM {role}", "fairlane"))
        may = "SELECT proname, has_function_privilege($1, oid, 'EXECUTE') AS may FROM pg_proc WHERE prosecdef"
        before = {row["proname"][:-12]: row["may"] for row in await database.fetch(may, role)}
        switch(NEW)
        await migrate(database)
        rows = [row for row in await database.fetch(may, role) if row["proname"].endswith(NEW)]
        after = {row["proname"][:-12]: row["may"] for row in rows}
        await database.execute(grants("viewer", role))
        store = await PostgresqlStore.open(as_role(url, role))
        assert await store.get(["a"]) == [None]
        await store.close()
    finally:
        for name in (role, f"{role}_stranger"):
            await database.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")

    if kind != "worker":  # whose rights are the default for new functions
        assert before == after
    assert after["read_jobs_"]
    assert after["use_library_"]


def test_the_version_follows_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    version = library.version.__wrapped__
    first = version()
    assert first == version() == library.version()
    monkeypatch.setattr(library, "SETTINGS", {**library.SETTINGS, "jit": "on"})
    second = version()
    monkeypatch.setattr(library, "text", lambda: "CREATE FUNCTION fairlane.other")
    assert len({first, second, version()}) == 3


def test_functions_and_tables_have_different_names() -> None:
    tables = {
        word
        for change in changes("x")
        for line in change.script.splitlines()
        if line.startswith("CREATE")
        for word in [line.partition('"x".')[2].split(" ")[0].strip("(")]
    }
    assert {"job", "outcome", "library", "jobs", "moment"} <= tables
    assert not tables & library.names()


def test_what_is_listed_exists() -> None:
    assert {*library.ENTRY_POINTS, *library.OWNER_RIGHTS, library.INSTALLED} <= library.names()


async def test_every_function_is_valid(database: Database) -> None:
    await migrate(database)
    text = placed(library.text(), "fairlane").replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
    await database.execute(f"SET LOCAL check_function_bodies = on; {text}")
