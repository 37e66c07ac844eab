"""How commands get to the server: a pool of connections for each event loop, and a deadline for every call.

One `Connections` serves every event loop and thread of a process. A call is one command and its reply. It is repeated
here only when the command is known to have had no effect: its connection was found dead before anything was sent, or
the server has become a replica. Any other failure is `StoreUnavailable`: the outcome is unknown, and the caller decides
when to repeat the call.

May assume: callers back off by themselves. Promises: no call hangs because of a server that went away; a connection is
closed unless its last reply was read in full, so no caller reads a reply meant for another; nothing here survives a
fork.

A store makes one from its URL and calls its functions through it:

    connections = Connections(parse(url))
    try:
        answer = await connections.call("FCALL", library.function(verb), 1, address.prefix, *arguments)
    except ServerError as exc:      # a server that was restarted or replaced has lost the library
        if "Function not found" not in exc.said:
            raise
        await connections.call("FUNCTION", "LOAD", library.text())  # "already exists": another process was first

A call that waits on the server, such as BLPOP, needs a `timeout` above its own, and holds its connection meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from ... import event_loops
from ...errors import StoreError, StoreUnavailable
from ..shared import connection_pools
from ..shared.connection_pools import Pools
from ..shared.deadlines import Deadlines, DeadlineTimer
from .address import Address
from .connection import Argument, Connection, connect, packed
from .driver_errors import Refusal, did_nothing, fail, translate_connecting
from .sentinels import Sentinels

WAIT_SECONDS = 10.0
"""How long a call waits for a free connection of the pool."""
CLOSING_SECONDS = connection_pools.CLOSING_SECONDS
IDLE_SECONDS = 60.0
"""A connection that was unused for this long is closed."""
FAILED_SECONDS = 0.1
"""For this long after a failed attempt to connect, others fail without an attempt: a hundred callers make one."""
FRESH_SECONDS = 0.001
"""A connection that was used this recently is not checked with the kernel."""
FUNCTION_CALLS = ("FCALL", "FCALL_RO")


class Connections(Pools["_Pool"]):
    """Calls the server from any event loop; the pool of each loop is made when it is first needed."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self._deadlines = Deadlines()
        event_loops.ease_receiving()

    def _make(self, loop: asyncio.AbstractEventLoop) -> _Pool:
        return _Pool(self.address, loop)

    async def call(self, *arguments: Argument, timeout: float | None = None) -> Any:
        """Send one command and return the reply: bytes, int, None, or a list of these.

        Raises `StoreUnavailable`, `StoreFull`, `StoreError`, and `ServerError` for an error reply that only the caller
        can interpret.
        """
        command = packed(arguments)
        # Deadlines are kept by function, and for other commands by command.
        kind = arguments[1] if len(arguments) > 1 and arguments[0] in FUNCTION_CALLS else arguments[0]
        seconds = timeout or self._deadlines.seconds(kind, len(command))
        again = True
        while True:
            self.check_usable()
            pool = self._pools.get(asyncio.get_running_loop()) or await self._pool()
            connection = pool.spare() or await pool.take()
            wait = pool.patience.begin(seconds)
            try:
                answer = await connection.request(command)
            except BaseException as exc:
                pool.patience.end(wait)
                pool.drop(connection)
                cause = TimeoutError() if isinstance(exc, asyncio.CancelledError) and wait.timed_out() else exc
                if not isinstance(cause, Exception):
                    raise
                if isinstance(cause, TimeoutError):
                    self._deadlines.missed(kind)
                    # The other connections lead to the same server, and each would run into its own timeout.
                    pool.close_unused()
                fail(cause, self.address, arguments[0])
            pool.patience.end(wait)
            self._deadlines.kept(kind)
            if not isinstance(answer, Refusal):
                pool.keep(connection)
                return answer
            pool.return_refused(connection, answer)
            if again and answer.code == "READONLY" and did_nothing(answer):
                # There was a failover. A new connection may lead to the master.
                again = False
                continue
            fail(answer, self.address, arguments[0])


