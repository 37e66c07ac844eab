"""The bare SQL loop: what SQLite alone gives for claiming and finishing jobs, as fast as it can honestly be.

One table and one partial index; no lanes, no fair order, no limits, no retries, no sessions, no event loop.
The same durability and page cache as the store, the same payload, and the same fence on every finish.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from .workload import PAYLOAD, RESULT, Pace, Stopwatch

SCHEMA = """
CREATE TABLE job (
    id       INTEGER PRIMARY KEY,
    state    INTEGER NOT NULL DEFAULT 0,
    priority INTEGER NOT NULL,
    payload  BLOB NOT NULL,
    session  TEXT,
    fence    INTEGER NOT NULL DEFAULT 0,
    result   BLOB,
    started  REAL,
    finished REAL
);
CREATE INDEX job_pending ON job (priority, id) WHERE state = 0;
"""
INSERT = "INSERT INTO job (priority, payload) VALUES (?, ?)"
CLAIM = """
UPDATE job SET state = 1, session = ?, fence = fence + 1, started = ?
WHERE id IN (SELECT id FROM job WHERE state = 0 ORDER BY priority, id LIMIT ?)
RETURNING id, fence, payload
"""
FINISH = """
UPDATE job SET state = 2, session = NULL, result = ?, finished = ?
WHERE id = ? AND session = ? AND fence = ?
"""


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """An empty database with the settings that the store uses."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -4096")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA wal_autocheckpoint = 10000")
        connection.executescript(SCHEMA)
        yield connection


def insert(connection: sqlite3.Connection, jobs: int) -> None:
    """Store `jobs` jobs in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(INSERT, ((1, PAYLOAD) for _ in range(jobs)))
    connection.execute("COMMIT")


def claim(connection: sqlite3.Connection, session: str, most: int) -> list[tuple[int, int, bytes]]:
    """Claim up to `most` jobs, in a transaction of its own."""
    connection.execute("BEGIN IMMEDIATE")
    claimed = connection.execute(CLAIM, (session, time.time(), most)).fetchall()
    connection.execute("COMMIT")
    return claimed


def finish(connection: sqlite3.Connection, session: str, claimed: list[tuple[int, int, bytes]]) -> int:
    """Complete claimed jobs, each fenced, in a transaction of its own; how many were accepted."""
    now = time.time()
    connection.execute("BEGIN IMMEDIATE")
    cursor = connection.executemany(FINISH, ((RESULT, now, id, session, fence) for id, fence, _ in claimed))
    connection.execute("COMMIT")
    return cursor.rowcount


def drain(path: Path, jobs: int, batch: int) -> Pace:
    """Load `jobs` jobs, then claim and finish them all; the pace of the latter."""
    with opened(path) as connection:
        insert(connection, jobs)
        finished = 0
        watch = Stopwatch()
        while claimed := claim(connection, "session", batch):
            finished += finish(connection, "session", claimed)
        pace = watch.pace(jobs)
    if finished != jobs:
        raise AssertionError(f"{finished} of {jobs} jobs were finished")
    return pace


def insert_rates(path: Path, singles: int, batches: int) -> tuple[float, float]:
    """Jobs per second: one per transaction, and 1,000 per transaction."""
    with opened(path) as connection:
        before = time.perf_counter()
        for _ in range(singles):
            insert(connection, 1)
        middle = time.perf_counter()
        for _ in range(batches):
            insert(connection, 1_000)
        after = time.perf_counter()
    return singles / (middle - before), 1_000 * batches / (after - middle)
