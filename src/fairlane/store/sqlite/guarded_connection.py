"""A connection whose transaction another thread may end: between two statements of its user, never during one.

The sqlite3 module does not serialize threads. A roll-back during a statement could crash the interpreter; and between a
roll-back and the close, another statement would run and commit on its own.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from ...errors import FairlaneError

T = TypeVar("T")
INTERRUPT_SECONDS = 0.05


class GuardedConnection(sqlite3.Connection):
    """Runs one statement at a time, and none after `refuse`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._guard = threading.RLock()
        self._refusal: FairlaneError | None = None
        super().__init__(*args, **kwargs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude other threads. A statement that runs in another thread is interrupted."""
        while not self._guard.acquire(timeout=INTERRUPT_SECONDS):
            self.interrupt()
        try:
            yield
        finally:
            self._guard.release()

    def refuse(self, error: FairlaneError) -> None:
        """Raise `error` for every statement from now on."""
        self._refusal = error

    def guarded(self, call: Callable[..., T], *args: Any) -> T:
        """Call something that may run a statement, unless `refuse` was called."""
        with self._guard:
            if self._refusal is not None:
                raise self._refusal
            return call(*args)

    def cursor(self, factory: Any = None) -> Any:
        return self.guarded(super().cursor, GuardedCursor if factory is None else factory)

    # Not by the methods of `sqlite3.Connection`: they return a cursor of its own class, which reads without the guard.

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)

    def executemany(self, *args: Any) -> Any:
        return self.cursor().executemany(*args)

    def executescript(self, *args: Any) -> Any:
        return self.cursor().executescript(*args)

    def commit(self) -> None:
        self.guarded(super().commit)

    def rollback(self) -> None:
        self.guarded(super().rollback)

    def __exit__(self, *error: Any) -> Literal[False]:
        return self.guarded(super().__exit__, *error)


class GuardedCursor(sqlite3.Cursor):
    """Runs statements, and reads, which may continue them, under the guard of its connection."""

    connection: GuardedConnection

    def execute(self, *args: Any) -> Any:
        return self.connection.guarded(super().execute, *args)

    def executemany(self, *args: Any) -> Any:
        return self.connection.guarded(super().executemany, *args)

    def executescript(self, *args: Any) -> Any:
        return self.connection.guarded(super().executescript, *args)

    def fetchone(self) -> Any:
        return self.connection.guarded(super().fetchone)

    def fetchmany(self, *args: Any) -> Any:
        return self.connection.guarded(super().fetchmany, *args)

    def fetchall(self) -> Any:
        return self.connection.guarded(super().fetchall)

    def __next__(self) -> Any:
        return self.connection.guarded(super().__next__)
