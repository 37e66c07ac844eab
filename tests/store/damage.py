"""Damages stored records by hand, on every kind of store: as a failing disk, an operator or a bug does."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from redis import Redis

from fairlane.store.postgresql.address import driver

SQLITE = {
    "payload": "UPDATE fairlane_job SET payload = x'ff00' WHERE id = ?",
    "backoff": "UPDATE fairlane_job SET backoff = x'ff' WHERE id = ?",
    "task": "UPDATE fairlane_job SET task = '' WHERE id = ?",
    "identity": "DELETE FROM fairlane_job WHERE id = ?",
    "id": "UPDATE fairlane_job SET id = CAST(id AS BLOB) WHERE id = ?",
    "timeout": "UPDATE fairlane_job SET timeout = 'soon' WHERE id = ?",
    "retries": "UPDATE fairlane_job SET retries = 'many' WHERE id = ?",
    "cost": "UPDATE fairlane_job SET cost = 'dear' WHERE id = ?",
    "history": "UPDATE fairlane_job SET attempts = x'ff' WHERE id = ?",
    "headers": "UPDATE fairlane_job SET headers = x'ff' WHERE id = ?",
}
POSTGRESQL = {
    "payload": r"UPDATE fairlane.job SET payload = '\xff00' WHERE id = $1",
    "backoff": r"UPDATE fairlane.job SET backoff = '\xff' WHERE id = $1",
    "task": "UPDATE fairlane.job SET task = '' WHERE id = $1",
    "identity": "DELETE FROM fairlane.job WHERE id = $1",
    "timeout": "UPDATE fairlane.job SET timeout = 'NaN' WHERE id = $1",
    "retries": "UPDATE fairlane.job SET retries = -1 WHERE id = $1",
    "kind": "UPDATE fairlane.job SET kind = 9 WHERE id = $1",
    "price": "UPDATE fairlane.active_job SET cost = 'NaN' WHERE seq = (SELECT seq FROM fairlane.job WHERE id = $1)",
    "headers": r"UPDATE fairlane.job SET headers = '\xff' WHERE id = $1",
}
REDIS: dict[str, Callable[[Any, str, bytes], Any]] = {
    "content": lambda redis, prefix, member: redis.hset(prefix + "job", member, b"\0" * 8 + b"\xff\xff"),
    "no content": lambda redis, prefix, member: redis.hdel(prefix + "job", member),
    "record": lambda redis, prefix, member: redis.hset(prefix + "live", member, b"\xc1\xff"),
    "short record": lambda redis, prefix, member: redis.hset(prefix + "live", member, b"p\0\0"),
    "no record": lambda redis, prefix, member: redis.hdel(prefix + "live", member),
    "headers": lambda redis, prefix, member: redis.hset(prefix + "headers", member, b"\xff"),
}
HARMLESS = frozenset({"headers", "history", "price"})
"""Kinds of damage that do not keep a job from running."""
KINDS = (
    [("sqlite", what) for what in SQLITE]
    + [("postgresql", what) for what in POSTGRESQL]
    + [("redis", w) for w in REDIS]
)


async def damage(url: str, what: str, id: str) -> None:
    """Damage the record of a job in one of the ways that its store knows."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = on")
            connection.execute(SQLITE[what], (id,))
    elif url.startswith("postgresql"):
        connection = await driver().connect(url)
        async with connection.transaction():
            # The tests run with constraints that a damaged page does not know of. The next test has them again.
            checks = await connection.fetch(
                "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
                " WHERE contype = 'c' AND conrelid = 'fairlane.job'::regclass"
            )
            for table, name, _ in checks:
                await connection.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
            await connection.execute(POSTGRESQL[what], id)
            for table, name, definition in checks:
                await connection.execute(f'ALTER TABLE {table} ADD CONSTRAINT "{name}" {definition} NOT VALID')
        await connection.close()
    else:
        with redis_of(url) as (redis, prefix):
            REDIS[what](redis, prefix, redis.hget(prefix + "id", id))


@contextlib.contextmanager
def redis_of(url: str) -> Any:
    """A connection to the server of a namespace, and what its keys begin with."""
    parts = urlsplit(url)
    with contextlib.closing(Redis.from_url(parts._replace(query="").geturl())) as redis:
        yield redis, "{" + parse_qs(parts.query)["namespace"][0] + "}:"


