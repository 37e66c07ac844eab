"""What a store holds, in a form that every write changes, also one that writes the same again."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import psycopg

TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'fairlane' ORDER BY tablename"


def content(url: str) -> list[str]:
    """The files of a store, or where its rows lie and which transactions wrote them."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        files = [path, path.with_name(path.name + "-wal")]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        return [
            f"{table} {place} {writer}"
            for (table,) in connection.execute(TABLES).fetchall()
            for place, writer in connection.execute(f'SELECT ctid, xmin FROM fairlane."{table}"')
        ]
