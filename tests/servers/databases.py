"""Databases for tests, on any server.

A database is made from one that has the schema already, in 12 ms in memory and 45 to 150 ms on a disk: most of that is
making 400 files, and a file system may be slow at it while others have just been deleted (ext4 without a journal). So
those that tests are done with are emptied, in 5 ms, and given out again. One without a schema is always new.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from fairlane.store import open_store
from fairlane.store.postgresql.address import SCHEMA
from fairlane.store.postgresql.statements import queries

if TYPE_CHECKING:
    from psycopg import Connection

MOST_FINISHED = 20
"""This many databases that cannot be used again are kept before they are dropped together."""
LARGE = 65_536
"""Bytes from which on a table is truncated, which costs some milliseconds; below, its rows are deleted."""
PATIENCE = 10.0

TABLES = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema'
-- What others refer to goes last.
ORDER BY EXISTS (SELECT FROM pg_constraint r WHERE r.confrelid = c.oid AND r.conrelid <> c.oid), 1
"""
SEQUENCES = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'S' AND n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema' ORDER BY 1
"""
EMPTY = """
DO $$
DECLARE
    t text;
BEGIN
    FOREACH t IN ARRAY ARRAY[{tables}]::text[] LOOP
        IF pg_relation_size(t) > {large} THEN
            EXECUTE 'TRUNCATE ' || t || ' CASCADE';
        ELSIF pg_relation_size(t) > 0 THEN
            EXECUTE 'DELETE FROM ' || t;
        END IF;
    END LOOP;
    -- A test that failed may have left tables of its own.
    FOR t IN {found} LOOP
        IF t <> ALL (ARRAY[{tables}]::text[]) THEN
            EXECUTE 'DROP TABLE ' || t || ' CASCADE';
        END IF;
    END LOOP;
END $$;
"""


class Databases:
    """The databases that this process has made on one server."""

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        """How to reach the server; its port is not known before it runs."""
        self._prefix = f"fairlane_test_{os.getpid()}_{secrets.token_hex(3)}"
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._admin: Connection[Any] | None = None
        self._template: Template | None = None
        self._all: set[str] = set()
        self._migrated: set[str] = set()
        self._idle: list[str] = []
        self._finished: list[str] = []

    def fresh(self, *, migrated: bool = True) -> str:
        """The URL of an unused database, with an empty schema or, unless `migrated`, with none."""
        with self._lock:
            if not migrated:
                return self._made()
            if self._idle:
                url = self._idle.pop()
                self._leave_alone(url)
                self._known_template().empty(url)
                return url
            url = self._made(self._known_template().name)
            self._migrated.add(url)
            return url

    def done(self, url: str) -> None:
        """Take back a database; clients that are still connected lose the connection."""
        with self._lock:
            if url in self._migrated:
                self._idle.append(url)
                return
            self._finished.append(url)
            if len(self._finished) >= MOST_FINISHED:
                self._drop(*self._finished)
                self._finished.clear()

    def connected(self, url: str) -> int:
        """How many connections a database has."""
        with self._lock, self._server() as admin:
            row = admin.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", [_name(url)]).fetchone()
        return int(row[0]) if row else 0

    def close(self, *, drop: bool) -> None:
        """Release the server; `drop` removes the databases too, unless they end with it."""
        with self._lock:
            if drop:
                self._drop(*self._all)
            if self._admin is not None:
                self._admin.close()
                self._admin = None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _made(self, template: str = "template0") -> str:
        name = f"{self._prefix}_{next(self._numbers)}"
        with self._server() as admin:
            # Faster than `wal_log`, the default, in most of the comparisons that were made.
            admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')
        url = _with_database(self._url(), name)
        self._all.add(url)
        return url

    def _known_template(self) -> Template:
        if self._template is None:
            url = self._made()
            # In a thread, because the caller may be inside an event loop.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(lambda: asyncio.run(_migrate(url))).result()
            self._leave_alone(url)
            self._template = Template(url)
            self._leave_alone(url)
        return self._template

    def _drop(self, *urls: str) -> None:
        for url in urls:
            with self._server() as admin:
                admin.execute(f'DROP DATABASE IF EXISTS "{_name(url)}" WITH (FORCE)')
            self._all.remove(url)

    def _leave_alone(self, url: str) -> None:
        end = time.monotonic() + PATIENCE
        while self.connected(url):
            assert time.monotonic() < end, f"connections to {_name(url)} do not end"
            with self._server() as admin:
                others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                admin.execute(others, [_name(url)])
            time.sleep(0.002)

    @contextlib.contextmanager
    def _server(self) -> Iterator[Connection[Any]]:
        """A connection that works: the server may have been restarted since the last time."""
        import psycopg

        if self._admin is not None:
            try:
                self._admin.execute("SELECT 1")
            except psycopg.OperationalError:
                self._admin.close()
                self._admin = None
        if self._admin is None:
            self._admin = psycopg.connect(self._url(), autocommit=True, connect_timeout=int(PATIENCE))
        yield self._admin


class Template:
    """A database with an unused schema, and what is needed to restore another one to this state.

    Its hot tables have checks of every row, so that any test detects a row that violates them.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = _name(url)
        self._seeds: dict[str, bytes] = {}
        with _connected(url) as connection:
            for statement in queries(SCHEMA)["invariants"].split(";"):
                connection.execute(statement)
            tables = [name for (name,) in connection.execute(TABLES)]
            for table in tables:
                with connection.cursor().copy(f"COPY {table} TO STDOUT") as rows:
                    if seed := b"".join(bytes(chunk) for chunk in rows):
                        self._seeds[table] = seed
            sequences = [name for (name,) in connection.execute(SEQUENCES)]
            states = [connection.execute(f"SELECT last_value, is_called FROM {s}").fetchone() for s in sequences]
        script = EMPTY.format(tables=", ".join(f"'{table}'" for table in tables), found=TABLES, large=LARGE)
        resets = (
            f"SELECT setval('{sequence}', {state[0]}, {state[1]});"
            for sequence, state in zip(sequences, states, strict=True)
            if state is not None
        )
        self._script = script + "".join(resets)

    def empty(self, url: str) -> None:
        """Restore a database that was made from this one to its original state."""
        with _connected(url) as connection, connection.transaction():
            connection.execute(self._script)
            for table, seed in self._seeds.items():
                with connection.cursor().copy(f"COPY {table} FROM STDIN") as rows:
                    rows.write(seed)


async def _migrate(url: str) -> None:
    store = await open_store(url)
    await store.close()


@contextlib.contextmanager
def _connected(url: str) -> Iterator[Connection[Any]]:
    import psycopg

    with contextlib.closing(psycopg.connect(url, autocommit=True, connect_timeout=int(PATIENCE))) as connection:
        yield connection


def _name(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


def _with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
