"""What travels by NOTIFY: the names of the channels, and topics packed into payloads.

A payload is topics joined by line breaks, or one of three signs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from ..shared import topics as shared_topics
from ..shared.topics import EVERYTHING

HERE = "+"
"""A process listens to jobs. Sent on the channel of the other topics."""
ASK = "?"
"""Asks whether any process listens to jobs. Sent on the channel of the jobs."""
PAYLOAD_BYTES = 7_900
"""The server takes less than 8,000."""
NAME_BYTES = 40
"""A longer schema is named by its hash: the name of a channel has at most 63 bytes."""


class Channels(shared_topics.Channels):
    """The two channels of a schema."""

    __slots__ = ()

    @classmethod
    def of(cls, schema: str) -> Channels:
        """Names that no other schema of the database has."""
        name = schema.encode(errors="replace")
        if len(name) > NAME_BYTES:
            schema = f"#{hashlib.sha256(name).hexdigest()[:32]}"
        return cls(f"fairlane.jobs.{schema}", f"fairlane.topics.{schema}")


def payloads(topics: Iterable[str]) -> Iterator[str]:
    """The topics, as many to a payload as fit. One that cannot travel stands for all."""
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