class _Pool(connection_pools.Pool):
    """The connections of one event loop, opened as they are needed."""

    def __init__(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._address = address
        self._sentinels = Sentinels(address) if address.service is not None else None
        self._connections: set[Connection] = set()
        self._kept: list[tuple[Connection, float]] = []
        """Unused connections, and since when. The one that was used last is used next."""
        self._free = address.pool
        """How many more may be opened."""
        self._waiting: deque[asyncio.Future[Connection | None]] = deque()
        """Callers that get the next free connection or, with None, may open one."""
        self.patience = DeadlineTimer(loop)
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing = False
        self._idle = asyncio.Event()
        self._failed: tuple[float, str] = (float("-inf"), "")

    # -- taking ----------------------------------------------------------------------------------------------------

    def spare(self) -> Connection | None:
        """An unused connection that is alive, as far as is known without a round trip."""
        while self._kept:
            connection, since = self._kept.pop()
            if connection.is_clean() if self._loop.time() - since < FRESH_SECONDS else connection.is_alive():
                return connection
            self.drop(connection)
        return None

    async def take(self) -> Connection:
        """A new connection or, when the pool is at its limit, the next one that is returned."""
        if self._free:
            self._free -= 1
        else:
            connection = await self._wait_for_one()
            if connection is not None:
                return connection
        try:
            connection = await self._connect()
        except BaseException:
            self._free_one()
            raise
        self._connections.add(connection)
        if self._closing:
            self.drop(connection)
            raise StoreError("this store is closed; open it again")
        return connection

    async def _wait_for_one(self) -> Connection | None:
        """Wait for a connection, or for permission to open one (None), in the order of the callers."""
        waiter: asyncio.Future[Connection | None] = self._loop.create_future()
        self._waiting.append(waiter)
        wait = self.patience.begin(WAIT_SECONDS)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # It was handed over in the same moment as the wait was cancelled.
                if (connection := waiter.result()) is None:
                    self._free_one()
                else:
                    self.keep(connection)
            if wait.timed_out():
                raise StoreUnavailable(
                    f"no connection to {self._address} became free in time; all {self._address.pool} are in use. "
                    "Give the URL a larger pool=…"
                ) from None
            raise
        finally:
            self.patience.end(wait)

    async def _connect(self) -> Connection:
        failed_at, failure = self._failed
        if self._loop.time() < failed_at + FAILED_SECONDS:
            raise StoreUnavailable(failure)
        try:
            if self._sentinels is not None:
                return await self._sentinels.connect()
            async with asyncio.timeout(self._address.connect_seconds):
                return await connect(self._address, self._address.endpoints[0])
        except Exception as exc:
            error = translate_connecting(exc, self._address)
            if isinstance(error, StoreUnavailable):
                self._failed = (self._loop.time(), str(error))
            if error is exc:
                raise
            raise error from exc

    # -- returning -------------------------------------------------------------------------------------------------

    def keep(self, connection: Connection) -> None:
        """Return a connection whose last reply was read in full."""
        if self._closing:
            self.drop(connection)
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._kept.append((connection, self._loop.time()))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_SECONDS, self._sweep)

    def return_refused(self, connection: Connection, refusal: Refusal) -> None:
        """Return a connection after an error reply. If it leads to a replica, so do the others: all are closed."""
        if refusal.code == "READONLY":
            self.drop(connection)
            self.close_unused()
        else:
            self.keep(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection after a failure."""
        if self._loop.is_closed():
            # The call outlived its event loop and is unwound only now.
            connection.abort()
            return
        connection.close()
        self._connections.discard(connection)
        self._free_one()

    def close_unused(self) -> None:
        """Close all unused connections."""
        while self._kept:
            self.drop(self._kept.pop()[0])

    def _free_one(self) -> None:
        while self._waiting and not self._closing:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
        if self._free == self._address.pool:
            self._idle.set()

    def _sweep(self) -> None:
        """Close connections that were unused for long; they are at the beginning of the list."""
        self._sweeper = None
        old = self._loop.time() - IDLE_SECONDS
        while self._kept and self._kept[0][1] <= old:
            self.drop(self._kept.pop(0)[0])
        if self._kept:
            self._sweeper = self._loop.call_at(self._kept[0][1] + IDLE_SECONDS, self._sweep)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        self._closing = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(StoreError("this store is closed; open it again"))
        self.close_unused()
        if self._free < self._address.pool:
            self._idle.clear()
            try:
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._idle.wait()
            except TimeoutError:
                pass

    def abort(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.patience.close()
        for connection in self._connections:
            connection.close()

    def cut(self) -> None:
        for connection in self._connections:
            connection.abort()
