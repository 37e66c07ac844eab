"""What the writer remembers between transactions: queues, their settings, and the numbers of jobs. Never their
state."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from ...model.lanes import OPEN_TERMS, LaneTerms, terms
from ...model.settings import QueueOverride, QueueSettings
from ...model.slots import Slots
from ..shared.queries import load_queries
from ..shared.stored_settings import read_settings
from ..wakeups import queue_topic

SQL = load_queries("fairlane.store.sqlite")
MOST_REMEMBERED_TERMS = 50_000
MOST_REMEMBERED_SEQS = 200_000


def json_texts(texts: Iterable[str]) -> str:
    """Texts as a list for json_each. What is no Unicode (an undecodable shell argument) was never stored: it is left
    out."""
    wanted = list(texts)
    try:
        return msgspec.json.encode(wanted).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode([text for text in wanted if text.isascii() or text.isprintable()]).decode()


class Queue(msgspec.Struct):
    """A queue as the steps see it."""

    id: int
    name: str
    version: int
    declared: QueueSettings
    override: QueueOverride | None
    settings: QueueSettings
    slots: Slots | None
    topic: str
    weighted: bool
    """Whether any lane has a weight of its own."""
    problem: str | None
    """What of its settings cannot be read."""


class Catalog:
    """Queues by name and number. Settings changed by another process are noticed by a counter in the file."""

    def __init__(self) -> None:
        self.names: dict[str, Queue] = {}
        self.numbers: dict[int, Queue] = {}
        self.seqs: dict[str, int] = {}
        """The numbers of jobs claimed through this process: where to look first, never an answer."""
        self._terms: dict[tuple[int, str], LaneTerms] = {}
        self._epoch = -1

    def forget(self) -> None:
        """Drop everything: a transaction was rolled back, or settings changed."""
        self.names.clear()
        self.numbers.clear()
        self._terms.clear()
        # A number given out in a transaction that was rolled back is given out again.
        self.seqs.clear()
        self._epoch = -1

    def remember_seqs(self, pairs: Iterable[tuple[str, int]]) -> None:
        """Keep the numbers of jobs that will be written about."""
        if len(self.seqs) > MOST_REMEMBERED_SEQS:
            self.seqs.clear()
        self.seqs.update(pairs)

    def refresh(self, connection: sqlite3.Connection) -> None:
        """Forget what another process has changed. Once for each step that looks at a queue."""
        [epoch] = connection.execute(SQL["settings_epoch"]).fetchone()
        if epoch != self._epoch:
            self.forget()
            self._epoch = epoch

    def remember(self, row: tuple[int, str, int, str, str | None]) -> Queue:
        """Keep a queue that was read."""
        number, name, version, declared_json, override_json = row
        declared, override, settings, problem = read_settings(name, declared_json, override_json)
        weighted = any(rule.weight != 1.0 for rule in settings.lanes)
        topic = queue_topic(name)
        queue = Queue(number, name, version, declared, override, settings, settings.slots, topic, weighted, problem)
        self.names[name] = queue
        self.numbers[number] = queue
        return queue

    def terms(self, queue: Queue, lane: str) -> LaneTerms:
        """What holds for a lane; '' is the lane of jobs without one."""
        if not lane or not queue.settings.lanes:
            return OPEN_TERMS
        found = self._terms.get((queue.id, lane))
        if found is None:
            if len(self._terms) >= MOST_REMEMBERED_TERMS:
                self._terms.clear()
            found = self._terms[queue.id, lane] = terms(queue.settings, lane)
        return found
