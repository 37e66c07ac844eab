"""The servers that carry wake-ups between processes, and the differences between them that tests need to know."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import ClassVar

import psycopg
import pytest
import redis.asyncio as redis_driver

from fairlane.store.postgresql import notifier as postgresql_notifier
from fairlane.store.postgresql.address import driver as postgresql_driver
from fairlane.store.postgresql.notifier import Channels
from fairlane.store.redis import wakeups as redis_wakeups
from fairlane.store.redis.address import parse
from fairlane.store.shared import notifier, topics
from tests.servers import postgresql, valkey

from .notices import Tap, threads
from .wakeup_process import Wakeups, wakeups_at

POSTGRESQL = ("postgresql-wheel", "postgresql-system")
SERVERS = (*POSTGRESQL, "redis")
AnyServer = postgresql.DatabaseServer | valkey.ValkeyServer
MortalServer = postgresql.Server | valkey.ValkeyServer
Open = Callable[..., Wakeups]


class Carrier(ABC):
    """A schema or a namespace without any published topics, and its server."""

    connections: ClassVar[int]
    """How many connections are used to listen and to publish."""
    too_many_messages: ClassVar[int]
    """A thousand publications within milliseconds use fewer messages."""
    notice_seconds: ClassVar[float]
    """How long it may take until a frozen server is noticed."""
    lookalikes: ClassVar[tuple[str, ...]]
    """Names that are similar to each other."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name

    def wakeups(self, name: str | None = None) -> Wakeups:
        """Wake-ups as another process would open them, here or under another name."""
        return wakeups_at(self.url, self.name if name is None else name)

    @abstractmethod
    def tapping(self) -> AbstractAsyncContextManager[Tap]:
        """Receive every message of this carrier."""

    @abstractmethod
    def connected(self) -> int:
        """How many connections of wake-ups the server has."""

    async def left_alone(self) -> None:
        """Wait until the server has noticed that the last connection was closed."""
        async with asyncio.timeout(30):
            while await asyncio.to_thread(self.connected):
                await asyncio.sleep(0.01)

    @abstractmethod
    def cut(self) -> None:
        """End every connection that listens."""

    @abstractmethod
    def look_every(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set how often wake-ups check the server and leave channels without subscriptions."""

    @abstractmethod
    def give_up_after(self, seconds: float, monkeypatch: pytest.MonkeyPatch, *, connecting: float) -> None:
        """Let connections that are opened from now on wait no longer than this for an answer."""


class PostgresqlCarrier(Carrier):
    """A database of its own; wake-ups need no more of a schema than its name."""

    connections = 1
    too_many_messages = 50
    notice_seconds = postgresql_notifier.ANNOUNCE_SECONDS + notifier.COMMAND_SECONDS
    lookalikes = ("one", "One", "jobs.one", "ein 'Schema' – \"ü\"", "x" * 63, "x" * 62 + "y")

    def __init__(self, server: postgresql.DatabaseServer, url: str) -> None:
        super().__init__(url, "fairlane")
        self._server = server

    @asynccontextmanager
    async def tapping(self) -> AsyncIterator[Tap]:
        """By a connection of its own, which `connected` counts too."""
        connection, channels = await postgresql_driver().connect(self.url), Channels.of(self.name)
        tapped = Tap(channels, partial(connection.execute, "SELECT pg_notify($1, $2)"))
        for channel in channels:
            await connection.add_listener(channel, lambda _, pid, channel, payload: tapped.receive(channel, payload))
        try:
            yield tapped
        finally:
            await connection.close()

    def connected(self) -> int:
        """All connections of the database."""
        return self._server.connected(self.url)

    def cut(self) -> None:
        """As an operator does."""
        with psycopg.connect(self.url, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'fairlane wake-ups' AND datname = current_database()"
            )

    def look_every(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both are done when listeners are announced."""
        monkeypatch.setattr(postgresql_notifier, "ANNOUNCE_SECONDS", seconds)

    def give_up_after(self, seconds: float, monkeypatch: pytest.MonkeyPatch, *, connecting: float) -> None:
        """The driver gets the limits when it connects."""
        monkeypatch.setattr(postgresql_notifier, "COMMAND_SECONDS", seconds)
        monkeypatch.setattr(postgresql_notifier, "CONNECT_SECONDS", connecting)


class RedisCarrier(Carrier):
    """A namespace of its own. Its name here is what its keys begin with."""

    # A connection that listens can do nothing else.
    connections = 2
    # Nothing is gathered: what comes while the one before is under way goes with the next.
    too_many_messages = 500
    notice_seconds = redis_wakeups.PING_SECONDS + notifier.COMMAND_SECONDS
    lookalikes = ("{one}:", "{One}:", "app:{one}:", "{ü}:")

    def __init__(self, server: valkey.ValkeyServer) -> None:
        url = server.fresh_namespace()
        super().__init__(url, parse(url).prefix)
        self._server = server
        self._earlier = self._named()

    @asynccontextmanager
    async def tapping(self) -> AsyncIterator[Tap]:
        """By connections without a name, which `connected` does not count."""
        channels = topics.Channels(jobs=f"{self.name}jobs", others=f"{self.name}topics")
        async with (
            redis_driver.Redis(host="127.0.0.1", port=self._server.port, protocol=2) as client,
            client.pubsub() as subscription,
        ):
            tapped, ready = Tap(channels, client.publish), asyncio.Event()

            async def listen() -> None:
                await subscription.subscribe(*channels)
                async for message in subscription.listen():
                    if message["type"] == "message":
                        tapped.receive(message["channel"].decode(), message["data"].decode())
                    else:
                        ready.set()

            listening = asyncio.create_task(listen())
            await ready.wait()
            try:
                yield tapped
            finally:
                listening.cancel()
                await asyncio.wait([listening])

    def connected(self) -> int:
        """Those of all namespaces, so that one under a wrong name is counted too; without those of earlier tests."""
        return len(self._named() - self._earlier)

    def _named(self) -> set[str]:
        """The numbers of connections with a name of ours."""
        clients = str(self._server.ask("CLIENT", "LIST")).splitlines()
        return {client.split()[0] for client in clients if " name=fairlane:" in client}

    def cut(self) -> None:
        """As an operator does."""
        self._server.ask("CLIENT", "KILL", "TYPE", "pubsub")

    def look_every(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is done for its own sake."""
        monkeypatch.setattr(redis_wakeups, "PING_SECONDS", seconds)

    def give_up_after(self, seconds: float, monkeypatch: pytest.MonkeyPatch, *, connecting: float) -> None:
        """It counts for connections that are there already, too."""
        monkeypatch.setattr(redis_wakeups, "COMMAND_SECONDS", seconds)
        monkeypatch.setattr(redis_wakeups, "CONNECT_SECONDS", connecting)


def shared_server(name: str) -> AnyServer:
    """One of `SERVERS`, which all tests of this process share."""
    return valkey.server() if name == "redis" else postgresql.server(name.removeprefix("postgresql-"))


def own_server(name: str) -> MortalServer:
    """One of `SERVERS`, which a test may stop and freeze, and which the caller closes."""
    return valkey.own_server() if name == "redis" else postgresql.own_server(name.removeprefix("postgresql-"))


@contextmanager
def carried_by(server: AnyServer) -> Iterator[Carrier]:
    """A new schema or namespace on a server."""
    if isinstance(server, valkey.ValkeyServer):
        yield RedisCarrier(server)
        return
    url = server.fresh_database(migrated=False)
    try:
        yield PostgresqlCarrier(server, url)
    finally:
        server.done(url)


@contextmanager
def opening(carrier: Carrier) -> Iterator[Open]:
    """Opens wake-ups, under the carrier's name if no other is given, and closes them at the end."""
    made: list[Wakeups] = []

    def open_one(name: str | None = None) -> Wakeups:
        made.append(carrier.wakeups(name))
        return made[-1]

    try:
        yield open_one
    finally:
        for each in made:
            each.close()
    assert not threads()
