"""Moves an application to a store of the lab's, and back.

Nobody who holds the application, a task, a client or a handle notices: they all reach the store through the one
connection, so that is what is emptied for a while. What was open before is set aside, not closed.
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
from ..runtime.turn_session import Waiter
from ..store.clock import ManualClock
from ..store.port import Store

T = TypeVar("T")
ROOM = 64 * 1024 * 1024
_moved: WeakSet[Fairlane] = WeakSet()


@contextmanager
def moved(app: Fairlane, clock: ManualClock, ready: Callable[[Store], Awaitable[None]]) -> Iterator[None]:
    """Let an application live in an empty store on a temporary file; `ready` is told of the store before anybody."""
    if app in _moved:
        raise FairlaneError(f"{app!r} is in a lab already: leave that one first, or use it here too")
    _moved.add(app)
    try:
        with tempfile.TemporaryDirectory(prefix="fairlane-lab-", dir=_memory()) as directory, _set_aside(app):
            app.settings = msgspec.structs.replace(app.settings, url=f"sqlite:///{Path(directory) / 'lab.db'}")
            app._clock = clock
            # The session that turns wait by belongs to the store it was registered in.
            app._waiter = Waiter(app.connection, app.open_store, app.settings.intervals, app.settings.retention)
            declare_queues = app._declare_queues

            async def begin(store: Store) -> None:
                await declare_queues(store)
                await ready(store)

            app.connection._ready = begin
            try:
                _elsewhere(app.connection.store)
                yield
            finally:
                _elsewhere(app._let_go)
                app.blocking.stop()
    finally:
        _moved.discard(app)


@contextmanager
def _set_aside(app: Fairlane) -> Iterator[None]:
    connection = app.connection
    theirs = (app.settings, app._clock, app._waiter, app._sent)
    # The process belongs to it: a store that was opened before a fork must not look like one of the child's.
    their_store = (connection._opening, connection._opened, connection._ready, connection._pid)
    their_uses = (connection._holds, connection._in_use)
    app._sent, connection._opening, connection._opened = False, None, None
    connection._holds, connection._in_use = 0, False
    try:
        yield
    finally:
        app.settings, app._clock, app._waiter, app._sent = theirs
        connection._opening, connection._opened, connection._ready, connection._pid = their_store
        connection._holds, connection._in_use = their_uses


def _memory() -> str | None:
    """Where files lie in memory, if anywhere: a store waits for the disk at every write, a test has no reason to."""
    place = Path("/dev/shm")
    roomy = place.is_dir() and os.access(place, os.W_OK | os.X_OK) and shutil.disk_usage(place).free >= ROOM
    return str(place) if roomy else None


def _elsewhere(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do `work` in a loop and a thread of its own: a lab is entered and left with or without a running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
