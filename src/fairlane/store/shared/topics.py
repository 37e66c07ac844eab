"""Topics on their way through a server: the two channels that carry them, and those that wait to be sent.

What travels on a channel is topics joined by line breaks, or a sign.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

KINDS = "jlpqsw"
"""The first letters of job, leader, place, queue, session and worker: what a topic can be about."""
EVERYTHING = "*"
"""Instead of the topics, when they are too many: whoever hears it looks at all it listens to."""
MOST_WAITING = 5_000
"""Topics of a kind that wait to be sent."""


def is_about_a_job(topic: str) -> bool:
    """Whether it belongs on the channel of the jobs: a change of one, or of the line that it waits in."""
    return topic.startswith(("j", "p"))


def by_kind(topics: Collection[str]) -> tuple[list[str], list[str]]:
    """Those about jobs, and the others."""
    jobs = [topic for topic in topics if is_about_a_job(topic)]
    others = [topic for topic in topics if not is_about_a_job(topic)] if len(jobs) < len(topics) else []
    return jobs, others


class Channels(NamedTuple):
    """The two channels of a store: ``job:`` and ``place:`` topics are many, and most processes do not care for any."""

    jobs: str
    others: str

    def carrying(self, topic: str) -> str:
        """The channel of `topic`, which may be the whole payload there."""
        return self.jobs if is_about_a_job(topic) else self.others

    def of_kinds(self, *, jobs: bool, others: bool) -> frozenset[str]:
        """The channels of these kinds of topics."""
        return frozenset(name for name, wanted in zip(self, (jobs, others), strict=True) if wanted)


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
