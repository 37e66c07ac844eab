"""Connections as users have them, of every driver that is supported, all driven in the same words.

Those for plain code live in a thread of their own, as they do in a server with threads.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import psycopg
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fairlane import Fairlane
from fairlane.store.postgresql.address import driver
from fairlane.task import Call

asyncpg = driver()
importlib.import_module("django.conf").settings.configure(DATABASES={}, USE_TZ=True)
importlib.import_module("django").setup()


class Own(Protocol):
    """A connection of a user's."""

    connection: Any

    async def open(self, url: str, *, autocommit: bool = False) -> None:
        """Connect; with `autocommit`, so that no transaction is ever begun."""

    async def begin(self) -> None:
        """Begin a transaction, where the driver does not by itself."""

    async def execute(self, sql: str) -> None:
        """Run a statement."""

    async def enqueue(self, app: Fairlane, *calls: Call[Any]) -> list[Any]:
        """Store jobs, by the call that is right for this kind of connection."""

    async def commit(self) -> None:
        """End the transaction."""

    async def rollback(self) -> None:
        """End the transaction."""

    async def close(self) -> None:
        """Disconnect."""


class _Async:
    """For asynchronous code."""

    connection: Any = None

    async def begin(self) -> None:
        """Most drivers begin a transaction by themselves."""

    async def enqueue(self, app: Fairlane, *calls: Call[Any]) -> list[Any]:
        return await app.enqueue_on(self.connection, *calls)

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()


class Asyncpg(_Async):
    """A connection of asyncpg."""

    async def open(self, url: str, *, autocommit: bool = False) -> None:
        self.connection = await asyncpg.connect(url)

    async def begin(self) -> None:
        self._transaction = self.connection.transaction()
        await self._transaction.start()

    async def execute(self, sql: str) -> None:
        await self.connection.execute(sql)

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    async def close(self) -> None:
        await self.connection.close()


class AsyncpgPool(Asyncpg):
    """A connection out of a pool of asyncpg."""

    async def open(self, url: str, *, autocommit: bool = False) -> None:
        self._pool = await asyncpg.create_pool(url, min_size=1, max_size=1)
        self.connection = await self._pool.acquire()

    async def close(self) -> None:
        await self._pool.release(self.connection)
        await self._pool.close()


class PsycopgAsync(_Async):
    """An AsyncConnection of psycopg, with rows that are not tuples and a cursor of another kind."""

    async def open(self, url: str, *, autocommit: bool = False) -> None:
        self.connection = await psycopg.AsyncConnection.connect(
            url,
            autocommit=autocommit,
            row_factory=psycopg.rows.dict_row,
            cursor_factory=psycopg.AsyncRawCursor,
        )

    async def execute(self, sql: str) -> None:
        await self.connection.execute(sql)

    async def close(self) -> None:
        await self.connection.close()


class SqlalchemyAsyncConnection(_Async):
    """An AsyncConnection of SQLAlchemy."""

    dialect = "asyncpg"

    async def open(self, url: str, *, autocommit: bool = False) -> None:
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        place = url.replace("postgresql://", f"postgresql+{self.dialect}://")
        self._engine = create_async_engine(place, poolclass=NullPool, **options)
        await self._connect()

    async def _connect(self) -> None:
        self.connection = await self._engine.connect()

    async def execute(self, sql: str) -> None:
        await self.connection.execute(text(sql))

    async def close(self) -> None:
        await self.connection.close()
        await self._engine.dispose()


class SqlalchemyAsyncSession(SqlalchemyAsyncConnection):
    """An AsyncSession of SQLAlchemy, on another driver."""

    dialect = "psycopg"

    async def _connect(self) -> None:
        self.connection = AsyncSession(self._engine)


