"""Empty stores of every kind, as URLs, and which tests run on which kind.

``sqlite`` is a file, ``postgresql`` a database and ``redis`` a namespace on the shared server. ``postgresql15`` and
``redis7.0``, or whatever versions the system has besides those of the wheels, show that an older server works too; only
a part of the tests runs on them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Protocol

from fairlane.store.deployment import split_redis, with_redis
from fairlane.store.port import Store

from . import installation, postgresql, valkey

KINDS = ("sqlite", "postgresql", "redis")
COMPOSED = "postgresql_redis"
"""PostgreSQL with tokens in Redis. Its verbs are those of PostgreSQL, so it runs only tests that involve wake-ups."""
TRANSACTIONAL = ("sqlite", "postgresql")
"""Kinds of stores in which a user can store jobs together with other rows."""
EVERY_VERSION = "FAIRLANE_TEST_EVERY_VERSION"
"""If this variable is set, all tests run on the second version too."""
VERBS = frozenset(name for name in vars(Store) if not name.startswith("_"))


class EmptyStores(Protocol):
    """Provides empty stores of one kind."""

    def next(self, *, migrated: bool = True) -> str:
        """The URL of another one. Unless `migrated`, it gets its schema when it is first opened."""

    def closed(self, url: str) -> bool:
        """Take back a store that was opened, if it is closed. Returns whether it is."""


class SqliteStores:
    """Files, each in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count(1)

    def next(self, *, migrated: bool = True) -> str:
        """A file that does not exist yet."""
        directory = self._directory / f"store-{next(self._numbers)}"
        directory.mkdir()
        return f"sqlite:///{directory / 'fairlane.db'}"

    def closed(self, url: str) -> bool:
        """True: a file is not used again."""
        return True


class PostgresqlStores:
    """Databases on the shared server of a version."""

    def __init__(self, server: postgresql.DatabaseServer) -> None:
        self._server = server
        self._given: set[str] = set()

    def next(self, *, migrated: bool = True) -> str:
        """A database; one of an earlier test, emptied, if it has the schema."""
        url = self._server.fresh_database(migrated=migrated)
        self._given.add(url)
        return url

    def closed(self, url: str) -> bool:
        """Take the database back if it has no connection, as an open store has one."""
        if self._server.connected(url):
            return False
        self._given.remove(url)
        self._server.done(url)
        return True

    def close(self) -> None:
        """Take all databases back."""
        for url in self._given:
            self._server.done(url)


class RedisStores:
    """Namespaces on the shared server."""

    def __init__(self, server: valkey.ValkeyServer) -> None:
        self._server = server

    def next(self, *, migrated: bool = True) -> str:
        """A namespace that was not used before."""
        return self._server.fresh_namespace()

    def closed(self, url: str) -> bool:
        """Whether no connection is named after the namespace, as those of an open store are."""
        return not self._server.connected(url)


class PostgresqlRedisStores:
    """Databases, each with a namespace on the shared Redis."""

    def __init__(self, databases: PostgresqlStores, server: valkey.ValkeyServer) -> None:
        self._databases = databases
        self._server = server

    def next(self, *, migrated: bool = True) -> str:
        """A database and a namespace that were not used before."""
        return with_redis(self._databases.next(migrated=migrated), {"redis": self._server.fresh_namespace()})

    def closed(self, url: str) -> bool:
        """Only the database is taken back."""
        return self._databases.closed(split_redis(url)[0])


@contextlib.contextmanager
def empty_stores(kind: str, directory: Path) -> Iterator[EmptyStores]:
    """Stores of a kind, to be used inside the block. Files go into `directory`."""
    if kind == "sqlite":
        yield SqliteStores(directory)
        return
    if kind.startswith("redis"):
        yield RedisStores(valkey.server() if kind == "redis" else valkey.second_server())
        return
    stores = PostgresqlStores(postgresql.server("any" if kind in ("postgresql", COMPOSED) else "system"))
    try:
        yield PostgresqlRedisStores(stores, valkey.server()) if kind == COMPOSED else stores
    finally:
        stores.close()


def second_versions() -> list[str]:
    """The kinds of stores on the system's servers, where those are other versions than the wheels'."""
    redis = valkey.second_version()
    return [kind for kind in (second_postgresql(), None if redis is None else f"redis{redis}") if kind is not None]


def second_postgresql() -> str | None:
    """The same for PostgreSQL alone."""
    first, second = installation.wheel(), installation.system()
    if first is None or second is None or first.major == second.major:
        return None
    return f"postgresql{second.major}"


def runs_on_second_version(test: str, module: ModuleType) -> bool:
    """Whether a test is chosen: in its file it is the first, or the first that names some verb of the port."""
    if EVERY_VERSION in os.environ:
        return True
    known: set[str] = set()
    for name, function in vars(module).items():
        if name.startswith("test_") and isinstance(function, FunctionType):
            named = VERBS.intersection(names_in(function.__code__))
            if name == test:
                return not known or not named <= known
            # The first test is chosen whatever it names.
            known |= named or {""}
    raise LookupError(f"{module.__name__} has no {test}")


def names_in(code: CodeType) -> Iterator[str]:
    """All names that a function uses, its inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
