"""Carries wake-ups through the server by SUBSCRIBE and PUBLISH.

What the verbs have to tell is published by the functions themselves, in the step that changes the store; only what
somebody else publishes goes through here. Publishing where nobody listens costs next to nothing, so all is published.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection

from ..shared.notifier import Listeners, ServerNotifier
from ..shared.topics import EVERYTHING, Channels, by_kind
from .pubsub import Dial, Pair

LOOK_SECONDS = 10.0
"""How often the server is asked whether it is there. A frozen one is noticed after that and `COMMAND_SECONDS`."""
EARLY_SECONDS = 0.002
"""A timer may fire so much before its time, as an event loop counts it."""
SENDER = "@"
"""Begins the line in front of the topics that says who published them. What the functions publish has none."""


class Notifier(ServerNotifier[Pair]):
    """The connections of one store object, and their thread."""

    SERVER = "Redis"

    def __init__(self, dial: Dial, channels: Channels, listeners: Listeners) -> None:
        super().__init__(channels, listeners)
        self._dial = dial
        self._sender = SENDER + secrets.token_hex(8)
        self._look_at = 0.0
        self._also: frozenset[str] = frozenset()

    def show(self, channel: str) -> None:
        """Listen to a channel on which nothing is said: the server sees by it that this process is there."""
        with self._lock:
            if channel not in self._also:
                self._also |= {channel}
                self._wake()

    def is_shown(self, channel: str) -> bool:
        """Whether the server listens for it now."""
        return channel in self._listening

    def hide(self, channel: str) -> None:
        """Leave it, some time."""
        with self._lock:
            self._also -= {channel}

    def send(self, topics: Collection[str]) -> None:
        """Send these soon. They are dropped while the server is away."""
        jobs, others = by_kind(topics)
        with self._lock:
            if not self._away and not self._closing:
                self._jobs.add(jobs)
                self._others.add(others)
                self._wake()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _wanted(self) -> frozenset[str]:
        return super()._wanted() | self._also

    async def _connect(self) -> Pair:
        pair = Pair(self._dial, self._hear, self._nudge.set)
        await pair.open(listen=bool(self._wanted()))
        return pair

    async def _use(self, connection: Pair) -> None:
        try:
            self._look_at = self._remind(LOOK_SECONDS)
            while True:
                self._nudge.clear()
                connection.check()
                await self._listen_to_wanted(connection)
                await self._look_around(connection)
                await self._send_waiting(connection)
                if self._closing and not self._waits():
                    return
                await self._wait_for_news()
        finally:
            connection.close()

    async def _begin_to_hear(self, connection: Pair, channels: frozenset[str]) -> None:
        for channel in channels:
            await connection.subscribe(channel)
        with self._lock:
            self._listening |= channels

    async def _fall_silent(self, connection: Pair, channel: str) -> None:
        await connection.unsubscribe(channel)

    async def _look_around(self, connection: Pair) -> None:
        """Do what is due from time to time: see whether the server is there, and leave channels."""
        if time.monotonic() + EARLY_SECONDS >= self._look_at:
            self._look_at = self._remind(LOOK_SECONDS)
            await connection.look()
            await self._leave_unused(connection)

    async def _send_waiting(self, connection: Pair) -> None:
        with self._lock:
            jobs, others = self._jobs.take(), self._others.take()
        told = [
            (channel, "\n".join([self._sender, *topics]).encode(errors="replace"))
            for channel, topics in ((self._channels.others, others), (self._channels.jobs, jobs))
            if topics
        ]
        if told:
            await connection.publish(told)

    def _hear(self, channel: bytes, payload: bytes) -> None:
        topics = payload.decode(errors="replace").split("\n")
        if topics[0].startswith(SENDER):
            # Our own were told here when they were published.
            if topics[0] == self._sender:
                return
            del topics[0]
        if topics == [EVERYTHING]:
            jobs = channel.decode(errors="replace") == self._channels.jobs
            self._listeners.wake(jobs=jobs, others=not jobs)
        else:
            self._listeners.tell(topics)
