"""Brings the schema up to date, in one transaction that only one process at a time can be in.

The table `migration` lists the applied migrations. Each `needs` a migration, often an older one: code that knows that
one can work with the schema from then on. So processes with older code continue after newer ones have migrated, unless
a migration needs newer code. The functions are installed beside those of other versions (`library`). A role without the
right to change the schema can use it if it is new enough and has the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from ...errors import Busy, SchemaMismatch, StoreError, StoreMissing, StoreUnavailable
from . import library
from .database import Connection, Database, Record
from .driver_errors import asyncpg, fail
from .statements import Change, changes, library_scripts, placed, quoted

OLDEST_SERVER = 150_000
LOCK_SECONDS = 10
"""How long to wait for a table that a long transaction has locked. Short, because all later calls wait meanwhile."""
ATTEMPTS = 3
SCRIPT_SECONDS = 3_600.0

LOOK = """
SELECT current_setting('server_version_num')::int AS version, current_setting('server_encoding') AS encoding,
    EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1) AS made,
    EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = $1 AND c.relname = 'migration') AS known,
    EXISTS (SELECT FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
            WHERE n.nspname = $1 AND p.proname = $2) AS installed
"""
APPLIED = "SELECT number, needs FROM fairlane.migration ORDER BY number"
RECORDED = "INSERT INTO fairlane.migration (number, name, needs) VALUES ($1, $2, $3)"
FIRST = """
CREATE TABLE fairlane.migration (
    number     integer PRIMARY KEY,
    name       text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    needs      integer NOT NULL  -- the migration that code must know at least
)
"""


async def migrate(database: Database, *, create: bool = True) -> int:
    """Apply missing migrations, install the library, and return the number of the last migration. May be repeated.

    With `create` False a schema that does not exist is not created, and `StoreMissing` is raised.
    """
    for attempt in range(ATTEMPTS):
        missing, last = await _missing(database)
        if not missing:
            _keep_library(database)
            return last
        if not last and not create:
            raise StoreMissing(f"there is no schema {database.address.schema} of Fairlane in {database.address}")
        try:
            await _apply(database)
        except Busy as exc:
            if attempt == ATTEMPTS - 1:
                raise StoreUnavailable(
                    f"{database.address} cannot be migrated: a long transaction holds its tables. End it and try again."
                ) from exc
    last = (await _missing(database))[1]
    _keep_library(database)
    return last


def _keep_library(database: Database) -> None:
    use = placed(library.USE, database.address.schema)
    install = partial(migrate, database, create=False)
    database.keep_library(library.LibraryUse(use, library.RENEWAL_SECONDS, install))


async def _missing(database: Database) -> tuple[bool, int]:
    """Whether anything is missing, and the last applied migration. Rejects a server or schema that cannot be used."""
    schema = database.address.schema
    look = await database.fetchrow(LOOK, schema, library.versioned(library.INSTALLED))
    assert look is not None
    _check_server(look, database)
    applied = await database.fetch(placed(APPLIED, schema)) if look["known"] else []
    missing, last = _compare(applied, changes(schema), database)
    return bool(missing) or not look["installed"], last


def _check_server(look: Record, database: Database) -> None:
    if look["version"] < OLDEST_SERVER:
        raise StoreError(
            f"{database.address} is PostgreSQL {look['version'] // 10_000}; Fairlane needs {OLDEST_SERVER // 10_000}"
        )
    if look["encoding"] != "UTF8":
        raise StoreError(
            f"{database.address} is encoded in {look['encoding']}, which cannot hold every text. "
            "Make the database with ENCODING 'UTF8'."
        )


def _compare(applied: Sequence[Record], known: Sequence[Change], database: Database) -> tuple[list[Change], int]:
    newest = known[-1].number
    needs = max((row["needs"] for row in applied), default=0)
    if needs > newest:
        raise SchemaMismatch(
            f"the schema {database.address.schema} in {database.address} needs a Fairlane that knows migration "
            f"{needs}, and this one knows {newest}. Upgrade Fairlane in this process."
        )
    numbers = {row["number"] for row in applied}
    return [change for change in known if change.number not in numbers], max(numbers, default=0)


async def _apply(database: Database) -> None:
    schema = database.address.schema
    known = changes(schema)
    try:
        async with database.connection() as connection, connection.transaction(isolation="read_committed"):
            # Both for this transaction only: the connection is used by other calls afterwards.
            await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'; SET LOCAL statement_timeout = 0")
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _lock(schema), timeout=LOCK_SECONDS + 5)
            applied, installed = await _made(connection, schema)
            for change in _compare(applied, known, database)[0]:
                await connection.execute(change.script, timeout=SCRIPT_SECONDS)
                await connection.execute(placed(RECORDED, schema), change.number, change.name, change.needs)
            if not installed:
                for script in library_scripts(schema):
                    await connection.execute(script, timeout=SCRIPT_SECONDS)
    except asyncpg.InsufficientPrivilegeError as exc:
        raise SchemaMismatch(
            f"the schema {schema} in {database.address} is older than this Fairlane, and this user may not change it "
            f"({exc.args[0]}). Run `fairlane migrate` as its owner."
        ) from exc
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as exc:
        fail(exc, database.address)


async def _made(connection: Connection, schema: str) -> tuple[list[Record], bool]:
    """The applied migrations, and whether the library is installed, read under the lock. Creates a missing schema."""
    look = await connection.fetchrow(LOOK, schema, library.versioned(library.INSTALLED))
    assert look is not None
    if not look["made"]:
        await connection.execute(f"CREATE SCHEMA {quoted(schema)}")
    if not look["known"]:
        await connection.execute(placed(FIRST, schema))
        return [], False
    return await connection.fetch(placed(APPLIED, schema)), look["installed"]


def _lock(schema: str) -> int:
    digest = hashlib.sha256(f"fairlane migrate {schema}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)
