"""Destinations: the queue that an exchange and a routing key lead to, for publishes and for messages of the broker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kombu.entity import Queue
from kombu.transport.virtual.exchange import TopicExchange

_pattern_of = TopicExchange(None).key_to_pattern


def queue_at(queues: Mapping[str, Queue], exchange: str, key: str) -> Queue | None:
    """The queue that a broker puts a message into; None if there is none, or if several get a copy each."""
    if not exchange:
        return queues.get(key)
    found = [queue for queue in queues.values() if _receives(queue, exchange, key)]
    return found[0] if len(found) == 1 else None


def _receives(queue: Queue, exchange: str, key: str) -> bool:
    bound = [(queue.exchange, queue.routing_key), *((each.exchange, each.routing_key) for each in queue.bindings)]
    return any(origin is not None and origin.name == exchange and _leads(origin, rule, key) for origin, rule in bound)


def _leads(exchange: Any, rule: str | None, key: str) -> bool:
    """Whether an exchange puts messages with a routing key into a queue that is bound by `rule`."""
    if exchange.type == "topic":
        return re.match(_pattern_of(rule or ""), key) is not None
    return exchange.type == "fanout" or (rule or "") == key
