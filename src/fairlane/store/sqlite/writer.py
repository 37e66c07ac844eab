"""The only thread of a process that writes: many callers, one transaction (group commit).

Callers submit functions of a `Step`. All functions that are waiting share the next transaction, so the disk is flushed
once for all of them. Each function has a savepoint: one that raises does not affect the others. Results are returned,
and wake-ups published, after the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ...errors import FairlaneError, StoreError, StoreUnavailable
from ..clock import Clock
from . import database
from .file_lock import WAIT_SECONDS, FileLock
from .records import QueueCache
from .step import Step

T = TypeVar("T")
MOST_PER_COMMIT = 256
LAST_SECONDS = 2.0
"""Time for the commits in progress when a store is closed, in addition to the wait for the lock."""
logger = logging.getLogger("fairlane.store")
_ONE_CALLERS_FAULT = (
    FairlaneError,
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""Errors that fail one call and not the other calls of its transaction."""


class _Request:
    """A submitted function and its result."""

    __slots__ = ("answer", "error", "future", "loop", "since", "work")

    def __init__(self, work: Callable[[Step], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.since = time.monotonic()
        self.future: asyncio.Future[Any] = loop.create_future()
        self.answer: Any = None
        self.error: BaseException | None = None


class Writer:
    """Owns the writing connection. Open it, submit to it from any event loop, close it."""

    def __init__(self, path: Path, clock: Clock, publish: Callable[[Iterable[str]], None]) -> None:
        self._path = path
        self._clock = clock
        self._publish = publish
        self._lock = FileLock.of(path)
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._queue_cache = QueueCache()
        self._pid = os.getpid()
        # Held by `submit` from the check until the put, so that nothing is submitted after the end marker of `close`.
        self._door = threading.Lock()
        self._closed = False
        self._waiting: list[_Request] | None = None
        """The batch to write once the lock is free, while the writer waits for it; guarded by `_door`."""
        try:
            with self._lock, database.FORK_GUARD:
                self._connection = database.open_for_writing(path)
                try:
                    self.version = database.migrate(self._connection, path)
                except BaseException:
                    self._connection.close()
                    raise
        except BaseException:
            self._lock.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"fairlane-writer-{path.name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Step], T]) -> asyncio.Future[T]:
        """Run `work` in a transaction. The future is done after the commit."""
        request = _Request(work, asyncio.get_running_loop())
        with self._door:
            self.check_usable()
            self._requests.put(request)
        return request.future

    def check_usable(self) -> None:
        """Raise `StoreError` if the store is closed, or was opened before a fork."""
        if self._closed:
            raise StoreError("this store is closed; open it again")
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; open it again in the child process")

    def close(self) -> None:
        """Finish what was submitted, then close the file."""
        with self._door:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._pid:
            return
        self._requests.put(None)
        self._thread.join(WAIT_SECONDS + LAST_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s was not closed: its writer is still waiting for the lock", self._path)
            return
        try:
            # The last connection to close runs a checkpoint, so closing needs the lock.
            with self._lock, database.FORK_GUARD:
                self._connection.close()
        except StoreUnavailable as exc:
            logger.warning("%s was not closed: %s", self._path, exc)
        else:
            self._lock.close()

    def _run(self) -> None:
        running = True
        while running:
            first = self._requests.get()
            batch: list[_Request] = []
            while first is not None:
                # Skip a call that was cancelled before it began.
                if not first.future.cancelled():
                    batch.append(first)
                if len(batch) >= MOST_PER_COMMIT:
                    break
                try:
                    first = self._requests.get_nowait()
                except Empty:
                    break
            running = first is not None
            if batch:
                self._serve(batch)

    def _serve(self, batch: list[_Request]) -> None:
        topics: set[str] = set()
        try:
            # Take the lock first: a fork must not wait for a file that another process, or its own caller, has locked.
            batch = self._locked(batch)
            try:
                if batch:
                    with database.FORK_GUARD:
                        self._commit_or_roll_back(batch, topics)
            finally:
                self._lock.release()
        except BaseException as exc:  # every caller must get an answer
            self._queue_cache.clear()
            error = database.translate(exc, self._path) if isinstance(exc, sqlite3.Error) else exc
            for request in batch:
                request.error = error
        else:
            if topics:
                self._publish(topics)
        self._answer_all(batch)

    def _locked(self, batch: list[_Request]) -> list[_Request]:
        """Take the lock. Returns the requests of the batch that did not time out while waiting."""
        with self._door:
            self._waiting = batch
        try:
            self._lock.acquire(self._time_out)
        finally:
            with self._door:
                batch[:], self._waiting = self._waiting, None
        return batch

    def _time_out(self, error: StoreUnavailable) -> None:
        """Fail requests that have waited too long for the lock. Called in another thread while the writer waits."""
        with self._door:
            if self._waiting is None:
                return
            since = time.monotonic() - WAIT_SECONDS
            late = [request for request in self._waiting if request.since <= since]
            self._waiting = [request for request in self._waiting if request.since > since]
            behind: list[_Request | None] = []
            with contextlib.suppress(Empty):
                while True:
                    behind.append(self._requests.get_nowait())
            for request in behind:
                if request is not None and request.since <= since:
                    late.append(request)
                else:
                    self._requests.put(request)
        for request in late:
            request.error = error
        self._answer_all(late)

    def _answer_all(self, batch: list[_Request]) -> None:
        for loop in {request.loop for request in batch}:
            try:
                loop.call_soon_threadsafe(_answer, [r for r in batch if r.loop is loop])
            except RuntimeError:
                continue  # the loop is closed: no caller is left

    def _roll_back(self) -> None:
        """Roll back a failed transaction. Errors are ignored: the thread must go on."""
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _commit_or_roll_back(self, batch: list[_Request], topics: set[str]) -> None:
        try:
            self._commit(batch, topics)
        except BaseException:
            self._roll_back()
            raise

    def _commit(self, batch: list[_Request], topics: set[str]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        for request in batch:
            step = Step(connection, self._queue_cache, self._clock)
            connection.execute("SAVEPOINT one")
            try:
                request.answer = request.work(step)
                step.flush()
            except _ONE_CALLERS_FAULT as exc:
                # Other errors (a full disk, a lost file) fail the whole transaction.
                connection.execute("ROLLBACK TO one")
                self._queue_cache.clear()
                request.error = database.translate(exc, self._path) if isinstance(exc, sqlite3.Error) else exc
            else:
                topics |= step.topics
            connection.execute("RELEASE one")
        connection.execute("COMMIT")


def _answer(batch: list[_Request]) -> None:
    for request in batch:
        if request.future.done():
            continue
        if request.error is not None:
            request.future.set_exception(request.error)
        else:
            request.future.set_result(request.answer)
