"""The store a process works with: opened when first needed, once, and anew after a fork.

One store serves every event loop and thread of the process. The door is a plain lock that is never held across an
await: whoever comes while another opens waits for the same future.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from .store import Store

OpenStore = Callable[[], Awaitable[Store]]


class GaveUp(Exception):
    """Whoever was opening the store has been cancelled."""


class Connection:
    """Gives the store to whoever asks."""

    def __init__(self, open_store: OpenStore, ready: Callable[[Store], Awaitable[None]] | None = None) -> None:
        self._open_store = open_store
        self._ready = ready
        self._forget()

    def _forget(self) -> None:
        self._door = threading.Lock()
        self._opening: Future[Store] | None = None
        self._opened: Store | None = None
        # Last: whoever sees his own number here finds the rest made anew.
        self._pid = os.getpid()

    @property
    def opened(self) -> Store | None:
        """The store, when it is open already: without waiting, and without a lock."""
        return self._opened if self._pid == os.getpid() else None

    async def store(self) -> Store:
        """The open store. An error while opening is told to everybody who waited, and the next call tries again."""
        if self._pid != os.getpid():
            # The parent's store, its threads and even the lock as it was held stayed with the parent.
            self._forget()
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
                self._opening = None
            opening.set_exception(exc if isinstance(exc, Exception) else GaveUp())
            raise
        opening.set_result(store)
        with self._door:
            # Unless it was closed meanwhile.
            if self._opening is opening:
                self._opened = store
        return store

    async def close(self) -> None:
        """Close the store if it is open. The next call opens it again."""
        if self._pid != os.getpid():
            self._forget()
        with self._door:
            opening, self._opening, self._opened = self._opening, None, None
        if opening is not None:
            await (await asyncio.wrap_future(opening)).close()
