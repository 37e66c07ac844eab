"""Adoption: a message from the broker, sent by a program without fair mode, becomes a job and is then acknowledged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu.exceptions import ContentDisallowed, DecodeError

from ...errors import Conflict, InvalidInput
from .destinations import queue_at
from .messages import LocalMessage, payload_of
from .publishing import Publish

if TYPE_CHECKING:
    from .fair import Fair

logger = logging.getLogger("fairlane.celery")
Strategy = Callable[..., Any]
AGAIN_SECONDS = 1.0
"""When to try again to store a message that the store did not take."""


def adopting(strategy: Strategy, fair: Fair, consumer: Any) -> Strategy:
    """A strategy that runs what was claimed from Fairlane, and stores what comes from the broker."""

    def receive(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **options: Any) -> Any:
        if isinstance(message, LocalMessage):
            return strategy(message, body, ack, reject, callbacks, **options)
        queue = _queue_of(message, fair)
        if body is not None or queue is None:
            # Protocol 1, a queue that is not fair, or a message for this worker alone: as without fair mode.
            return strategy(message, body, ack, reject, callbacks, **options)
        try:
            publish = _publish_of(message, queue, fair)
            lane = publish.lane(message.payload, None)
            publish.job(publish.id, lane)
        except (ContentDisallowed, DecodeError):
            raise  # the consumer rejects it
        except InvalidInput as exc:
            logger.warning("task %s stays with Celery: %s", message.headers.get("id"), exc)
            return strategy(message, body, ack, reject, callbacks, **options)
        except Exception:
            # For example in the application's function of the tenant: an error here would stop the consumer.
            logger.exception("task %s stays with Celery: it cannot become a job", message.headers.get("id"))
            return strategy(message, body, ack, reject, callbacks, **options)
        try:
            fair.enqueue(publish, lane)
        except (InvalidInput, Conflict) as exc:
            logger.warning("task %s stays with Celery: %s", publish.id, exc)
            return strategy(message, body, ack, reject, callbacks, **options)
        except Exception as exc:
            # Perhaps it is stored already, or a duplicate whose result could not be written: Celery must not run it.
            # It stays unacknowledged, so the broker keeps it, and does not send more than the prefetch count.
            logger.warning("could not store task %s (%s: %s); trying again", publish.id, type(exc).__name__, exc)
            again = (message, body, ack, reject, callbacks)
            consumer.timer.call_after(AGAIN_SECONDS, receive, again, options)
            return None
        ack(logger, consumer.connection_errors)
        return None

    return receive


def _publish_of(message: Any, queue: str, fair: Fair) -> Publish:
    """The publish that a message from the broker would have been in fair mode."""
    headers = dict(message.headers)
    properties = {
        name: message.properties[name]
        for name in ("correlation_id", "reply_to", "priority")
        if message.properties.get(name) is not None
    }
    if properties.get("priority") == 0:
        # What kombu sends when the producer has named none.
        del properties["priority"]
    # kombu has decompressed it already.
    headers.pop("compression", None)
    payload = payload_of(headers, properties, message.content_type, message.content_encoding, bytes_of(message.body))
    return Publish(fair, queue, headers, properties, payload, {})


def bytes_of(body: Any) -> bytes:
    """The body of a message as bytes."""
    return body.encode() if isinstance(body, str) else bytes(body)


def _queue_of(message: Any, fair: Fair) -> str | None:
    """The fair queue that a message came from; None if it came from another."""
    sent = message.delivery_info
    queue = queue_at(fair.app.amqp.queues, sent.get("exchange") or "", sent.get("routing_key") or "")
    return None if queue is None else fair.fair_queue(queue)
