"""Wake-ups between processes that share a namespace, by SUBSCRIBE and PUBLISH.

Each namespace has two channels: one for ``job:`` and ``place:`` topics, which are many, and one for all others. The
functions publish what the verbs change, in the step that changes it (`step.flush`); only topics that a process
publishes itself are sent from here. Publishing without subscribers costs next to nothing, so everything is published.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

from ..shared.notifier import COMMAND_SECONDS, CONNECT_SECONDS, Listeners, ServerNotifier
from ..shared.subscriptions import NotifiedWakeups
from ..shared.topics import ABOUT_JOBS, EVERYTHING, Channels, by_kind
from .address import Address
from .connection import Connection, connect
from .sentinels import Sentinels

PING_SECONDS = 10.0
"""How often the server is pinged. A frozen server is noticed after this and `COMMAND_SECONDS`."""
EARLY_SECONDS = 0.002
"""A timer may fire this much before its time, as an event loop counts it."""
SENDER = "@"
"""Begins a first row that names the process which published the topics. What the functions publish has no such row."""

Connect = Callable[[], Awaitable[Connection]]
"""Opens a connection to the server, in the running event loop. A forked child may call it too."""
Deliver = Callable[[bytes, bytes], None]
"""Takes a channel and a payload that was published there."""


def connector(address: Address) -> Connect:
    """How connections to an address are opened."""
    if address.service is not None:
        return Sentinels(address).connect
    return partial(connect, address, address.endpoints[0])


class RedisWakeups(NotifiedWakeups["Notifier"]):
    """The `Wakeups` of one namespace. `connect` must not hold the store, or the store would never be collected."""

    def __init__(self, connect: Connect, prefix: str) -> None:
        channels = Channels(jobs=f"{prefix}jobs", others=f"{prefix}topics")
        super().__init__(partial(Notifier, connect, channels))

    def show(self, channel: str) -> bool:
        """Subscribe to a channel so that the server sees this process there. Returns whether it does already."""
        if self._closed or self._pid != os.getpid():
            return False
        self._notifier.show(channel)
        return self._notifier.is_shown(channel)

    def hide(self, channel: str) -> None:
        """The subscription is no longer needed."""
        self._notifier.hide(channel)


class PubSub:
    """Two connections, used by one task alone: a subscribed one, which can do nothing else, and one that publishes.

    Each is opened when it is first needed. Both lead to one server, so losing one means losing both. `lost` is called
    when the subscribed one ends by itself.
    """

    def __init__(self, connect: Connect, deliver: Deliver, lost: Callable[[], None]) -> None:
        self._connect = connect
        self._deliver = deliver
        self._lost = lost
        self._subscriber: Connection | None = None
        self._broken: Exception | None = None
        self._reply: asyncio.Future[None] | None = None
        self._publisher: Connection | None = None

    async def open(self, *, subscribe: bool) -> None:
        """Open the connection that is needed first, to learn whether the server is there."""
        if not subscribe:
            self._publisher = await self._connected()
            return
        self._subscriber = await self._connected()
        # By a callback, not by a task that reads: a listener waits for the message.
        self._subscriber.deliver_to(self._take)

    async def subscribe(self, channel: str) -> None:
        """Subscribe to a channel; the server has confirmed it when this returns."""
        if self._subscriber is None:
            await self.open(subscribe=True)
        await self._request("SUBSCRIBE", channel)

    async def unsubscribe(self, channel: str) -> None:
        """Unsubscribe from a channel."""
        await self._request("UNSUBSCRIBE", channel)

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Publish these, each a channel and a payload, in one round trip."""
        if self._publisher is None:
            self._publisher = await self._connected()
        await _execute_all(self._publisher, [("PUBLISH", *each) for each in messages])

    async def ping(self) -> None:
        """Check that the server is there, and keep the connections from idling."""
        if self._publisher is not None:
            await _execute_all(self._publisher, [("PING",)])
        if self._subscriber is not None:
            await self._request("PING")

    def check(self) -> None:
        """Raise why the subscribed connection was lost, if it was."""
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """Close both, without waiting for the server."""
        for connection in (self._subscriber, self._publisher):
            if connection is not None:
                connection.close()

    async def _connected(self) -> Connection:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await self._connect()

    async def _request(self, *command: str) -> None:
        """Send a command that is allowed on a subscribed connection, and wait for the reply."""
        assert self._subscriber is not None
        self.check()
        self._reply = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(COMMAND_SECONDS):
            self._subscriber.send(*command)
            await self._reply
        self.check()

    def _take(self, message: Any) -> None:
        if isinstance(message, list) and message[0] == b"message":
            self._deliver(message[1], message[2])
            return
        if isinstance(message, Exception) and self._broken is None:
            # An error reply makes the connection useless as well.
            self._broken = message
            self._lost()
        if self._reply is not None and not self._reply.done():
            # Only one command is outstanding at a time, so anything but a message is the reply to it.
            self._reply.set_result(None)


