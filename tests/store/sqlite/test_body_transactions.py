"""The transaction of a body blocks all writers, so it has a time limit that neither body nor event loop can exceed."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairlane.errors import FairlaneError, StoreUnavailable
from fairlane.model.job import Held
from fairlane.model.states import complete
from fairlane.store.sqlite import transactions
from fairlane.store.sqlite.file_lock import FileLock
from fairlane.store.sqlite.store import SqliteStore

PATIENCE = 30.0
OPEN_SECONDS = 0.4
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fairlane.db"


@pytest.fixture
async def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteStore]:
    monkeypatch.setattr(transactions, "LONGEST_SECONDS", OPEN_SECONDS)
    opened = await SqliteStore.open(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (n)")
    connection.close()
    yield opened
    await opened.close()


class Waiting(threading.Thread):
    """Another writer, and how long it had to wait."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.waited: float | None = None
        self.start()

    def run(self) -> None:
        lock, began = FileLock.of(self._path), time.monotonic()
        with lock:
            self.waited = time.monotonic() - began
        lock.close()


def rows(path: Path) -> int:
    connection = sqlite3.connect(path)
    [[count]] = connection.execute("SELECT count(*) FROM mine").fetchall()
    connection.close()
    return int(count)


async def test_a_body_that_blocks_its_event_loop_does_not_keep_the_file(store: SqliteStore, path: Path) -> None:
    opened = await store.transactions.begin()
    opened.connection.execute("INSERT INTO mine VALUES (1)")
    other = Waiting(path)
    time.sleep(4 * OPEN_SECONDS)  # noqa: ASYNC251 - that is the point
    assert other.waited is not None
    assert other.waited < 3 * OPEN_SECONDS
    with pytest.raises(StoreUnavailable, match="was rolled back"):
        opened.connection.execute("INSERT INTO mine VALUES (2)")
    with pytest.raises(StoreUnavailable, match="was rolled back"):
        await opened.commit("session", complete(Held("job", 1)), None)
    assert rows(path) == 0
    # The next transaction of this event loop begins.
    following = await asyncio.wait_for(store.transactions.begin(), PATIENCE)
    await following.roll_back()


async def test_a_transaction_that_begins_while_the_loop_is_blocked_does_not_keep_the_file(
    store: SqliteStore, path: Path
) -> None:
    beginning = asyncio.ensure_future(store.transactions.begin())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - its thread begins it meanwhile, while the loop is blocked
    other = Waiting(path)
    time.sleep(4 * OPEN_SECONDS)  # noqa: ASYNC251 - the loop stays blocked
    assert other.waited is not None
    opened = await asyncio.wait_for(beginning, PATIENCE)
    with pytest.raises(StoreUnavailable):
        opened.connection.execute("INSERT INTO mine VALUES (1)")
    await opened.roll_back()
    following = await asyncio.wait_for(store.transactions.begin(), PATIENCE)
    await following.roll_back()


async def test_a_statement_that_does_not_end_is_interrupted(store: SqliteStore, path: Path) -> None:
    opened = await store.transactions.begin()
    other = Waiting(path)
    with pytest.raises((sqlite3.OperationalError, StoreUnavailable)):
        opened.connection.execute(ENDLESS).fetchall()
    await asyncio.to_thread(other.join, PATIENCE)
    assert other.waited is not None
    await opened.roll_back()


async def test_nothing_is_written_outside_of_a_transaction_that_was_ended_under_its_body(
    store: SqliteStore, path: Path
) -> None:
    for _ in range(3):
        opened = await store.transactions.begin()

        def write(connection: sqlite3.Connection = opened.connection) -> int:
            written = 0
            cursor = connection.cursor()
            while True:
                try:
                    cursor.execute("INSERT INTO mine VALUES (?)", (written,))
                    connection.execute("SELECT n FROM mine LIMIT 1").fetchone()
                except (StoreUnavailable, sqlite3.OperationalError):
                    return written
                written += 1

        assert await asyncio.to_thread(write) > 0
        await opened.roll_back()
        assert rows(path) == 0


@pytest.mark.parametrize("ask", ["execute", "cursor"])
async def test_no_cursor_reads_from_a_transaction_that_has_ended(store: SqliteStore, ask: str) -> None:
    # A read that is not kept apart from the end could crash the interpreter.
    opened = await store.transactions.begin()
    sql = "SELECT 1 UNION SELECT 2"
    reading = opened.connection.execute(sql) if ask == "execute" else opened.connection.cursor().execute(sql)
    assert reading.fetchone() == (1,)
    await opened.roll_back()
    with pytest.raises(FairlaneError, match="the transaction of the job has ended"):
        reading.fetchone()
