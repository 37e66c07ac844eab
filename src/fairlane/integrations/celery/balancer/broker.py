"""Reading the broker: how many messages wait in a queue, and on Redis which."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import redis

from .leases import Lease, id_of
from .publishing import LEASE_HEADER

PAGE = 1_000


class Broker(Protocol):
    """A connection to the broker, for one thread."""

    lists_messages: bool
    """Whether `messages` and `delivered` find messages."""

    def sizes(self, queues: Sequence[str]) -> list[int]:
        """How many messages wait in each queue, without those that a worker has."""

    def messages(self, queue: str) -> dict[str, Lease]:
        """The messages that wait in a queue, by the name of their lease."""

    def delivered(self) -> dict[str, dict[str, Lease]]:
        """The messages that workers have and did not acknowledge, by queue and name of the lease."""

    def close(self) -> None:
        """Close the connection."""


def open_broker(app: Any) -> Broker:
    """Connect to the broker that workers of the application read from."""
    connection = app.connection_for_read()
    try:
        return RedisBroker(connection) if connection.transport.driver_type == "redis" else CountingBroker(connection)
    except BaseException:
        connection.release()
        raise


class RedisBroker:
    """Redis: a list for each queue and priority, and a hash of messages that workers have."""

    lists_messages = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._channel = connection.default_channel
        # Without the channel's own client, which adds the prefix to the keys of some commands only.
        self._client = redis.Redis(connection_pool=self._channel.pool)
        self._prefix: str = self._channel.global_keyprefix

    def sizes(self, queues: Sequence[str]) -> list[int]:
        pipe = self._client.pipeline(transaction=False)
        keys = [self._keys(queue) for queue in queues]
        for key in (key for each in keys for key in each):
            pipe.llen(key)
        lengths = iter(pipe.execute())
        return [sum(next(lengths) for _ in each) for each in keys]

    def messages(self, queue: str) -> dict[str, Lease]:
        found: dict[str, Lease] = {}
        for key in self._keys(queue):
            for raw in self._pages(key):
                lease = _lease(json.loads(raw))
                if lease is not None:
                    found[lease.name] = lease
        return found

    def delivered(self) -> dict[str, dict[str, Lease]]:
        found: dict[str, dict[str, Lease]] = {}
        for _, raw in self._client.hscan_iter(f"{self._prefix}{self._channel.unacked_key}", count=PAGE):
            message, exchange, routing_key = json.loads(raw)
            lease = _lease(message)
            if lease is not None and not exchange:
                found.setdefault(routing_key, {})[lease.name] = lease
        return found

    def close(self) -> None:
        self._connection.release()

    def _keys(self, queue: str) -> list[str]:
        return [f"{self._prefix}{self._channel._q_for_pri(queue, step)}" for step in self._channel.priority_steps]

    def _pages(self, key: str) -> Iterator[bytes]:
        """Read from the end that messages are taken from, so that none is skipped when others are taken meanwhile."""
        last = -1
        while True:
            page: Any = self._client.lrange(key, last - PAGE + 1, last)
            yield from page
            if len(page) < PAGE:
                return
            last -= PAGE


class CountingBroker:
    """Any other broker: it only says how many messages wait."""

    lists_messages = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def sizes(self, queues: Sequence[str]) -> list[int]:
        return [self._size(queue) for queue in queues]

    def messages(self, queue: str) -> dict[str, Lease]:
        return {}

    def delivered(self) -> dict[str, dict[str, Lease]]:
        return {}

    def close(self) -> None:
        self._connection.release()

    def _size(self, queue: str) -> int:
        # A channel of its own: the server closes it if the queue does not exist.
        with self._connection.channel() as channel:
            try:
                return int(channel.queue_declare(queue=queue, passive=True).message_count)
            except self._connection.channel_errors:
                return 0


def _lease(message: Mapping[str, Any]) -> Lease | None:
    """The lease of a message as Celery publishes it; None for anything else."""
    headers = message.get("headers") or {}
    name, id = headers.get(LEASE_HEADER), headers.get("id")
    if id is None and isinstance(name, str):
        id = id_of(name)  # protocol 1, where the id is in the body
    if not isinstance(id, str):
        return None
    lease = Lease.of_message(name, id, headers.get("retries") or 0)
    expires = headers.get("expires")
    if not expires:
        return lease
    try:
        moment = datetime.fromisoformat(expires)
    except (TypeError, ValueError):
        return lease  # the message of another program
    return Lease(lease.name, lease.id, (moment - datetime.now(moment.tzinfo)).total_seconds())
