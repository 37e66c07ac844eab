"""Moves an application to the lab's store and back.

The application, its tasks, clients and handles all reach the store through one connection, so that is what is replaced
for a while. A store that was open before is put aside, not closed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec

from ..app import Fairlane
from ..errors import FairlaneError
from ..runtime.turn_session import TurnSessions
from ..store.clock import ManualClock
from ..store.instrumented import InstrumentedStore
from ..store.port import Store
from .own_connections import LabTransactions

T = TypeVar("T")
FREE_BYTES_NEEDED = 64 * 1024 * 1024
_relocated: WeakSet[Fairlane] = WeakSet()


@contextmanager
def relocated(app: Fairlane, clock: ManualClock, ready: Callable[[Store], Awaitable[None]]) -> Iterator[None]:
    """Move an application to an empty store on a temporary file; `ready` gets the store before anything else does."""
    if app in _relocated:
        raise FairlaneError(f"{app!r} is already in a lab: leave that one first, or use it here too")
    declare_queues = app._declare_queues

    async def prepare(store: Store) -> None:
        _accept_every_connection(store, Path(app.settings.url.removeprefix("sqlite:///")))
        await declare_queues(store)
        await ready(store)

    _relocated.add(app)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="fairlane-lab-", dir=_memory_directory()) as directory,
            _settings_restored(app),
            app.connection.set_aside(prepare),
        ):
            app.settings = msgspec.structs.replace(app.settings, url=f"sqlite:///{Path(directory) / 'lab.db'}")
            app._clock = clock
            # The session of the application's turns belongs to the store it was registered in.
            app._turn_sessions = TurnSessions(
                app.connection, app.open_store, app.settings.intervals, app.settings.retention
            )
            try:
                _run_in_thread(app.connection.store)
                yield
            finally:
                _run_in_thread(app._close_store)
                app.blocking.stop()
    finally:
        _relocated.discard(app)


def _accept_every_connection(store: Store, path: Path) -> None:
    assert isinstance(store, InstrumentedStore)
    sqlite: Any = store.inner
    sqlite.transactions = LabTransactions(sqlite.transactions, path)


@contextmanager
def _settings_restored(app: Fairlane) -> Iterator[None]:
    before = app.settings, app._clock, app._turn_sessions, app._sent
    app._sent = False
    try:
        yield
    finally:
        app.settings, app._clock, app._turn_sessions, app._sent = before


def _memory_directory() -> str | None:
    """A directory in memory, if there is one with room: a store syncs every write, and a test does not need that."""
    path = Path("/dev/shm")
    usable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    return str(path) if usable and shutil.disk_usage(path).free >= FREE_BYTES_NEEDED else None


def _run_in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do `work` in a thread with a loop of its own: a lab is entered and left with or without a running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
