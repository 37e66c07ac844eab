"""How calls get to the server: a pool of connections for each event loop, and a deadline for every call.

One `Database` serves every event loop and thread of a process. A call is one statement in a transaction of its own. It
is repeated here only when it is known to have had no effect: it collided with another call, it was not sent, or what it
calls was changed by a migration or removed. A connection that is found dead before a call is replaced by another one.
Any other failure is `StoreUnavailable`: the outcome is unknown, and the caller decides when to repeat the call.

May assume: callers back off by themselves. Promises: no call hangs because of a server that went away; a cancelled call
never leaves a connection in a state that affects the next call; nothing here survives a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast

from ... import event_loops
from ...errors import StoreError, StoreUnavailable
from ..shared import connection_pools, deadlines
from ..shared.connection_pools import Pools
from ..shared.deadlines import DeadlineTimer
from . import sockets
from .address import CONNECT_SECONDS, Address, driver
from .array_types import TypedConnection
from .collisions import Collisions
from .driver_errors import COLLISIONS, did_nothing, fail, is_closed, is_ours, translate_connecting
from .library import LibraryUse

asyncpg = driver()
NO_TIMEOUT = asyncpg.protocol.NO_TIMEOUT

WAIT_SECONDS = 10.0
"""How long a call waits for a free connection of the pool."""
CLOSING_SECONDS = connection_pools.CLOSING_SECONDS
IDLE_SECONDS = 15.0
"""A connection that was unused for this long is closed. An idle worker calls more often (every 10 s or so with tokens),
so it keeps its connection: the first claim on a new one takes several times as long as a prepared claim."""
GROW_SECONDS = 0.25
"""How long a call in a background thread waits for a connection that is in use before it opens another one."""
SETTLED_SECONDS = 0.1
"""For this long after a failed attempt to connect, others fail without an attempt: a hundred callers make one."""
FRESH_SECONDS = 0.001
READ_COMMITTED = "read committed"
KEEP_LEVEL = f"SET default_transaction_isolation TO '{READ_COMMITTED}'"
LEVEL = "SELECT current_setting('default_transaction_isolation')"
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '5s'"
REPEATS = 5
"""How many times a call that had no effect is repeated."""
LONGEST_PAUSE = 0.2
UNDEFINED_FUNCTION = "42883"


class Record(Protocol):
    """A row of asyncpg."""

    def __getitem__(self, key: str | int) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def get(self, key: str, default: Any = None) -> Any: ...
    def keys(self) -> Iterator[str]: ...
    def values(self) -> Iterator[Any]: ...
    def items(self) -> Iterator[tuple[str, Any]]: ...


class Connection(Protocol):
    """The methods of an asyncpg connection that are used."""

    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> list[Record]: ...
    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> Record | None: ...
    async def fetchval(self, query: str, *args: Any, timeout: float | None = None) -> Any: ...
    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str: ...
    def transaction(self, *, isolation: str | None = None, readonly: bool = False) -> Any: ...
    def is_closed(self) -> bool: ...


class Database(Pools["_Pool"]):
    """Calls the server from any event loop; the pool of each loop is made when it is first needed."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self._collisions = Collisions(address)
        self._deadlines = deadlines.Deadlines()
        self._library: LibraryUse | None = None
        self._next_use = float("inf")
        event_loops.ease_receiving()

    def _make(self, loop: asyncio.AbstractEventLoop) -> _Pool:
        return _Pool(self.address, loop)

    def keep_library(self, library: LibraryUse) -> None:
        """Renew the record of a library's use from now on, together with calls that are made anyway."""
        if self._library is None:
            self._library, self._next_use = library, 0.0

    async def renew_use(self) -> None:
        """Record that the library is in use, if a renewal is due. A failure is ignored: the next renewal is in time."""
        if self._library is not None and time.monotonic() >= self._next_use:
            self._next_use = time.monotonic() + self._library.renewal_seconds
            with contextlib.suppress(StoreError):
                await self._call("fetchrow", self._library.statement, (), None)

    # -- calls -----------------------------------------------------------------------------------------------------

    def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, list[Record]]:
        """All rows of one statement, which is a transaction of its own."""
        return self._call("fetch", sql, args, timeout)

    def fetchrow(
        self, sql: str, *args: Any, timeout: float | None = None, sent: int = 0
    ) -> Coroutine[Any, Any, Record | None]:
        """The first row of one statement, which is a transaction of its own. `sent`: the size of large arguments."""
        return self._call("fetchrow", sql, args, timeout, sent)

    def execute(self, sql: str, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, str]:
        """Run one statement and return its status; without arguments, any number of them in one transaction."""
        return self._call("execute", sql, args, timeout)

    async def _call(self, verb: str, sql: str, args: tuple[Any, ...], timeout: float | None, sent: int = 0) -> Any:
        if time.monotonic() >= self._next_use:
            await self.renew_use()
        collisions = 0
        installed = False
        seconds = timeout or self._deadlines.seconds(sql, sent)
        while True:
            self.check_usable()
            pool = self._pools.get(asyncio.get_running_loop()) or await self._pool()
            connection = pool.spare() or await pool.take()
            wait = pool.patience.begin(seconds)
            try:
                statement = pool.statement(connection, sql)
                if statement is not None:
                    answer = await getattr(statement, verb)(*args, timeout=NO_TIMEOUT)
                else:
                    answer = await pool.ask_first(connection, verb, sql, args, seconds)
            except BaseException as exc:
                pool.patience.end(wait)
                pool.drop(connection)
                cause = TimeoutError() if isinstance(exc, asyncio.CancelledError) and wait.timed_out() else exc
                if not isinstance(cause, Exception):
                    raise
                if isinstance(cause, TimeoutError):
                    self._deadlines.missed(sql)
                if self._library is not None and getattr(cause, "sqlstate", "") == UNDEFINED_FUNCTION and not installed:
                    # The library was removed, because no process had used it for very long.
                    installed = True
                    await self._library.install()
                    continue
                collisions += 1
                if collisions > REPEATS or not did_nothing(cause):
                    fail(cause, self.address, connection)
                if getattr(cause, "sqlstate", None) in COLLISIONS:
                    self._collisions.add(cause)
            else:
                # Before the connection is returned, which takes time as well: the call itself was answered.
                pool.patience.end(wait)
                self._deadlines.kept(sql)
                if not pool.keep(connection):
                    await pool.give_back(connection)
                return answer
            await asyncio.sleep(random.uniform(0, min(LONGEST_PAUSE, 0.005 * 2**collisions)))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for several statements. Errors that the block raises are not translated."""
        pool = await self._pool()
        connection = await pool.take()
        try:
            yield connection
        except BaseException:
            pool.drop(connection)
            raise
        else:
            await pool.give_back(connection)

    @asynccontextmanager
    async def transaction(
        self, *, isolation: str = "read_committed", readonly: bool = False
    ) -> AsyncIterator[Connection]:
        """A connection in a transaction that is committed at the end of the block, and rolled back if the block raises.

        The driver's errors are translated, so the block must not call anything else that raises such errors.
        """
        async with self.connection() as connection:
            try:
                async with connection.transaction(isolation=isolation, readonly=readonly):
                    yield connection
            except Exception as exc:
                if not is_ours(exc):
                    raise
                fail(exc, self.address, connection)

    def snapshot(self) -> AbstractAsyncContextManager[Connection]:
        """A connection that reads one snapshot, for several statements. It neither writes nor waits for locks."""
        return self.transaction(isolation="repeatable_read", readonly=True)


class _Pool(connection_pools.Pool):
    """The connections of one event loop, opened as they are needed."""

    def __init__(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._address = address
        self._beside: set[asyncio.Task[Any]] = set()
        """Background tasks: no call waits for them."""
        self._kept: list[tuple[Any, float]] = []
        self._prepared: dict[Any, dict[str, Any]] = {}
        """Statements by connection and text: looking one up in the driver costs as much as a short call."""
        self.patience = DeadlineTimer(loop)
        self._sweeper: asyncio.TimerHandle | None = None
        self._waiting = 0
        self._sparing = event_loops.is_beside(loop)
        self._free = asyncio.Event()
        """Set when a call returns its connection; awaited in background threads, see `_spared`."""
        self._closing = False
        self._failed: tuple[float, str] = (float("-inf"), "")
        self._other_level = False
        """Whether a statement outside of a transaction block would not run at the level read committed."""
        self._pool: Any = asyncpg.create_pool(
            address.dsn,
            connect=self._connect,
            connection_class=TypedConnection,
            reset=_no_reset,
            min_size=0,
            max_size=address.pool,
            max_queries=10**9,
            max_inactive_connection_lifetime=IDLE_SECONDS,
            timeout=address.connect_seconds,
            command_timeout=deadlines.CALL_SECONDS,
            # Behind PgBouncer the next call may run in another server process, which does not have our statements.
            statement_cache_size=200 if address.listen else 0,
            max_cached_statement_lifetime=0,
        )

    async def open(self, forget: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        await self._pool
        await super().open(forget)

    def statement(self, connection: Any, sql: str) -> Any:
        """The prepared statement for this text on this connection; None if there is none."""
        known = self._prepared.get(connection)
        return None if known is None else known.get(sql)

    async def ask_first(
        self, connection: Any, verb: str, sql: str, args: tuple[Any, ...], timeout: float | None
    ) -> Any:
        """Run a statement that is not prepared, and prepare it for the next time where connections keep statements."""
        if self._other_level:
            return await _at_read_committed(connection, verb, sql, args, timeout)
        if verb == "execute" or not self._address.listen:
            return await getattr(connection, verb)(sql, *args, timeout=timeout)
        statement = await connection.prepare(sql)
        self._prepared.setdefault(connection, {})[sql] = statement
        return await getattr(statement, verb)(*args, timeout=NO_TIMEOUT)

    def spare(self) -> Connection | None:
        """A connection that was kept and is alive, as far as is known without asking the server."""
        while self._kept:
            connection, since = self._kept.pop()
            # A connection that was used a moment ago is not checked: the check costs as much as sending a call.
            fresh = self._loop.time() - since < FRESH_SECONDS and not is_closed(connection)
            if fresh or sockets.is_alive(connection):
                return cast("Connection", connection)
            self.drop(connection)
        return None

    async def take(self) -> Connection:
        """An unused connection that is alive, or else a new one. Waits while the pool is at its limit."""
        connection = self.spare() or (await self._spared() if self._sparing else None)
        if connection is not None:
            return connection
        for _ in range(self._address.pool + 1):
            connection = await self._acquire()
            if sockets.is_alive(connection):
                return cast("Connection", connection)
            self.drop(connection)
        raise StoreUnavailable(f"the connections to {self._address} break as soon as they are made")

    async def _spared(self) -> Connection | None:
        """Wait for a connection that a call returns. None if that takes too long, or no call has one.

        The passes of a manager's services often coincide, and each takes a few milliseconds: without this, an idle
        process would open as many connections as it has services.
        """
        until = self._loop.time() + GROW_SECONDS
        while self._waiting or self._pool.get_size() > self._pool.get_idle_size():
            self._free.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._free.wait()
            except TimeoutError:
                return None
            connection = self.spare()
            if connection is not None:
                return connection
        return None

    async def _acquire(self) -> Any:
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS + self._address.connect_seconds - CONNECT_SECONDS):
                return await self._pool.acquire()
        except TimeoutError as exc:
            raise StoreUnavailable(
                f"no connection to {self._address} became free in time; all {self._address.pool} are in use. "
                "Give the URL a larger pool=…, or hold connections for a shorter time."
            ) from exc
        except asyncpg.InterfaceError as exc:
            raise StoreError("this store is closed; open it again") from exc
        finally:
            self._waiting -= 1

    def keep(self, connection: Connection) -> bool:
        """Keep a connection after a successful call: the next call takes it without the pool, which would cost as much
        again as the call itself (measured: 60 µs). False: return it to the pool, because another call waits for it or
        the pool is closing."""
        if self._waiting or self._closing:
            return False
        self._kept.append((connection, self._loop.time()))
        self._free.set()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_SECONDS, self._sweep)
        return True

    def _sweep(self) -> None:
        """Close connections that were unused for long; they are at the beginning of the list."""
        self._sweeper = None
        old = self._loop.time() - IDLE_SECONDS
        while self._kept and self._kept[0][1] <= old:
            connection, _ = self._kept.pop(0)
            self._prepared.pop(connection, None)
            if not is_closed(connection):
                connection.terminate()
        if self._kept:
            self._sweeper = self._loop.call_at(self._kept[0][1] + IDLE_SECONDS, self._sweep)

    async def give_back(self, connection: Any) -> None:
        """Return a connection to the pool. Errors are ignored: the pool then drops the connection."""
        self._prepared.pop(connection, None)
        with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await self._pool.release(connection, timeout=CLOSING_SECONDS)
        self._free.set()

    def drop(self, connection: Connection) -> None:
        """Return a connection after a failure, in the background: its last statement may still be running."""
        if self._loop.is_closed():
            # The call outlived its event loop and is unwound only now.
            sockets.abort(connection)
            return
        task = self._loop.create_task(self.give_back(connection))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def drain(self) -> None:
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        while self._kept:
            await self.give_back(self._kept.pop()[0])
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._pool.close()
        except (TimeoutError, asyncpg.InterfaceError, OSError):
            self._pool.terminate()
        for task in self._beside:
            task.cancel()

    def abort(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.patience.close()
        self._prepared.clear()
        self._pool.terminate()

    def cut(self) -> None:
        for holder in self._pool._holders:
            if holder._con is not None:
                sockets.abort(holder._con)

    async def _connect(self, *args: Any, **options: Any) -> Any:
        failed_at, failure = self._failed
        if self._loop.time() < failed_at + SETTLED_SECONDS:
            raise StoreUnavailable(failure)
        # Shielded: the driver does not handle a cancellation well while it connects.
        connecting = self._loop.create_task(self._connected(*args, **options))
        try:
            connection = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_abort)
            self._beside.add(connecting)
            connecting.add_done_callback(self._beside.discard)
            raise
        except Exception as exc:
            error = translate_connecting(exc, self._address)
            if isinstance(error, StoreUnavailable):
                self._failed = (self._loop.time(), str(error))
            raise error from exc
        sockets.notice_silence(connection)
        return connection

    async def _connected(self, *args: Any, **options: Any) -> Any:
        """A connection whose statements run at read committed, whatever the default of the server, database or role is.

        Every verb takes its locks inside one call, and must see what other calls committed before it got them. At any
        higher level its snapshot would be older than its locks.
        """
        connection = await asyncpg.connect(*args, **options)
        try:
            if self._address.listen:
                await connection.execute(KEEP_LEVEL)
            else:
                # Behind PgBouncer a setting would stay on a server connection that other clients use next. If the
                # default is another level, each call names the level itself, which costs two more round trips.
                self._other_level = await connection.fetchval(LEVEL) != READ_COMMITTED
        except BaseException:
            connection.terminate()
            raise
        return connection


async def _at_read_committed(connection: Any, verb: str, sql: str, args: tuple[Any, ...], timeout: float | None) -> Any:
    """One statement in a transaction that names its level. The server ends it if the commit does not arrive."""
    try:
        await connection.execute(BEGIN)
        answer = await getattr(connection, verb)(sql, *args, timeout=timeout)
        await connection.execute("COMMIT")
    except asyncpg.PostgresError:
        await connection.execute("ROLLBACK")
        raise
    except BaseException:
        connection.terminate()
        raise
    return answer


def _abort(connecting: asyncio.Task[Any]) -> None:
    """Close a connection whose caller was cancelled while it was being opened."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().terminate()


async def _no_reset(_: object) -> None:
    """Do nothing: calls leave no state on a connection, and a reset would cost another round trip."""
