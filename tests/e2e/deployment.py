"""The deployments the scenarios run on. The URL is all that differs, but for two hooks no URL can offer: taking the
store down, and reading all that it holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol


class Deployment(Protocol):
    """One store of its own."""

    @property
    def url(self) -> str:
        """What FAIRLANE_URL is set to."""

    def down(self) -> contextlib.AbstractContextManager[None]:
        """Keep the store from answering inside the block."""

    def contents(self) -> dict[str, list[str]]:
        """Everything it holds, table by table, without the moments at which leases and terms end."""


class SqliteDeployment:
    """A file of its own in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "fairlane.db"
        self.url = f"sqlite:///{self._path}"

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        # Every write of every process takes this lock first: while somebody else has it, none is answered.
        with self._path.with_name(self._path.name + "-lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def contents(self) -> dict[str, list[str]]:
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            tables = [
                name
                for (name,) in connection.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'fairlane%' ORDER BY name"
                )
            ]
            return {table: self._rows(connection, table) for table in tables}

    def _rows(self, connection: sqlite3.Connection, table: str) -> list[str]:
        cursor = connection.execute(f"SELECT * FROM {table}")
        fields = [column[0] for column in cursor.description]
        rows = (dict(zip(fields, row, strict=True)) for row in cursor)
        return sorted(repr({k: v for k, v in row.items() if k not in ("expires", "claim")}) for row in rows)


MakeDeployment = Callable[[Path], Deployment]
DEPLOYMENTS: dict[str, MakeDeployment] = {"sqlite": SqliteDeployment}
