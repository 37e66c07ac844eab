"""In a lab, jobs are stored on a connection of any driver that a store on SQL accepts.

The code under test stores its jobs in a transaction on its own database, which is not the lab's. So they are stored in
the lab at once, and stay there if that transaction is rolled back.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from ..model.job import Enqueued, NewJob
from ..store.transactions import OpenTransaction, OtherDatabase, Transactions

DRIVERS = frozenset({"asyncpg", "django", "psycopg", "sqlalchemy", "sqlite3"})


class LabTransactions:
    """The transactions of a lab's store, for connections to other databases too."""

    def __init__(self, transactions: Transactions, path: Path) -> None:
        self._transactions = transactions
        self._path = path

    async def prepare(self, jobs: Sequence[NewJob]) -> None:
        """Create what these jobs need before they can be stored."""
        await self._transactions.prepare(jobs)

    async def enqueue_on(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs in the open transaction of a connection to the lab, or at once."""
        return self.enqueue_here(connection, jobs)

    def enqueue_here(self, connection: object, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs in the open transaction of a connection to the lab, or at once."""
        try:
            return self._transactions.enqueue_here(connection, jobs)
        except OtherDatabase:
            if not any(kind.__module__.partition(".")[0] in DRIVERS for kind in type(connection).__mro__):
                raise
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as own:
            own.execute("BEGIN IMMEDIATE")
            answers = self._transactions.enqueue_here(own, jobs)
            own.execute("COMMIT")
            return answers

    async def begin(self) -> OpenTransaction:
        """Begin a transaction on a connection of the lab's store."""
        return await self._transactions.begin()
