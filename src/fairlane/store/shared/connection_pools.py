"""One pool of connections for each event loop of a process.

A connection belongs to the event loop that it was made in, and a store may be used from several. The pool of each is
made when it is first needed, and ends with its event loop. Nothing of it survives a fork.
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
"""For calls that still run when a store is closed."""


class Pool(ABC):
    """The connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._end: AsyncGenerator[None, None] | None = None

    async def open(self, forget: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        """Get ready without connecting, and see to it that nothing is left when the event loop ends."""
        # An event loop closes the asynchronous generators it knows when all its tasks have ended: just when the
        # connections are not needed any more, and the last moment at which they can be closed.
        self._end = self._until_the_end(forget)
        await anext(self._end)

    async def _until_the_end(self, forget: Callable[[asyncio.AbstractEventLoop], None]) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            forget(self._loop)
            self.abort()
            for _ in range(3):
                await asyncio.sleep(0)  # a transport needs as many turns to close

    async def close(self) -> None:
        """Close the connections, those in use when they are given back; after a while, in any case."""
        await self.drain()
        if self._end is not None:
            with contextlib.suppress(RuntimeError):  # the event loop ends at this moment, and does it by itself
                await self._end.aclose()

    @abstractmethod
    async def drain(self) -> None:
        """Close the connections that nobody uses, and wait for the others, but not for long."""

    @abstractmethod
    def abort(self) -> None:
        """Close what is left, at once."""

    @abstractmethod
    def cut(self) -> None:
        """Let go of connections whose event loop does not run any more: all that can be done is to hang up."""


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
        """A pool for an event loop that has none."""

    def check_usable(self) -> None:
        """Refuse a store that is closed, or whose connections belong to the parent of a fork."""
        if self._closed:
            raise StoreError("this store is closed; open it again")
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; open it anew in the child process")

    async def _pool(self) -> P:
        """The pool of the running event loop."""
        self.check_usable()
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            # Nothing in here waits, so no other task of this loop can come in between.
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
        """Close the pools of all event loops. Closing twice is harmless, and in the child of a fork nothing happens."""
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
    """Run something in the event loop of another thread, which may end meanwhile."""
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:
        work.close()
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_SECONDS + 1):
            await asyncio.wrap_future(future)
