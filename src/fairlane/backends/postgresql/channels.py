"""What travels by NOTIFY: the names of the channels, and topics packed into payloads.

A payload is topics joined by line breaks, or one of three signs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

EVERYTHING = "*"
"""Instead of the topics, when they are too many: whoever hears it looks at all it listens to."""
HERE = "+"
"""Somebody listens to jobs. Sent on the channel of the other topics."""
ANYBODY = "?"
"""Does anybody listen to jobs? Sent on the channel of the jobs."""
PAYLOAD_BYTES = 7_900
"""The server takes less than 8,000."""
MOST_WAITING = 5_000
"""Topics of a kind that wait to be sent."""
NAME_BYTES = 40
"""A longer schema is told by its hash: the name of a channel has at most 63 bytes."""


def is_about_a_job(topic: str) -> bool:
    """Whether it belongs on the channel of the jobs: a change of one, or of the line that it waits in."""
    return topic.startswith(("j", "p"))


class Channels(NamedTuple):
    """The two channels of a schema: ``job:`` and ``place:`` topics are many, and most processes do not care for any."""

    jobs: str
    others: str

    @classmethod
    def of(cls, schema: str) -> Channels:
        """Names that no other schema of the database has."""
        name = schema.encode(errors="replace")
        if len(name) > NAME_BYTES:
            schema = f"#{hashlib.sha256(name).hexdigest()[:32]}"
        return cls(f"fairlane.jobs.{schema}", f"fairlane.topics.{schema}")

    def carrying(self, topic: str) -> str:
        """The channel of `topic`, which may be the whole payload there."""
        return self.jobs if is_about_a_job(topic) else self.others

    def of_kinds(self, *, jobs: bool, others: bool) -> frozenset[str]:
        """The channels of these kinds of topics."""
        return frozenset(name for name, wanted in zip(self, (jobs, others), strict=True) if wanted)


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


class Waiting:
    """Topics of one kind that are to be sent: each once, and no more than `MOST_WAITING`."""

    def __init__(self) -> None:
        self._topics: dict[str, None] = {}

    def add(self, topics: Iterable[str]) -> None:
        """Some more. When they are too many, `EVERYTHING` replaces them."""
        if EVERYTHING not in self._topics:
            self._topics.update(dict.fromkeys(topics))
            if len(self._topics) > MOST_WAITING:
                self._topics = {EVERYTHING: None}

    def take(self) -> Collection[str]:
        """All of them; none are left."""
        taken, self._topics = self._topics, {}
        return taken

    def __len__(self) -> int:
        """How many there are."""
        return len(self._topics)
