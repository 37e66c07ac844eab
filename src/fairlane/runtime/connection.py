"""The store that a process works with: opened once, when first needed, and again after a fork.

The application uses it, and so may workers: each worker holds it for as long as it runs, and `close` ends only the
application's own use. The store is closed when nothing uses it, so a task function that closes the application does not
stop the worker that runs it, and no second store is opened beside the first.

One store serves every event loop and thread of the process. A plain lock guards the state and is never held across an
await: callers that arrive while the store is being opened wait for the same future.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from ..store.per_process import PerProcess
from ..store.port import Store

OpenStore = Callable[[], Awaitable[Store]]


class OpeningCancelled(Exception):
    """The call that was opening the store was cancelled."""


class _State:
    """What one process knows of its store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.opening: Future[Store] | None = None
        self.opened: Store | None = None
        self.holds = 0
        self.in_use = False


class Connection:
    """Opens the store for its first user and closes it after its last."""

    def __init__(
        self,
        open_store: OpenStore,
        ready: Callable[[Store], Awaitable[None]] | None = None,
        unused: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._open_store = open_store
        self._ready = ready
        self._unused = unused or self.close
        """Called when the last hold is released and the application does not use the store either."""
        self._state = PerProcess(_State)

    @property
    def opened(self) -> Store | None:
        """The store if it is open already, without waiting and without a lock."""
        state = self._state.existing()
        return None if state is None else state.opened

    async def store(self) -> Store:
        """The open store. If opening fails, every caller that waited gets the error, and the next call tries again."""
        state = self._state.get()
        with state.lock:
            state.in_use = True
        store = await self._get(state)
        with state.lock:
            # Unless it was closed meanwhile.
            if state.in_use and state.opening is not None:
                state.opened = store
        return store

    async def hold(self) -> Store:
        """The open store, which stays open until `release` was called as often as this, even if `close` is called."""
        state = self._state.get()
        with state.lock:
            state.holds += 1
        try:
            return await self._get(state)
        except BaseException:
            with state.lock:
                state.holds -= 1
            raise

    async def release(self) -> None:
        """Release one hold. If it was the last, and the application does not use the store, the store is closed."""
        state = self._state.existing()
        if state is None:
            # The hold belongs to the parent process.
            return
        with state.lock:
            state.holds -= 1
            unused = not state.holds and not state.in_use
        if unused:
            await self._unused()

    def give_up(self) -> bool:
        """End the application's own use of the store. True when nothing holds it either, so that it is to be closed."""
        state = self._state.get()
        with state.lock:
            state.in_use = False
            if state.holds:
                state.opened = None
            return not state.holds

    @contextmanager
    def set_aside(self, ready: Callable[[Store], Awaitable[None]]) -> Iterator[None]:
        """Put the store aside for a block that opens and closes one of its own, with another `ready`."""
        before = self._state, self._ready
        self._state, self._ready = PerProcess(_State), ready
        try:
            yield
        finally:
            self._state, self._ready = before

    async def _get(self, state: _State) -> Store:
        while True:
            with state.lock:
                opening = state.opening
                mine = opening is None
                if opening is None:
                    opening = state.opening = Future()
                    # A running future cannot be cancelled: a caller that stops waiting must not cancel it for others.
                    opening.set_running_or_notify_cancel()
            if mine:
                return await self._open(state, opening)
            try:
                return opening.result() if opening.done() else await asyncio.wrap_future(opening)
            except OpeningCancelled:
                # Only the caller that was opening it was cancelled: try again.
                continue

    async def _open(self, state: _State, opening: Future[Store]) -> Store:
        try:
            store = await self._open_store()
            if self._ready is not None:
                try:
                    await self._ready(store)
                except BaseException:
                    await store.close()
                    raise
        except BaseException as exc:
            with state.lock:
                if state.opening is opening:
                    state.opening = None
            opening.set_exception(exc if isinstance(exc, Exception) else OpeningCancelled())
            raise
        opening.set_result(store)
        return store

    async def close(self) -> None:
        """Close the store if it is open and nothing holds it. The next call opens it again."""
        if not self.give_up():
            return
        state = self._state.get()
        with state.lock:
            if state.holds:  # taken since the check above
                return
            opening, state.opening, state.opened = state.opening, None, None
        if opening is not None:
            await (await asyncio.wrap_future(opening)).close()
