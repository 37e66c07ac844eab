"""How commands get to the server: a pool of connections for each event loop, and a deadline for every call.

One `Connections` serves every event loop and thread of a process. A call is one command, and what the server answers.
It is repeated here only when it is known that nothing of it happened: its connection was found dead before anything was
sent, or the server is a replica now. Whatever else breaks is `StoreUnavailable`: the outcome is unknown, and the caller
repeats the call when it likes.

May assume: callers back off by themselves. Promises: no call hangs because of a server that went away; a connection is
closed unless it was answered in full, so nobody ever reads another's answer; nothing here survives a fork.

A store makes one from its URL, and calls its functions by it:

    connections = Connections(parse(url))
    try:
        answer = await connections.call("FCALL", library.function(verb), 1, address.prefix, *arguments)
    except ServerError as exc:      # a server that was restarted or replaced has lost the library
        if "Function not found" not in exc.said:
            raise
        await connections.call("FUNCTION", "LOAD", library.text())  # "already exists": somebody else was quicker

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
from ..shared.deadlines import Deadlines, Patience
from .address import Address
from .connection import Argument, Line, dial, packed
from .driver_errors import Refusal, did_nothing, fail, translate_connecting
from .sentinels import Sentinels

WAIT_SECONDS = 10.0
"""For a free connection of the pool."""
CLOSING_SECONDS = connection_pools.CLOSING_SECONDS
IDLE_SECONDS = 60.0
"""A connection that nobody used for so long is closed."""
SETTLED_SECONDS = 0.1
"""After a failed attempt to connect, so long all others fail without one: a hundred callers make one attempt."""
FRESH_SECONDS = 0.001
FUNCTION_CALLS = ("FCALL", "FCALL_RO")


class Connections(Pools["_Pool"]):
    """The way to the server. Used from any event loop; the pool of each is made when it is first needed."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address = address
        self._deadlines = Deadlines()
        event_loops.ease_receiving()

    def _make(self, loop: asyncio.AbstractEventLoop) -> _Pool:
        return _Pool(self.address, loop)

    async def call(self, *arguments: Argument, timeout: float | None = None) -> Any:
        """Send one command, and give the answer: bytes, int, None, or a list of these.

        Raises `StoreUnavailable`, `StoreFull`, `StoreError`, and `ServerError` for what the server refuses in words
        that are left to the caller.
        """
        command = packed(arguments)
        # A function by its name, any other command by its own.
        kind = arguments[1] if len(arguments) > 1 and arguments[0] in FUNCTION_CALLS else arguments[0]
        seconds = timeout or self._deadlines.seconds(kind, len(command))
        again = True
        while True:
            self.check_usable()
            pool = self._pools.get(asyncio.get_running_loop()) or await self._pool()
            line = pool.spare() or await pool.take()
            wait = pool.patience.begin(seconds)
            try:
                answer = await line.ask(command)
            except BaseException as exc:
                pool.patience.end(wait)
                pool.drop(line)
                cause = TimeoutError() if isinstance(exc, asyncio.CancelledError) and wait.is_why() else exc
                if not isinstance(cause, Exception):
                    raise
                if isinstance(cause, TimeoutError):
                    self._deadlines.missed(kind)
                    # The others lead to the same server, and each would have to find out by itself.
                    pool.forsake()
                fail(cause, self.address, arguments[0])
            pool.patience.end(wait)
            self._deadlines.kept(kind)
            if not isinstance(answer, Refusal):
                pool.keep(line)
                return answer
            pool.take_back(line, answer)
            if again and answer.code == "READONLY" and did_nothing(answer):
                # There was a failover. Another connection perhaps leads to the master.
                again = False
                continue
            fail(answer, self.address, arguments[0])