SHARED_SQL = {
    "declared": "UPDATE {queue} SET declared = '{{half' WHERE name = 'default'",
    "override": "UPDATE {queue} SET override = '{{half' WHERE name = 'default'",
    "rules": """UPDATE {queue} SET declared = '{{"limit": "many", "lanes": 7}}' WHERE name = 'default'""",
    "session": "UPDATE {session} SET kind = 'odd' WHERE idx = 0",
    "binding": "UPDATE {binding} SET state = 'odd' WHERE key = 'a'",
}
"""Damage of records that are not jobs', which the tests make: queue `default`, the worker of index 0, key `a`."""
SHARED_SQLITE = {
    "session queues": "UPDATE {session} SET queues = '[half' WHERE idx = 0",
    "session lease": "UPDATE {session} SET expires = 'soon', lease = 'long' WHERE idx = 0",
    "task set": "UPDATE {task_set} SET tasks = '[half'",
}


def _redis_queue(**fields: Any) -> Callable[[Any, str], Any]:
    def change(redis: Any, prefix: str) -> None:
        number = redis.hget(prefix + "queues", "default")
        record = msgspec.msgpack.decode(redis.hget(prefix + "queue", number))
        redis.hset(prefix + "queue", number, msgspec.msgpack.encode({**record, **fields}))
        redis.hincrby(prefix + "counter", "settings", 1)  # it is read again after a restart of the server

    return change


def _redis_record(hash: str, value: bytes | None, find: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def change(redis: Any, prefix: str) -> None:
        field = find(redis, prefix)
        if value is None:
            redis.hdel(prefix + hash, field)
        else:
            redis.hset(prefix + hash, field, value)
        redis.hincrby(prefix + "counter", "settings", 1)

    return change


def _queue_number(redis: Any, prefix: str) -> Any:
    return redis.hget(prefix + "queues", "default")


def _first_worker(redis: Any, prefix: str) -> Any:
    return redis.hget(prefix + "pool:default", 0)


def _key_a(redis: Any, prefix: str) -> Any:
    return redis.hget(prefix + "bound:default", "a")


SHARED_REDIS: dict[str, Callable[[Any, str], Any]] = {
    "declared": _redis_queue(declared="{half"),
    "override": _redis_queue(override="{half"),
    "rules": _redis_queue(declared='{"limit": "many"}', settings='{"limit": "many", "lanes": 7}'),
    "settings": _redis_queue(settings="{half"),
    "queue": _redis_record("queue", b"\xc1", _queue_number),
    "queue number": _redis_record("queue", b"\x07", _queue_number),
    "no queue": _redis_record("queue", None, _queue_number),
    "session": _redis_record("session", b"\xc1", _first_worker),
    "session number": _redis_record("session", b"\x07", _first_worker),
    "session empty": _redis_record("session", b"\x80", _first_worker),
    "binding": _redis_record("binding", b"\xc1", _key_a),
    "binding number": _redis_record("binding", b"\x07", _key_a),
    "no binding": _redis_record("binding", None, _key_a),
}
SHARED = (
    [("sqlite", what) for what in (*SHARED_SQL, *SHARED_SQLITE)]
    + [("postgresql", what) for what in SHARED_SQL]
    + [("redis", what) for what in SHARED_REDIS]
)


async def damage_shared(url: str, what: str) -> None:
    """Damage a record that jobs share: settings of a queue, a session, a binding."""
    names = ("queue", "session", "binding", "task_set")
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = on")
            statement = {**SHARED_SQL, **SHARED_SQLITE}[what]
            connection.execute(statement.format_map({name: f"fairlane_{name}" for name in names}))
    elif url.startswith("postgresql"):
        connection = await driver().connect(url)
        for table in ("session", "binding"):
            for (name,) in await connection.fetch(
                "SELECT conname FROM pg_constraint WHERE contype = 'c' AND conrelid = $1::regclass", f"fairlane.{table}"
            ):
                await connection.execute(f'ALTER TABLE fairlane.{table} DROP CONSTRAINT "{name}"')
        await connection.execute(SHARED_SQL[what].format_map({name: f"fairlane.{name}" for name in names}))
        await connection.close()
    else:
        with redis_of(url) as (redis, prefix):
            SHARED_REDIS[what](redis, prefix)
