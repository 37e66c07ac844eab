"""One pool of connections for each event loop of a process.

A connection belongs to the event loop in which it was opened, and a store may be used from several. The pool of an
event loop is created when it is first needed and closed with the event loop. It does not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from ...errors import StoreError

CLOSING_SECONDS = 3.0
"""Time for calls that are still running when a store is closed."""


class Pool(ABC):
    """The connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._end: AsyncGenerator[None, None] | None = None

    async def open(self, forget: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        """Prepare without connecting, so that all connections are closed when the event loop ends."""
        # An event loop closes its asynchronous generators when all its tasks have ended: the connections are no longer
        # needed then, and can still be closed.
        self._end = self._until_the_end(forget)
        await anext(self._end)

    async def _until_the_end(self, forget: Callable[[asyncio.AbstractEventLoop], None]) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            forget(self._loop)
            self.abort()
            for _ in range(3):
                await asyncio.sleep(0)  # a transport needs that many iterations of the loop to close

    async def close(self) -> None:
        """Close the connections; wait a limited time for those in use."""
        await self.drain()
        if self._end is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is ending and closes it itself
                await self._end.aclose()

    @abstractmethod
    async def drain(self) -> None:
        """Close idle connections, and wait a limited time for those in use."""

    @abstractmethod
    def abort(self) -> None:
        """Close the remaining connections at once."""

    @abstractmethod
    def cut(self) -> None:
        """Shut down the sockets of connections whose event loop no longer runs."""


P = TypeVar("P", bound=Pool)


class Pools(ABC, Generic[P]):
    """The pools of a process. Used from any event loop."""

    def __init__(self) -> None:
        self._pools: dict[asyncio.AbstractEventLoop, P] = {}
        # Held for moments only, never across an await.
        self._door = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    @abstractmethod
    def _make(self, loop: asyncio.AbstractEventLoop) -> P:
        """Return a new pool for an event loop."""

    def check_usable(self) -> None:
        """Raise `StoreError` if the store is closed, or was opened before a fork."""
        if self._closed:
            raise StoreError("this store is closed; open it again")
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; open it again in the child process")

    async def _pool(self) -> P:
        """Return the pool of the running event loop."""
        self.check_usable()
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            # Nothing here suspends, so no other task of this loop can run in between.
            pool = self._make(loop)
            await pool.open(self._forget)
            with self._door:
                closed = self._closed
                gone = [self._pools.pop(known) for known in list(self._pools) if known.is_closed()]
                if not closed:
                    self._pools[loop] = pool
            for left in gone:
                left.cut()
            if closed:
                await pool.close()
                self.check_usable()
        return pool

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._door:
            self._pools.pop(loop, None)

    async def close(self) -> None:
        """Close the pools of all event loops. May be called twice; does nothing in the child of a fork."""
        if os.getpid() != self._pid:
            return
        with self._door:
            pools, self._pools = self._pools, {}
            self._closed = True
        here = asyncio.get_running_loop()
        for loop, pool in pools.items():
            if loop is here:
                await pool.close()
            elif loop.is_running():
                await _elsewhere(pool.close(), loop)
            else:
                pool.cut()


async def _elsewhere(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Run a coroutine in the event loop of another thread, which may end meanwhile."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:
        work.close()
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_SECONDS + 1):
            await asyncio.wrap_future(future)
