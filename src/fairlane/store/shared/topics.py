"""Topics that pass through a server: the two channels that carry them, and the topics to send.

A message on a channel is a list of topics, one per line, or `EVERYTHING`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

KINDS = "jlpqsw"
"""The first letters of job, leader, place, queue, session and worker: what a topic can be about."""
EVERYTHING = "*"
"""Sent instead of topics that are too many: it stands for all topics of a subscription."""
MOST_WAITING = 5_000
"""Most topics of one kind that wait to be sent."""


ABOUT_JOBS = ("j", "p")
"""The first letters of topics about jobs: changes of a job, and of places in its lane."""


def by_kind(topics: Collection[str], about_jobs: tuple[str, ...] = ABOUT_JOBS) -> tuple[list[str], list[str]]:
    """Return the topics about jobs, and the others."""
    jobs = [topic for topic in topics if topic.startswith(about_jobs)]
    others = [topic for topic in topics if not topic.startswith(about_jobs)] if len(jobs) < len(topics) else []
    return jobs, others


class Channels(NamedTuple):
    """The two channels of a store. ``job:`` and ``place:`` topics are many and few processes need them."""

    jobs: str
    others: str

    def of_kinds(self, *, jobs: bool, others: bool) -> frozenset[str]:
        """Return the channels of these kinds of topics."""
        return frozenset(name for name, wanted in zip(self, (jobs, others), strict=True) if wanted)


class Waiting:
    """Topics of one kind to send: each once, at most `MOST_WAITING`."""

    def __init__(self) -> None:
        self._topics: dict[str, None] = {}

    def add(self, topics: Iterable[str]) -> None:
        """Add topics. If there are too many, `EVERYTHING` replaces them."""
        if EVERYTHING not in self._topics:
            self._topics.update(dict.fromkeys(topics))
            if len(self._topics) > MOST_WAITING:
                self._topics = {EVERYTHING: None}

    def take(self) -> Collection[str]:
        """Remove and return all topics."""
        taken, self._topics = self._topics, {}
        return taken

    def __len__(self) -> int:
        """Return the number of topics."""
        return len(self._topics)
