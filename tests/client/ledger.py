"""A user's table in the database of the store, and the user's connections to it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fairlane import Fairlane, current_job
from fairlane.store.postgresql.address import driver
from fairlane.task import Task

asyncpg = driver()


class Ledger(Protocol):
    """Counts what bodies have written, and takes part in transactions of its own."""

    async def effects(self) -> list[tuple[str, int]]:
        """The rows that are committed, in order."""

    async def begin(self) -> Any:
        """A connection inside an open transaction."""

    async def write(self, connection: Any, job: str, part: int = 1) -> None:
        """Write a row on a connection."""

    async def end(self, connection: Any, *, commit: bool) -> None:
        """End the transaction, and close the connection."""

    async def close(self) -> None:
        """Restore the database."""


class SqliteLedger:
    """In the file of a SQLite store."""

    def __init__(self, url: str) -> None:
        self._path = url.removeprefix("sqlite:///")
        connection = sqlite3.connect(self._path)
        connection.execute("CREATE TABLE effect (job TEXT NOT NULL, part INTEGER NOT NULL)")
        connection.close()

    async def effects(self) -> list[tuple[str, int]]:
        connection = sqlite3.connect(self._path)
        try:
            return connection.execute("SELECT job, part FROM effect ORDER BY job, part").fetchall()
        finally:
            connection.close()

    async def begin(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None)
        connection.execute("BEGIN")
        return connection

    async def write(self, connection: sqlite3.Connection, job: str, part: int = 1) -> None:
        connection.execute("INSERT INTO effect VALUES (?, ?)", (job, part))

    async def end(self, connection: sqlite3.Connection, *, commit: bool) -> None:
        connection.execute("COMMIT" if commit else "ROLLBACK")
        connection.close()

    async def close(self) -> None:
        """The file is gone with the test."""


class PostgresqlLedger:
    """In the database of the store, outside of its schema."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def effects(self) -> list[tuple[str, int]]:
        connection = await asyncpg.connect(self._url)
        try:
            rows = await connection.fetch("SELECT job, part FROM effect ORDER BY job, part")
            return [(row["job"], row["part"]) for row in rows]
        finally:
            await connection.close()

    async def begin(self) -> Any:
        connection = await asyncpg.connect(self._url)
        await connection.execute("BEGIN")
        return connection

    async def write(self, connection: Any, job: str, part: int = 1) -> None:
        await connection.execute("INSERT INTO effect VALUES ($1, $2)", job, part)

    async def end(self, connection: Any, *, commit: bool) -> None:
        await connection.execute("COMMIT" if commit else "ROLLBACK")
        await connection.close()

    async def close(self) -> None:
        connection = await asyncpg.connect(self._url)
        await connection.execute("DROP TABLE effect")
        await connection.close()


async def ledger_in(url: str) -> Ledger:
    """A table in the database at `url`."""
    if url.startswith("sqlite"):
        return SqliteLedger(url)
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE effect (job text NOT NULL, part integer NOT NULL)")
    await connection.close()
    return PostgresqlLedger(url)


@asynccontextmanager
async def working(app: Fairlane, **options: Any) -> AsyncIterator[None]:
    """Let a worker serve the application inside the block."""
    worker = app.worker(**{"slots": 4, **options})
    running = asyncio.ensure_future(worker.run())
    try:
        yield
    finally:
        worker.stop(now=True)
        await asyncio.wait_for(running, 30)


def task_of(app: Fairlane, ledger: Ledger, **settings: Any) -> Task[[int], int]:
    """A task that writes a row and returns twice its argument."""

    @app.task(name="double", **settings)
    async def double(number: int) -> int:
        connection = await current_job().transaction()
        await ledger.write(connection, current_job().id)
        return 2 * number

    return double