class _Pool(connection_pools.Pool):
    """The connections of one event loop, opened as they are needed."""

    def __init__(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._address = address
        self._sentinels = Sentinels(address) if address.service is not None else None
        self._lines: set[Line] = set()
        self._kept: list[tuple[Line, float]] = []
        """Those that nobody uses, and since when. The one that was used last is used next."""
        self._free = address.pool
        """How many more may be opened."""
        self._waiting: deque[asyncio.Future[Line | None]] = deque()
        """Who gets the next connection, or, with None, may open one."""
        self.patience = Patience(loop)
        self._sweeper: asyncio.TimerHandle | None = None
        self._closing = False
        self._idle = asyncio.Event()
        self._failed: tuple[float, str] = (float("-inf"), "")

    # -- taking ----------------------------------------------------------------------------------------------------

    def spare(self) -> Line | None:
        """A connection that was kept and is alive, as far as can be told without asking the server."""
        while self._kept:
            line, since = self._kept.pop()
            # The kernel is not asked about one that was used a moment ago.
            if line.is_clean() if self._loop.time() - since < FRESH_SECONDS else line.is_alive():
                return line
            self.drop(line)
        return None

    async def take(self) -> Line:
        """Another one, made when there is none, or the next that is given back when there may be no more."""
        if self._free:
            self._free -= 1
        else:
            line = await self._turn()
            if line is not None:
                return line
        try:
            line = await self._connect()
        except BaseException:
            self._give_place()
            raise
        self._lines.add(line)
        if self._closing:
            self.drop(line)
            raise StoreError("this store is closed; open it again")
        return line

    async def _turn(self) -> Line | None:
        """Wait for a connection, or for the place of one, in the order in which callers came."""
        turn: asyncio.Future[Line | None] = self._loop.create_future()
        self._waiting.append(turn)
        wait = self.patience.begin(WAIT_SECONDS)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # It came at the very moment at which nobody wanted it any more.
                if (line := turn.result()) is None:
                    self._give_place()
                else:
                    self.keep(line)
            if wait.is_why():
                raise StoreUnavailable(
                    f"no connection to {self._address} became free in time; all {self._address.pool} are in use. "
                    "Give the URL a larger pool=…"
                ) from None
            raise
        finally:
            self.patience.end(wait)

    async def _connect(self) -> Line:
        failed_at, failure = self._failed
        if self._loop.time() < failed_at + SETTLED_SECONDS:
            raise StoreUnavailable(failure)
        try:
            if self._sentinels is not None:
                return await self._sentinels.dial()
            async with asyncio.timeout(self._address.connect_seconds):
                return await dial(self._address, self._address.places[0])
        except Exception as exc:
            error = translate_connecting(exc, self._address)
            if isinstance(error, StoreUnavailable):
                self._failed = (self._loop.time(), str(error))
            if error is exc:
                raise
            raise error from exc

    # -- giving back -----------------------------------------------------------------------------------------------

    def keep(self, line: Line) -> None:
        """Done with it, and it is as it was."""
        if self._closing:
            self.drop(line)
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(line)
                return
        self._kept.append((line, self._loop.time()))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(IDLE_SECONDS, self._sweep)

    def take_back(self, line: Line, refusal: Refusal) -> None:
        """Done with it; the server has refused. A replica is of no use, and the others lead to it as well."""
        if refusal.code == "READONLY":
            self.drop(line)
            self.forsake()
        else:
            self.keep(line)

    def drop(self, line: Line) -> None:
        """Done with it after a failure."""
        if self._loop.is_closed():
            # The call was left behind with its loop, and is unwound only now.
            line.hang_up()
            return
        line.close()
        self._lines.discard(line)
        self._give_place()

    def forsake(self) -> None:
        """Close all that nobody uses just now."""
        while self._kept:
            self.drop(self._kept.pop()[0])

    def _give_place(self) -> None:
        while self._waiting and not self._closing:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
        if self._free == self._address.pool:
            self._idle.set()

    def _sweep(self) -> None:
        """Close what was not used for long, which is what lies lowest."""
        self._sweeper = None
        old = self._loop.time() - IDLE_SECONDS
        while self._kept and self._kept[0][1] <= old:
            self.drop(self._kept.pop(0)[0])
        if self._kept:
            self._sweeper = self._loop.call_at(self._kept[0][1] + IDLE_SECONDS, self._sweep)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        self._closing = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(StoreError("this store is closed; open it again"))
        self.forsake()
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
        for line in self._lines:
            line.close()

    def cut(self) -> None:
        for line in self._lines:
            line.hang_up()
