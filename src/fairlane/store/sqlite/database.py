"""The database file: its path, its connections, its schema, its errors, and forks while a connection is in use.

Writers of all processes take one file lock (`file_lock.py`) before they begin. SQLite's own busy timeout lets a writer
starve for half a second under load (measured), and SQLite before 3.51.3 can damage a file when one connection writes
while another resets the write-ahead log. Neither happens under the lock, because checkpoints run inside it too.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from ...errors import InvalidInput, SchemaMismatch, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from ..diagnosis import Finding, Level
from ..shared.queries import load_migrations
from .file_lock import PRIVATE

PACKAGE = "fairlane.store.sqlite"
BUSY_MILLISECONDS = 5_000
CACHE_KIB = 4 * 1024
"""Small on purpose: reading a page from the system's cache is faster than from a large cold one (measured)."""
CHECKPOINT_PAGES = 10_000
FIRST_SOUND_SQLITE = (3, 51, 3)
LONGEST_FORK_DELAY = 5.0
"""Seconds after which a fork proceeds anyway: a program must not hang because its disk does."""


def path_of(url: str) -> Path:
    """Return the path of a URL: ``sqlite:///relative.db`` or ``sqlite:////absolute.db``."""
    prefix = "sqlite:///"
    if not url.startswith(prefix) or len(url) == len(prefix):
        raise InvalidInput("url", "the URL of a SQLite store is sqlite:///file.db or sqlite:////path/to/file.db")
    path = unquote(url[len(prefix) :])
    if path.endswith(":memory:") or "?" in path:
        raise InvalidInput("url", "several processes share a SQLite store, so it must be a plain file")
    return Path(path).absolute()


def version_found() -> Finding:
    """Return a finding about the version of SQLite that this Python uses."""
    if sqlite3.sqlite_version_info >= FIRST_SOUND_SQLITE:
        return Finding(Level.OK, "sqlite", f"version {sqlite3.sqlite_version}")
    return Finding(
        Level.WARN,
        "sqlite",
        f"version {sqlite3.sqlite_version} has the WAL-reset bug (fixed in 3.51.3): a write during a checkpoint can "
        "damage the file. Fairlane takes a lock for every write, so its own processes are safe",
        "do not let other programs write to the file, or use a Python with a newer SQLite",
    )


