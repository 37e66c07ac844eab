"""Stores: the port every deployment implements, and `open_store`, which chooses one by URL.

Each store is imported only when it is asked for, so that its driver stays optional.
"""

from __future__ import annotations

from ..errors import InvalidInput
from .clock import Clock
from .deployment import split_redis
from .port import Store
from .wakeups import Wakeups

__all__ = ["Clock", "Store", "Wakeups", "open_store"]


async def open_store(url: str, *, clock: Clock | None = None, create: bool = True) -> Store:
    """Open the store at `url`, with its schema up to date. `clock` replaces the store's own clock in tests.

    A store that does not exist yet is created, unless `create` is False: then `StoreMissing` is raised.
    """
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from .sqlite.store import SqliteStore

        return await SqliteStore.open(url, clock=clock, create=create)
    if scheme in ("postgresql", "postgres"):
        if split_redis(url)[1] is not None:
            from .postgresql_redis.store import PostgresqlRedisStore

            return await PostgresqlRedisStore.open(url, clock=clock, create=create)
        from .postgresql.store import PostgresqlStore

        return await PostgresqlStore.open(url, clock=clock, create=create)
    if scheme.startswith(("redis", "valkey")) or scheme == "unix":
        from .redis.store import RedisStore

        return await RedisStore.open(url, clock=clock, create=create)
    raise InvalidInput(
        "url",
        f"{scheme!r} is not a known kind of store; use sqlite:///path/to/file.db, postgresql://host/database or "
        "redis://host/database",
    )
