"""Celery messages as payloads of jobs, and back.

The payload is ``[[], {"message": {…}}]``: headers, properties, content type and encoding as Celery would send them to a
broker. A body that is JSON is embedded as it is, so that it can be read in the dashboard; any other is base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from kombu.message import Message
from kombu.utils import json

from ...errors import InvalidInput

PREFIX = "fairlane_"
"""What the names of all options and headers of Fairlane begin with."""
LANE = "fairlane_lane"
PRIORITY = "fairlane_priority"
UNIQUE = "fairlane_unique"
KEY = "fairlane_key"
TTL = "fairlane_ttl"
OPTIONS = (LANE, PRIORITY, UNIQUE, KEY, TTL)
"""What a caller may add to a publish, as options of `apply_async` or as headers."""
JOB = "fairlane_job"
QUEUE = "fairlane_queue"
ADDED = (*OPTIONS, JOB, QUEUE)
"""The headers that belong to the job and are not part of the stored message."""
TELLING = ("task", "retries", "replaced_task_nesting", "group")
"""The headers that tell one message of an id from another. Most others differ when it is sent again: the process and
the task that it comes from, and times that are computed from now."""


class StoredMessage(msgspec.Struct, omit_defaults=True):
    """A protocol-2 message of Celery, as the payload of a job contains it."""

    headers: msgspec.Raw
    properties: msgspec.Raw
    content_type: str
    content_encoding: str
    body: msgspec.Raw = msgspec.Raw(b"null")
    base64: str | None = None
    """The body, if it is not JSON."""
    first: str | None = None
    """The digest of the message that the job was sent with, if Celery's retries have replaced that."""
    plain: str | None = None
    """The digest without compression of the message that the job was sent with, if that was compressed. Not in `first`:
    code that does not know this field compares the compressed message."""


class _Envelope(msgspec.Struct):
    message: StoredMessage


_decoder = msgspec.json.Decoder(tuple[list[Any], _Envelope])


def payload_of(
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    content_type: str,
    content_encoding: str,
    body: bytes | str,
    plain: str | None = None,
) -> bytes:
    """The payload of the job of a message. `body` is serialized, and perhaps compressed: then `plain` is the digest of
    the message without compression, as a worker that adopts it sees it."""
    raw = body.encode() if isinstance(body, str) else body
    kept = {name: value for name, value in headers.items() if name not in ADDED}
    message = StoredMessage(
        # Encoded by kombu, as the broker's transport would: headers may contain dates and UUIDs.
        headers=_raw("headers", kept),
        properties=_raw("properties", properties),
        content_type=content_type,
        content_encoding=content_encoding,
        plain=plain,
    )
    if content_type == "application/json" and not kept.get("compression") and _is_json(raw):
        message.body = msgspec.Raw(raw)
    else:
        message.base64 = base64.b64encode(raw).decode()
    return msgspec.json.encode(([], _Envelope(message)))


def stored_message(payload: bytes) -> StoredMessage:
    """The message in the payload of a job. Raises `InvalidInput` if there is none."""
    try:
        return _decoder.decode(payload)[1].message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput("payload", f"is not a message of Celery ({exc})") from None


def headers_of(payload: bytes) -> dict[str, Any]:
    """The headers of the message in a payload."""
    headers: dict[str, Any] = json.loads(bytes(stored_message(payload).headers))
    return headers


def digests_of(payload: bytes) -> set[str]:
    """Two messages have one of these in common if one is the other, sent once more, perhaps by the broker, which
    removes a compression; a retry has those of its first run."""
    stored = stored_message(payload)
    return {_digest(stored)} | ({stored.plain} if stored.plain is not None else set())


def digest_of(payload: bytes) -> str:
    """The digest of the message that a job was sent with, as it is stored."""
    return _digest(stored_message(payload))


def _digest(stored: StoredMessage) -> str:
    if stored.first is not None:
        return stored.first
    headers = json.loads(bytes(stored.headers))
    told = [headers.get(name) or None for name in TELLING]
    content = (told, stored.content_type, stored.content_encoding, stored.body, stored.base64)
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]


def following(payload: bytes, previous: bytes) -> bytes:
    """The payload of a retry, which keeps the digests of the message that the job was sent with."""
    message, before = stored_message(payload), stored_message(previous)
    message.first, message.plain = _digest(before), before.plain
    return msgspec.json.encode(([], _Envelope(message)))


def _raw(field: str, value: Mapping[str, Any]) -> msgspec.Raw:
    try:
        encoded = json.dumps(value)
    except (TypeError, ValueError) as exc:
        raise InvalidInput(field, f"cannot be JSON ({type(exc).__name__})") from None
    return msgspec.Raw(encoded.encode())


def _is_json(raw: bytes) -> bool:
    try:
        # Python's encoder writes NaN and infinity, which are not JSON.
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class Delivered(Protocol):
    """What a local message reports to when Celery rejects it before it has made a request."""

    def refused(self, why: str) -> None:
        """Celery has refused the message."""


class LocalMessage(Message):
    """A message that was claimed from Fairlane, and is handed to Celery's consumer in memory.

    There is no broker to acknowledge it to: the end of its job is written by the request that Celery makes of it.
    """

    def __init__(self, payload: bytes, delivery: Delivered, *, added: dict[str, Any], accept: Any, again: bool) -> None:
        stored = stored_message(payload)
        try:
            body = base64.b64decode(stored.base64) if stored.base64 is not None else bytes(stored.body)
        except binascii.Error:
            raise InvalidInput("payload", "the body of its message is not base64") from None
        properties = json.loads(bytes(stored.properties))
        self.delivery: Any = delivery
        super().__init__(
            body=body,
            content_type=stored.content_type,
            content_encoding=stored.content_encoding,
            headers={**json.loads(bytes(stored.headers)), **added},
            properties=properties,
            delivery_info={
                "exchange": "",
                "routing_key": added[QUEUE],
                "priority": properties.get("priority"),
                "redelivered": again,
            },
            accept=accept,
        )

    def ack(self, multiple: bool = False) -> None:
        """Called directly only for a message that cannot be decoded."""
        self.delivery.refused("Celery could not decode the message")

    def ack_log_error(self, logger: Any, errors: Any, multiple: bool = False) -> None:
        """Do nothing: the end of the job is written by its request."""

    def reject_log_error(self, logger: Any, errors: Any, requeue: bool = False) -> None:
        """Called without a request for an unknown task or content that is not accepted."""
        self.delivery.refused("Celery rejected the message: its task or its content type is not accepted")