def open_for_writing(path: Path, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """Open a connection that writes, under the lock. A new file can be read and written by its owner only."""
    with suppress(OSError):
        # Only a new file: closing a descriptor of a file that SQLite has open would drop SQLite's locks.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    return _opened(
        path,
        str(path),
        "PRAGMA journal_mode = WAL",
        # FULL: an acknowledged job survives a power failure. With group commit it costs little (measured).
        "PRAGMA synchronous = FULL",
        f"PRAGMA cache_size = -{CACHE_KIB}",
        "PRAGMA temp_store = MEMORY",
        # A checkpoint writes each changed page once, so rarer checkpoints write less.
        f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}",
        kind=kind,
    )


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a connection that cannot write, and so never checkpoints outside the lock."""
    return _opened(path, f"file:{quote(str(path))}?mode=ro", f"PRAGMA cache_size = -{CACHE_KIB}")


def is_made(path: Path) -> bool:
    """Return whether the file holds a store. Creates no files."""
    if not path.exists():
        return False
    # Without a log no process has the file open, and its schema is in the file itself. Immutable: create no log.
    logged = path.with_name(path.name + "-wal").exists()
    name = f"file:{quote(str(path))}?mode=ro" + ("" if logged else "&immutable=1")
    with contextlib.closing(_opened(path, name)) as connection, translated(path):
        found = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'fairlane_schema'").fetchone()
    return found is not None


def _opened(
    path: Path, name: str, *pragmas: str, kind: type[sqlite3.Connection] = sqlite3.Connection
) -> sqlite3.Connection:
    with translated(path):
        connection = sqlite3.connect(
            name,
            uri=name.startswith("file:"),
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
            timeout=BUSY_MILLISECONDS / 1000,
            factory=kind,
        )
        try:
            for pragma in pragmas:
                connection.execute(pragma)
        except BaseException:
            connection.close()
            raise
        return connection


def migrate(connection: sqlite3.Connection, path: Path) -> int:
    """Apply new migrations under the lock, each in its own transaction. Returns the version of the schema."""
    migrations = load_migrations(PACKAGE)
    with translated(path):
        connection.execute(
            "CREATE TABLE IF NOT EXISTS fairlane_schema (version INTEGER PRIMARY KEY, applied_at TEXT NOT NULL)"
        )
        [[version]] = connection.execute("SELECT coalesce(max(version), 0) FROM fairlane_schema").fetchall()
        if version > len(migrations):
            raise SchemaMismatch(
                f"{path} has schema {version}, but this version of Fairlane supports only up to {len(migrations)}. "
                "Upgrade Fairlane in this process."
            )
        for migration in migrations[version:]:
            try:
                connection.executescript(
                    f"BEGIN IMMEDIATE;\n{migration.script}\n"
                    f"INSERT INTO fairlane_schema VALUES ({migration.number}, datetime('now'));\nCOMMIT;"
                )
            except sqlite3.Error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        _forget_statistics(connection)
        return len(migrations)


def _forget_statistics(connection: sqlite3.Connection) -> None:
    """Delete statistics (from ANALYZE on a small file, for example): they make SQLite choose other indexes."""
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sqlite_stat1'").fetchone() is not None:
        connection.execute("DELETE FROM sqlite_stat1 WHERE tbl LIKE 'fairlane~_%' ESCAPE '~'")
        connection.execute("ANALYZE sqlite_schema")


_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_UNAVAILABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL}
_CANNOT_GROW = {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as store errors that say what to do."""
    try:
        yield
    except sqlite3.Error as exc:
        raise translate(exc, path) from exc


def translate(exc: sqlite3.Error, path: Path) -> StoreError:
    """Return the store error for an error of SQLite."""
    extended = getattr(exc, "sqlite_errorcode", None)
    code = extended & 0xFF if extended is not None else None
    if code == sqlite3.SQLITE_FULL or extended in _CANNOT_GROW:
        return StoreFull(
            f"{path} cannot grow: the disk is full, or the file has reached its limit. Nothing was stored."
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreReadOnly(f"{path} is not writable. Check the permissions of the file and its folder.")
    if code in _LOCKED:
        return StoreUnavailable(
            f"{path} is unavailable ({exc}): an open transaction holds it, perhaps your own. Keep transactions short, "
            "and open the application before you begin one (async with app, or any call of app.blocking)."
        )
    if code in _UNAVAILABLE:
        return StoreUnavailable(
            f"{path} is unavailable ({exc}). Check that its folder exists and that no other program holds it open."
        )
    if code in _DAMAGED:
        return SchemaMismatch(
            f"{path} is not a Fairlane database, or it is damaged ({exc}). Restore a backup, or use another file."
        )
    return StoreError(f"{path}: {exc}")


class _ForkGuard:
    """Makes forks wait until no connection is in use.

    SQLite records the locks of its connections in the memory of the process. A child forked during a transaction has a
    copy of these records, and would consider the file locked for as long as it lives. So every use of a connection is
    inside ``with FORK_GUARD``, and a fork waits for its end.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(before=self._wait_and_lock, after_in_parent=self._unlock, after_in_child=self._reset)

    def _reset(self) -> None:
        """Start without users, also in the child: the threads that use connections stay in the parent."""
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _wait_and_lock(self) -> None:
        """Wait until no connection is in use. The lock stays taken, so that no new use begins."""
        self._changed.acquire()
        self._changed.wait_for(lambda: self._count == 0, LONGEST_FORK_DELAY)

    def _unlock(self) -> None:
        self._changed.release()


FORK_GUARD = _ForkGuard()
