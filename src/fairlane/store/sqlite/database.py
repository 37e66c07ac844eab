"""The file: where it is, how it is opened, and what its errors mean.

Writers of all processes take one file lock (`locks.py`) before they begin. SQLite's own busy timeout starves a writer
for half a second under load (measured), and SQLite before 3.51.3 can damage a file when one connection writes while
another resets the write-ahead log; under the lock neither can happen, because checkpoints run inside it too.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
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
"""Small on purpose: a page comes back from the system's cache faster than out of a large cold one (measured)."""
CHECKPOINT_PAGES = 10_000
FIRST_SOUND_SQLITE = (3, 51, 3)


def path_of(url: str) -> Path:
    """The file a URL names: ``sqlite:///relative.db`` or ``sqlite:////absolute.db``."""
    prefix = "sqlite:///"
    if not url.startswith(prefix) or len(url) == len(prefix):
        raise InvalidInput("url", "an SQLite store is named sqlite:///file.db, or sqlite:////path/to/file.db")
    path = unquote(url[len(prefix) :])
    if path.endswith(":memory:") or "?" in path:
        raise InvalidInput("url", "several processes share an SQLite store, so it must be a plain file")
    return Path(path).absolute()


def version_found() -> Finding:
    """Whether this Python's SQLite is a sound one."""
    if sqlite3.sqlite_version_info >= FIRST_SOUND_SQLITE:
        return Finding(Level.OK, "sqlite", f"version {sqlite3.sqlite_version}")
    return Finding(
        Level.WARN,
        "sqlite",
        f"version {sqlite3.sqlite_version} has the WAL-reset bug (before 3.51.3): a write beside a checkpoint can "
        "damage a file. Fairlane takes a lock around every write, so its own processes are safe",
        "let no other program write to the file, or use a Python with a newer SQLite",
    )


def open_for_writing(path: Path, kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    """The one connection of this process that writes. Call it under the lock. A file that it makes is private."""
    with suppress(OSError):
        # Only one that is new: closing a descriptor of a file that SQLite has open would drop SQLite's locks.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))
    return _opened(
        path,
        str(path),
        "PRAGMA journal_mode = WAL",
        # FULL: an acknowledged job survives a power failure. With group commit it costs little (measured).
        "PRAGMA synchronous = FULL",
        f"PRAGMA cache_size = -{CACHE_KIB}",
        "PRAGMA temp_store = MEMORY",
        # A checkpoint writes each page once however often it changed: rarer ones write less.
        f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}",
        kind=kind,
    )


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, and so never checkpoints outside the lock."""
    return _opened(path, f"file:{quote(str(path))}?mode=ro", f"PRAGMA cache_size = -{CACHE_KIB}")


def is_made(path: Path) -> bool:
    """Whether the file holds a store. Looking leaves no file behind."""
    if not path.exists():
        return False
    # Without a log nobody has the file open, and its schema is in the file itself. A reader would else make a log.
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
    """Bring the schema up to date, under the lock, each migration in a transaction of its own."""
    migrations = load_migrations(PACKAGE)
    with translated(path):
        connection.execute(
            "CREATE TABLE IF NOT EXISTS fairlane_schema (version INTEGER PRIMARY KEY, applied_at TEXT NOT NULL)"
        )
        [[version]] = connection.execute("SELECT coalesce(max(version), 0) FROM fairlane_schema").fetchall()
        if version > len(migrations):
            raise SchemaMismatch(
                f"{path} has schema {version}, and this version of Fairlane knows only up to {len(migrations)}. "
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
    """Plans are made for our indexes; statistics of a moment (somebody ran ANALYZE on a small file) tip them over."""
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sqlite_stat1'").fetchone() is not None:
        connection.execute("DELETE FROM sqlite_stat1 WHERE tbl LIKE 'fairlane~_%' ESCAPE '~'")
        connection.execute("ANALYZE sqlite_schema")


_UNAVAILABLE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL}
_CANNOT_GROW = {sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours, saying what to do."""
    try:
        yield
    except sqlite3.Error as exc:
        raise translate(exc, path) from exc


def translate(exc: sqlite3.Error, path: Path) -> StoreError:
    """Our error for one of SQLite's."""
    extended = getattr(exc, "sqlite_errorcode", None)
    code = extended & 0xFF if extended is not None else None
    if code == sqlite3.SQLITE_FULL or extended in _CANNOT_GROW:
        return StoreFull(
            f"{path} cannot grow: the disk is full, or the file has reached its limit. Nothing was stored."
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreReadOnly(f"{path} may not be written. Check the permissions of the file and its folder.")
    if code in _UNAVAILABLE:
        return StoreUnavailable(
            f"{path} cannot be used just now ({exc}). Does its folder exist? Is another program holding it?"
        )
    if code in _DAMAGED:
        return SchemaMismatch(
            f"{path} is not a Fairlane database, or it is damaged ({exc}). Restore it, or use another file."
        )
    return StoreError(f"{path}: {exc}")
