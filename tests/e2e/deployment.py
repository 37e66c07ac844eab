"""The deployments that the scenarios run on. They differ in their URL, and in two operations that need more than a URL:
making the store unavailable, and reading all of its contents.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from pprint import pformat
from typing import Any, Protocol

import msgspec
import psycopg
import redis
from psycopg.rows import dict_row

from fairlane.store.deployment import with_redis
from tests.servers import postgresql, valkey
from tests.servers.stores import EVERY_VERSION
from tests.store.lock_holder import lock_held_elsewhere

MOVING = ("expires", "claim")
"""Columns that a heartbeat, a renewed term or an empty claim writes."""
MOVING_FIELDS = (b"steps",)
"""The same on Redis: it counts everything that is written."""


class Deployment(Protocol):
    """One store of its own."""

    @property
    def url(self) -> str:
        """What FAIRLANE_URL is set to."""

    def down(self) -> contextlib.AbstractContextManager[None]:
        """Keep the store from answering inside the block."""

    def contents(self) -> dict[str, list[str]]:
        """All of its contents, by table, without the times at which leases and terms end."""

    def close(self) -> None:
        """Release what the end of the test does not remove by itself."""


class SqliteDeployment:
    """A file of its own in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "fairlane.db"
        self.url = f"sqlite:///{self._path}"

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        # Every write of every process takes this lock first: none is answered while another process holds it.
        with lock_held_elsewhere(self._path):
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
        return written(dict(zip(fields, row, strict=True)) for row in cursor)

    def close(self) -> None:
        """The file goes with its directory."""


class PostgresqlDeployment:
    """A database on a server of its own, which writes to the disk as a server in use does.

    To make it unavailable the server is frozen, not stopped. Such an outage is hard to detect: connections stay open,
    new ones are accepted, requests are received but not answered, and all of them are executed when the server
    continues, also if their clients have timed out. A stopped server rejects connections, which clients detect at once.
    """

    def __init__(self, directory: Path) -> None:
        self._server = postgresql.borrowed_server()
        try:
            self.url = self._server.fresh_database()
        except BaseException:
            postgresql.give_back(self._server)
            raise

    def down(self) -> contextlib.AbstractContextManager[None]:
        return self._server.frozen()

    def restart(self) -> None:
        """Kill the server, as the end of a machine does, and start it again."""
        self._server.kill()
        self._server.start()

    def contents(self) -> dict[str, list[str]]:
        with contextlib.closing(psycopg.connect(self.url, row_factory=dict_row)) as connection:
            tables = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'fairlane' ORDER BY tablename"
            ).fetchall()
            return {table["tablename"]: self._rows(connection, table["tablename"]) for table in tables}

    def _rows(self, connection: psycopg.Connection[dict[str, Any]], table: str) -> list[str]:
        rows = connection.execute(f'SELECT * FROM fairlane."{table}"').fetchall()
        return written(added_up(rows) if table == "tally" else rows)

    def close(self) -> None:
        """Another test goes on with the server."""
        self._server.done(self.url)
        postgresql.give_back(self._server)


class PostgresqlRedisDeployment:
    """Such a database, with a Redis of its own for high priority and one for the others.

    It is PostgreSQL that is taken down. Everything that matters is there, so that is what it holds too.
    """

    def __init__(self, directory: Path) -> None:
        self._database = PostgresqlDeployment(directory)
        self.redis: list[valkey.ValkeyServer] = []
        try:
            self.redis += [valkey.own_server(), valkey.own_server()]
        except BaseException:
            self.close()
            raise
        high, low = (server.url for server in self.redis)
        self.url = with_redis(self._database.url, {"redis_high": high, "redis_low": low})

    def down(self) -> contextlib.AbstractContextManager[None]:
        return self._database.down()

    def restart(self) -> None:
        """Kill PostgreSQL and start it again."""
        self._database.restart()

    def contents(self) -> dict[str, list[str]]:
        return self._database.contents()

    def close(self) -> None:
        """The servers of the tokens end; another test goes on with that of the database."""
        for server in self.redis:
            server.close()
        self._database.close()


class RedisDeployment:
    """A namespace on a server of its own, which writes every command to the disk before it answers.

    It is taken down by freezing it, for the reason given above.
    """

    def __init__(self, directory: Path, program: Path | None = None) -> None:
        self._server = valkey.own_server(program, durable=True)
        self.url = self._server.url

    def down(self) -> contextlib.AbstractContextManager[None]:
        return self._server.frozen()

    def contents(self) -> dict[str, list[str]]:
        with redis.Redis(port=self._server.port) as client:
            return {key.decode(): self._rows(client, key) for key in sorted(client.scan_iter(count=1000))}

    def _rows(self, client: redis.Redis, key: bytes) -> list[str]:
        kind = client.type(key)
        if kind == b"hash":
            found = client.hgetall(key)
            return written(
                {"field": field} | _record(value) for field, value in found.items() if field not in MOVING_FIELDS
            )
        if kind == b"zset":
            # Its scores are when leases end.
            withscores = not key.endswith(b":present")
            return written({"member": member} for member in client.zrange(key, 0, -1, withscores=withscores))
        if kind == b"set":
            return written({"member": member} for member in client.smembers(key))
        return written([_record(client.get(key))])

    def close(self) -> None:
        """Nobody else uses the server."""
        self._server.close()


def _record(value: Any) -> dict[str, Any]:
    """What a value holds: a map, or something that is told as it is."""
    try:
        found = msgspec.msgpack.decode(value)
    except msgspec.DecodeError:
        found = value
    # A table of Lua has no order.
    return dict(sorted(found.items())) if isinstance(found, dict) else {"value": found}


def written(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows as text, in an order of their own, without the columns that move all the time."""
    # pformat sorts the keys of nested tables too, whose order Lua does not keep.
    return sorted(pformat({k: v for k, v in row.items() if k not in MOVING}) for row in rows)


def added_up(tally: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each queue and class: the rows of a tally are differences, which the leader adds up now and then."""
    sums: dict[tuple[int, int], dict[str, Any]] = {}
    for row in tally:
        total = sums.setdefault((row["queue"], row["class"]), {"queue": row["queue"], "class": row["class"]})
        for name in row.keys() - {"id", "queue", "class"}:
            total[name] = total.get(name, 0) + row[name]
    return [dict(sorted(total.items())) for total in sums.values()]


MakeDeployment = Callable[[Path], Deployment]
DEPLOYMENTS: dict[str, MakeDeployment] = {
    "sqlite": SqliteDeployment,
    "postgresql": PostgresqlDeployment,
    "redis": RedisDeployment,
    "postgresql_redis": PostgresqlRedisDeployment,
}
if EVERY_VERSION in os.environ and valkey.second_version() is not None:
    DEPLOYMENTS[f"redis{valkey.second_version()}"] = partial(RedisDeployment, program=valkey.system())
