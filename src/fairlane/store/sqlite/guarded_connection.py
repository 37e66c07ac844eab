"""A connection whose transaction another thread may end: between two statements of its user, never within one.

sqlite3 leaves it to its users to keep threads apart. Rolled back under a running statement, the interpreter could
crash; and between a roll-back and the close, the next statement would be committed by itself.
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
    """Runs one statement at a time, and none after `end`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._guard = threading.RLock()
        self._over: FairlaneError | None = None
        super().__init__(*args, **kwargs)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads away. A statement that runs in one of them is interrupted."""
        while not self._guard.acquire(timeout=INTERRUPT_SECONDS):
            self.interrupt()
        try:
            yield
        finally:
            self._guard.release()

    def refuse(self, error: FairlaneError) -> None:
        """Raise `error` for every statement from now on."""
        self._over = error

    def guarded(self, call: Callable[..., T], *args: Any) -> T:
        """Call something that may run a statement."""
        with self._guard:
            if self._over is not None:
                raise self._over
            return call(*args)

    def cursor(self, factory: Any = None) -> Any:
        return self.guarded(super().cursor, GuardedCursor if factory is None else factory)

    def execute(self, *args: Any) -> Any:
        return self.guarded(super().execute, *args)

    def executemany(self, *args: Any) -> Any:
        return self.guarded(super().executemany, *args)

    def executescript(self, *args: Any) -> Any:
        return self.guarded(super().executescript, *args)

    def commit(self) -> None:
        self.guarded(super().commit)

    def rollback(self) -> None:
        self.guarded(super().rollback)

    def __exit__(self, *error: Any) -> Literal[False]:
        return self.guarded(super().__exit__, *error)


class GuardedCursor(sqlite3.Cursor):
    """Its statements run under the guard of its connection; so do its reads, which may run them on."""

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
