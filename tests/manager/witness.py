"""The contents of a store, in a form that every write changes, even one that writes the same values again."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import psycopg
import redis

from fairlane.store.redis.address import parse

TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'fairlane' ORDER BY tablename"


def content(url: str) -> list[str]:
    """The files of a store, the locations and transactions of its rows, or the number of steps that have written."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        files = [path, path.with_name(path.name + "-wal")]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    if url.startswith("redis"):
        address = parse(url)
        with redis.Redis.from_url(url.partition("?")[0]) as client:
            return [repr(client.hget(f"{address.prefix}counter", "steps"))]
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        return [
            f"{table} {place} {writer}"
            for (table,) in connection.execute(TABLES).fetchall()
            for place, writer in connection.execute(f'SELECT ctid, xmin FROM fairlane."{table}"')
        ]