class _Blocking:
    """For plain code: everything happens in one thread."""

    connection: Any = None

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    async def _there(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def open(self, url: str, *, autocommit: bool = False) -> None:
        await self._there(lambda: self._open(url, autocommit))

    async def begin(self) -> None:
        await self._there(self._begin)

    async def execute(self, sql: str) -> None:
        await self._there(lambda: self._execute(sql))

    async def enqueue(self, app: Fairlane, *calls: Call[Any]) -> list[Any]:
        handles: list[Any] = await self._there(lambda: app.blocking.enqueue_on(self.connection, *calls))
        return handles

    async def commit(self) -> None:
        await self._there(self._commit)

    async def rollback(self) -> None:
        await self._there(self._rollback)

    async def close(self) -> None:
        await self._there(self._close)
        self._thread.shutdown()

    def _open(self, url: str, autocommit: bool) -> None:
        raise NotImplementedError

    def _begin(self) -> None: ...

    def _execute(self, sql: str) -> None:
        self.connection.execute(text(sql))

    def _commit(self) -> None:
        self.connection.commit()

    def _rollback(self) -> None:
        self.connection.rollback()

    def _close(self) -> None:
        self.connection.close()


class Psycopg(_Blocking):
    """A Connection of psycopg."""

    def _open(self, url: str, autocommit: bool) -> None:
        self.connection = psycopg.connect(url, autocommit=autocommit, row_factory=psycopg.rows.dict_row)

    def _execute(self, sql: str) -> None:
        self.connection.execute(sql)


class SqlalchemyConnection(_Blocking):
    """A Connection of SQLAlchemy."""

    def _open(self, url: str, autocommit: bool) -> None:
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        place = url.replace("postgresql://", "postgresql+psycopg://")
        self._engine = create_engine(place, poolclass=NullPool, **options)
        self._connect()

    def _connect(self) -> None:
        self.connection = self._engine.connect()

    def _close(self) -> None:
        self.connection.close()
        self._engine.dispose()


class SqlalchemySession(SqlalchemyConnection):
    """A Session of SQLAlchemy."""

    def _connect(self) -> None:
        self.connection = Session(self._engine)


class SqlalchemyScopedSession(SqlalchemyConnection):
    """What Flask-SQLAlchemy calls ``db.session``."""

    def _connect(self) -> None:
        self.connection = scoped_session(sessionmaker(self._engine))


class Django(_Blocking):
    """``connections[…]`` of Django, in its autocommit mode, inside ``atomic``."""

    _names = iter(range(1_000_000))

    def _open(self, url: str, autocommit: bool) -> None:
        connections = importlib.import_module("django.db").connections
        self._alias = f"own_{next(self._names)}"
        known = connections.configure_settings({"default": {}, self._alias: self._settings(url)})
        connections.databases[self._alias] = known[self._alias]
        self._atomic = importlib.import_module("django.db.transaction").atomic(using=self._alias)
        self._connect(connections)

    def _settings(self, url: str) -> dict[str, Any]:
        place = urlsplit(url)
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": place.path[1:],
            "USER": place.username,
            "HOST": place.hostname,
            "PORT": place.port,
        }

    def _connect(self, connections: Any) -> None:
        self.connection = connections[self._alias]

    def _begin(self) -> None:
        self._atomic.__enter__()

    def _execute(self, sql: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)

    def _commit(self) -> None:
        self._atomic.__exit__(None, None, None)

    def _rollback(self) -> None:
        exc = RuntimeError("rolled back")
        with suppress(RuntimeError):
            self._atomic.__exit__(RuntimeError, exc, None)


class DjangoProxy(Django):
    """``django.db.connection``, which stands for the connection of whatever thread uses it."""

    def _connect(self, connections: Any) -> None:
        proxy = importlib.import_module("django.utils.connection").ConnectionProxy
        self.connection = proxy(connections, self._alias)


class DjangoOnSqlite(Django):
    """``connections[…]`` of Django, on a file."""

    def _settings(self, url: str) -> dict[str, Any]:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///")}


class DjangoProxyOnSqlite(DjangoOnSqlite, DjangoProxy):
    """``django.db.connection``, on a file."""


DRIVERS: dict[str, Callable[[], Own]] = {
    "asyncpg": Asyncpg,
    "asyncpg-pool": AsyncpgPool,
    "psycopg-async": PsycopgAsync,
    "psycopg": Psycopg,
    "sqlalchemy-async-connection": SqlalchemyAsyncConnection,
    "sqlalchemy-async-session": SqlalchemyAsyncSession,
    "sqlalchemy-connection": SqlalchemyConnection,
    "sqlalchemy-session": SqlalchemySession,
    "sqlalchemy-scoped-session": SqlalchemyScopedSession,
    "django": Django,
    "django-proxy": DjangoProxy,
}


@asynccontextmanager
async def opened(kind: Callable[[], Own], url: str, **options: Any) -> AsyncIterator[Own]:
    own = kind()
    await own.open(url, **options)
    if not options:
        await own.begin()
    try:
        yield own
    finally:
        await own.close()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def orders(url: str) -> list[str]:
    async with connected(url) as connection:
        return [row["id"] for row in await connection.fetch("SELECT id FROM orders ORDER BY id")]


async def ids(app: Fairlane) -> set[str]:
    return {job.id for job in (await app.client.find()).jobs}
