"""Stores, chosen by URL. Each is imported only when it is asked for."""

from __future__ import annotations

from ..clock import Clock
from ..errors import InvalidInput
from ..store import Store


async def open_store(url: str, *, clock: Clock | None = None, create: bool = True) -> Store:
    """Open the store at `url`, with its schema up to date. `clock` replaces the store's own clock in tests.

    A store that is not there yet is made, unless `create` is False: then `StoreMissing` is raised.
    """
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from .sqlite.store import SqliteStore

        return await SqliteStore.open(url, clock=clock, create=create)
    if scheme in ("postgresql", "postgres"):
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
