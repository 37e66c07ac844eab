"""The store a process works with: opened when first needed, once, and anew after a fork.

The application uses it, and so may workers: each worker holds it for as long as it runs, and `close` gives up only the
application's own use. It is closed when nobody is left, so a body that closes the application does not stop the worker
that runs it, and no second store is opened beside the first.

One store serves every event loop and thread of the process. The door is a plain lock that is never held across an
await: whoever comes while another opens waits for the same future.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from ..store.port import Store

OpenStore = Callable[[], Awaitable[Store]]


class GaveUp(Exception):
    """Whoever was opening the store has been cancelled."""


class Connection:
    """Gives the store to whoever asks."""

    def __init__(
        self,
        open_store: OpenStore,
        ready: Callable[[Store], Awaitable[None]] | None = None,
        unused: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._open_store = open_store
        self._ready = ready
        self._unused = unused or self.close
        """Called when the last hold is given up and the application does not use the store either."""
        self._forget()

    def _forget(self) -> None:
        self._door = threading.Lock()
        self._opening: Future[Store] | None = None
        self._opened: Store | None = None
        self._holds = 0
        self._in_use = False
        # Set pid last: a thread that reads its own pid must see the other fields reset.
        self._pid = os.getpid()

    @property
    def opened(self) -> Store | None:
        """The store, when it is open already: without waiting, and without a lock."""
        return self._opened if self._pid == os.getpid() else None

    async def store(self) -> Store:
        """The open store. An error while opening is told to everybody who waited, and the next call tries again."""
        self._notice_fork()
        with self._door:
            self._in_use = True
        store = await self._get()
        with self._door:
            # Unless it was closed meanwhile.
            if self._in_use and self._opening is not None:
                self._opened = store
        return store

    async def hold(self) -> Store:
        """The open store, which stays open until `release` was called as often as this, whoever closes it meanwhile."""
        self._notice_fork()
        with self._door:
            self._holds += 1
        try:
            return await self._get()
        except BaseException:
            with self._door:
                self._holds -= 1
            raise

    async def release(self) -> None:
        """Give up one hold. If it was the last, and the application does not use the store, the store is closed."""
        if self._pid != os.getpid():
            return
        with self._door:
            self._holds -= 1
            unused = not self._holds and not self._in_use
        if unused:
            await self._unused()

    def give_up(self) -> bool:
        """The application does not use the store any more. True: nobody holds it either, so it is to be closed."""
        self._notice_fork()
        with self._door:
            self._in_use = False
            if self._holds:
                self._opened = None
            return not self._holds

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            # The parent's store, its threads and even the lock as it was held stayed with the parent.
            self._forget()

    async def _get(self) -> Store:
        self._notice_fork()
        while True:
            with self._door:
                opening = self._opening
                mine = opening is None
                if opening is None:
                    opening = self._opening = Future()
                    # Running: whoever waits for it and gives up must not cancel it for the others.
                    opening.set_running_or_notify_cancel()
            if mine:
                return await self._open(opening)
            try:
                return opening.result() if opening.done() else await asyncio.wrap_future(opening)
            except GaveUp:
                # Whoever opened it was cancelled; that is no reason for anybody else to fail.
                continue

    async def _open(self, opening: Future[Store]) -> Store:
        try:
            store = await self._open_store()
            if self._ready is not None:
                try:
                    await self._ready(store)
                except BaseException:
                    await store.close()
                    raise
        except BaseException as exc:
            with self._door:
                if self._opening is opening:
                    self._opening = None
            opening.set_exception(exc if isinstance(exc, Exception) else GaveUp())
            raise
        opening.set_result(store)
        return store

    async def close(self) -> None:
        """Close the store if it is open and nobody holds it. The next call opens it again."""
        if not self.give_up():
            return
        with self._door:
            if self._holds:  # since the look above
                return
            opening, self._opening, self._opened = self._opening, None, None
        if opening is not None:
            await (await asyncio.wrap_future(opening)).close()
