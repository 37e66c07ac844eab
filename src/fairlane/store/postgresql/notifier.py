"""Carries wake-ups through the server: a thread with an event loop and one connection, for sending and for listening.

The first topics are sent at once; those published within the next `GATHER_SECONDS` are sent together, because all
transactions of a server that NOTIFY commit one after the other.

``job:`` and ``place:`` topics are sent only while a process listens to them. A process with a listener sends `HERE`
when it begins and every `ANNOUNCE_SECONDS`, on the channel of the other topics. A process that begins to listen to that
channel sends `ASK` on the channel of the jobs, and sends all topics until the answers must have arrived. A process that
does not listen to it always sends all topics. When a listener announces itself, the topics that were held back just
before are sent: so it does not miss a change that happens after the server began to listen for it.

A payload is topics joined by line breaks, or one of three signs: `HERE`, `ASK` and `EVERYTHING`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ..shared import topics as shared_topics
from ..shared.notifier import CLOSE_SECONDS, COMMAND_SECONDS, CONNECT_SECONDS, Listeners, ServerNotifier
from ..shared.topics import EVERYTHING, Waiting, by_kind
from .address import driver

HERE = "+"
"""States that a process listens to jobs. Sent on the channel of the other topics."""
ASK = "?"
"""Asks whether any process listens to jobs. Sent on the channel of the jobs."""
PAYLOAD_BYTES = 7_900
"""The most bytes of a payload; the server accepts less than 8,000."""
NAME_BYTES = 40
"""A longer schema name is replaced by its hash: the name of a channel has at most 63 bytes."""
GATHER_SECONDS = 0.002
MOST_KEPT, KEEP_SECONDS = 5_000, 0.5
"""Topics of jobs that no process listens to: how many are held back, and for how long."""
ANNOUNCE_SECONDS = 10.0
EARLY_SECONDS = 0.002
"""A timer may fire this much before its time, as an event loop counts it."""
TRUST_SECONDS = 30.0
"""How long an announcement is valid."""
ANSWER_SECONDS = 0.3
"""Answers are spread over this time; a process does not answer once two others have."""
GRACE_SECONDS = 1.0
"""How long all topics are sent after `ASK`."""
NOTIFY = "SELECT pg_notify(channel, payload) FROM unnest($1::text[], $2::text[]) AS sent(channel, payload)"
Connection = Any
"""A connection of the driver, which has no type annotations."""


class Channels(shared_topics.Channels):
    """The two channels of a schema."""

    __slots__ = ()

    @classmethod
    def of(cls, schema: str) -> Channels:
        """The channels of a schema; no other schema of the database has the same names."""
        name = schema.encode(errors="replace")
        if len(name) > NAME_BYTES:
            schema = f"#{hashlib.sha256(name).hexdigest()[:32]}"
        return cls(f"fairlane.jobs.{schema}", f"fairlane.topics.{schema}")


def payloads(topics: Iterable[str]) -> Iterator[str]:
    """The topics, as many in a payload as fit. `EVERYTHING` replaces topics that cannot be sent."""
    data = "\n".join(topics).encode(errors="replace")
    if b"\0" in data:
        yield EVERYTHING
        return
    start = 0
    while start < len(data):
        end = len(data)
        if end - start > PAYLOAD_BYTES:
            end = data.rfind(b"\n", start, start + PAYLOAD_BYTES + 1)
        if end < 0:
            yield EVERYTHING
            return
        yield data[start:end].decode()
        start = end + 1


class Notifier(ServerNotifier[Connection]):
    """The connection of one store object, and its thread. Methods outside the section of the thread are thread-safe."""

    SERVER = "PostgreSQL"

    def __init__(self, dsn: str, channels: Channels, listeners: Listeners) -> None:
        super().__init__(channels, listeners)
        self._dsn = dsn
        # Guarded by the lock of the base class.
        self._signs = Waiting()
        self._kept: deque[tuple[float, list[str]]] = deque()
        self._kept_count = 0
        self._jobs_heard_until = 0.0
        # Used by the thread only.
        self._own_pid = 0
        self._announcers: set[int] = set()
        self._announce_at = self._look_at = 0.0

    def send(self, topics: Collection[str]) -> None:
        """Send topics soon. They are dropped while the server is away."""
        jobs, others = by_kind(topics)
        with self._lock:
            if self._away or self._closing:
                return
            if jobs:
                now = time.monotonic()
                if self._channels.others not in self._listening or now < self._jobs_heard_until:
                    self._jobs.add(jobs)
                else:
                    self._keep(now, jobs)
                    if not others:
                        return
            self._others.add(others)
            self._wake()

    def _keep(self, now: float, jobs: list[str]) -> None:
        self._kept.append((now, jobs))
        self._kept_count += len(jobs)
        while self._kept and (self._kept_count > MOST_KEPT or self._kept[0][0] < now - KEEP_SECONDS):
            self._kept_count -= len(self._kept.popleft()[1])

    def _waits(self) -> bool:
        return bool(super()._waits() or self._signs)

    # -- in the thread ---------------------------------------------------------------------------------------------

    async def _connect(self) -> Connection:
        return await driver().connect(
            self._dsn,
            timeout=CONNECT_SECONDS,
            command_timeout=COMMAND_SECONDS,
            server_settings={"application_name": "fairlane wake-ups"},
        )

    async def _use(self, connection: Connection) -> None:
        try:
            connection.add_termination_listener(lambda _: self._nudge.set())
            self._own_pid = connection.get_server_pid()
            self._look_at = self._remind(ANNOUNCE_SECONDS)
            while not connection.is_closed():
                self._nudge.clear()
                await self._listen_to_wanted(connection)
                await self._look_around(connection)
                began = time.monotonic()
                sent = await self._send_waiting(connection)
                if self._closing and not self._waits():
                    await connection.close(timeout=CLOSE_SECONDS)
                    return
                if sent:
                    await asyncio.sleep(began + GATHER_SECONDS - time.monotonic())
                await self._wait_for_work()
            raise ConnectionResetError("the server ended the connection")
        finally:
            connection.terminate()

    async def _subscribe(self, connection: Connection, channels: frozenset[str]) -> None:
        for channel in channels:
            await connection.add_listener(channel, self._hear)
        with self._lock:
            if self._channels.jobs in channels:
                self._signs.add([HERE])
                self._announcers.clear()
                self._announce_at = self._remind(ANNOUNCE_SECONDS)
            if self._channels.others in channels:
                self._signs.add([ASK])
                self._jobs_heard_until = max(self._jobs_heard_until, time.monotonic() + GRACE_SECONDS)
            self._listening |= channels

    async def _look_around(self, connection: Connection) -> None:
        """From time to time, check that the server is there, leave unused channels, and announce listeners."""
        now = time.monotonic() + EARLY_SECONDS
        if now >= self._look_at:
            self._look_at = self._remind(ANNOUNCE_SECONDS)
            await connection.execute("SELECT 1")
            await self._leave_unused(connection)
        if now >= self._announce_at and self._channels.jobs in self._listening:
            # Two announcers are enough: all other processes receive both, and each of the two receives the other.
            if len(self._announcers) < 2:
                self._signs.add([HERE])
            self._announcers.clear()
            self._announce_at = self._remind(ANNOUNCE_SECONDS)

    async def _unsubscribe(self, connection: Connection, channel: str) -> None:
        await connection.remove_listener(channel, self._hear)

    async def _send_waiting(self, connection: Connection) -> bool:
        with self._lock:
            signs, jobs, others = self._signs.take(), self._jobs.take(), self._others.take()
        messages = [(self._channels.others if sign == HERE else self._channels.jobs, sign) for sign in signs]
        messages += [(self._channels.others, payload) for payload in payloads(others)]
        messages += [(self._channels.jobs, payload) for payload in payloads(jobs)]
        if messages:
            await connection.execute(NOTIFY, [channel for channel, _ in messages], [payload for _, payload in messages])
        return bool(messages)

    def _hear(self, connection: object, pid: int, channel: str, payload: str) -> None:
        if pid == self._own_pid:
            return
        jobs = channel == self._channels.jobs
        if payload == HERE:
            self._hear_of_a_listener(pid)
        elif payload == ASK:
            self._announcers.clear()
            self._announce_at = min(self._announce_at, self._remind(random.random() * ANSWER_SECONDS))
        elif payload == EVERYTHING:
            self._listeners.wake(jobs=jobs, others=not jobs)
        else:
            self._listeners.deliver(payload.split("\n"))

    def _hear_of_a_listener(self, pid: int) -> None:
        self._announcers.add(pid)
        with self._lock:
            now = time.monotonic()
            self._jobs_heard_until = now + TRUST_SECONDS
            for kept_at, jobs in self._kept:
                if kept_at >= now - KEEP_SECONDS:
                    self._jobs.add(jobs)
            self._kept.clear()
            self._kept_count = 0
            if self._jobs:
                self._wake()

    def _lose(self) -> None:
        with self._lock:
            self._signs.take()
        super()._lose()