async def _execute_all(connection: Connection, commands: Sequence[tuple[str | bytes, ...]]) -> None:
    async with asyncio.timeout(COMMAND_SECONDS):
        for command in commands:
            connection.send(*command)
        for _ in commands:
            await connection.receive()


class Notifier(ServerNotifier[PubSub]):
    """The connections of one store object, and their thread."""

    SERVER = "Redis"

    def __init__(
        self, connect: Connect, channels: Channels, listeners: Listeners, about_jobs: tuple[str, ...] = ABOUT_JOBS
    ) -> None:
        super().__init__(channels, listeners)
        self._open_connection = connect
        self._about_jobs = about_jobs
        self._sender = SENDER + secrets.token_hex(8)
        self._ping_at = 0.0
        self._also: frozenset[str] = frozenset()

    def show(self, channel: str) -> None:
        """Subscribe to a channel on which nothing is published: the server sees this process by it."""
        with self._lock:
            if channel not in self._also:
                self._also |= {channel}
                self._wake()

    def is_shown(self, channel: str) -> bool:
        """Whether the server has confirmed the subscription."""
        return channel in self._listening

    def hide(self, channel: str) -> None:
        """Unsubscribe from the channel at some later time."""
        with self._lock:
            self._also -= {channel}

    def send(self, topics: Collection[str]) -> None:
        """Send these soon. They are dropped while the server is away."""
        jobs, others = by_kind(topics, self._about_jobs)
        with self._lock:
            if not self._away and not self._closing:
                self._jobs.add(jobs)
                self._others.add(others)
                self._wake()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _wanted(self) -> frozenset[str]:
        return super()._wanted() | self._also

    async def _connect(self) -> PubSub:
        pubsub = PubSub(self._open_connection, self._hear, self._nudge.set)
        await pubsub.open(subscribe=bool(self._wanted()))
        return pubsub

    async def _use(self, connection: PubSub) -> None:
        try:
            self._ping_at = self._remind(PING_SECONDS)
            while True:
                self._nudge.clear()
                connection.check()
                await self._listen_to_wanted(connection)
                await self._ping_when_due(connection)
                await self._send_waiting(connection)
                if self._closing and not self._waits():
                    return
                await self._wait_for_work()
        finally:
            connection.close()

    async def _subscribe(self, connection: PubSub, channels: frozenset[str]) -> None:
        for channel in channels:
            await connection.subscribe(channel)
        with self._lock:
            self._listening |= channels

    async def _unsubscribe(self, connection: PubSub, channel: str) -> None:
        await connection.unsubscribe(channel)

    async def _ping_when_due(self, connection: PubSub) -> None:
        """From time to time, check that the server is there and unsubscribe from unused channels."""
        if time.monotonic() + EARLY_SECONDS >= self._ping_at:
            self._ping_at = self._remind(PING_SECONDS)
            await connection.ping()
            await self._leave_unused(connection)

    async def _send_waiting(self, connection: PubSub) -> None:
        with self._lock:
            jobs, others = self._jobs.take(), self._others.take()
        messages = [
            (channel, "\n".join([self._sender, *topics]).encode(errors="replace"))
            for channel, topics in ((self._channels.others, others), (self._channels.jobs, jobs))
            if topics
        ]
        if messages:
            await connection.publish(messages)

    def _hear(self, channel: bytes, payload: bytes) -> None:
        topics = payload.decode(errors="replace").split("\n")
        if topics[0].startswith(SENDER):
            # Our own topics were delivered in this process when they were published.
            if topics[0] == self._sender:
                return
            del topics[0]
        if topics == [EVERYTHING]:
            jobs = channel.decode(errors="replace") == self._channels.jobs
            self._listeners.wake(jobs=jobs, others=not jobs)
        else:
            self._listeners.deliver(topics)
