"""Rows as the steps handle them (active jobs, sessions, queues) and what the writer caches between transactions."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from ...errors import InvalidInput
from ...model.job import Attempt, Reason
from ...model.lanes import OPEN_TERMS, LaneTerms, terms
from ...model.retry import DEFAULT_BACKOFF, Backoff
from ...model.session import worker_name
from ...model.settings import QueueOverride, QueueSettings
from ...model.slots import Slots
from ..shared.queries import load_queries
from ..shared.rows import decode_backoff, readable_attempts
from ..shared.stored_settings import read_settings
from ..wakeups import queue_topic

SQL = load_queries("fairlane.store.sqlite")
MOST_CACHED_TERMS = 50_000
MOST_CACHED_SEQS = 200_000
LEASE_SLACK = 1.0
"""Allows for rounding when a lease is compared with its length."""
_encoder = msgspec.json.Encoder()


class Queries(Protocol):
    """Runs named queries at one point in time: a `Step` or a `View`."""

    mono: float
    boot: str

    def one(self, name: str, *values: Any) -> Any:
        """Return the first row of a query, or None."""

    def all(self, name: str, *values: Any) -> list[Any]:
        """Return every row of a query."""


class JobRecord(msgspec.Struct):
    """An active job: its row in `fairlane_active_job`, with what steps need of its identity.

    Mutable: a step loads it, changes it and saves it. The fields are in the order of `record_columns`.
    """

    seq: int
    queue: int
    class_: int
    state: int
    gate: int
    flow: int | None
    inbox: str
    lane: int | None
    rank: int
    granted: int
    granted_at: float | None
    arrival: int | None
    due: float | None
    expires_at: float | None
    session: int | None
    claim: int | None
    waiter: int | None
    binding: int | None
    fence: int
    attempt: int
    crashes: int
    suspect: int
    cancel: int
    refused: int
    paid: int
    started_at: float | None
    id: str
    kind: str
    lane_key: str | None
    cost: float
    pool: str
    sticky: str | None
    direct: int | None
    retries: int
    backoff_json: bytes | None
    uniq: str | None
    task: str
    parent: int | None
    attempts_json: bytes | None
    returns: int = 0
    """Times in a row that it was handed back after it had begun."""

    @property
    def flow_key(self) -> str:
        """Its lane as flows store it: '' for a job without one."""
        return self.lane_key or ""

    @property
    def backoff(self) -> Backoff:
        """Its retry policy; the default if none is stored or it cannot be read. The next claim fails such a job."""
        with contextlib.suppress(InvalidInput):
            return decode_backoff(self.backoff_json)
        return DEFAULT_BACKOFF

    @property
    def attempts(self) -> list[Attempt]:
        """Its finished claims, oldest first; empty if the history cannot be read."""
        return readable_attempts(self.attempts_json)


def job_record_of(row: tuple[Any, ...]) -> JobRecord:
    """Return the job of a row of `record_columns`."""
    return JobRecord(*row)


def encode_attempts(attempts: list[Attempt]) -> bytes:
    """Return the value of the `attempts` column."""
    return _encoder.encode(attempts)


def reason_value(reason: Reason | None) -> str | None:
    """Return the value of the `reason` column."""
    return None if reason is None else reason.value


class ClaimHolder(msgspec.Struct, frozen=True):
    """The session that runs a job, as the job's history names it."""

    id: str
    worker: str


class StoredSession(msgspec.Struct):
    """A row of `fairlane_session`. The fields are in the order of `session_columns`."""

    seq: int
    id: str
    kind: str
    state: str
    host: str
    pid: int
    pool: str
    index: int | None
    named: int
    queues: str
    slots: int | None
    reserved_high: int
    reserved_normal: int
    started_at: float
    ended_at: float | None
    lease: float
    boot: str
    expires: float
    claim: int
    task_set: str | None

    @staticmethod
    def find(queries: Queries, id: str) -> StoredSession | None:
        """Return the session with this id, if there is one."""
        row = queries.one("session_by_id", id)
        return None if row is None else StoredSession(*row)

    @property
    def present(self) -> bool:
        """Whether it is neither ended nor dead. A session whose lease has expired is present until declared dead."""
        return self.state in ("live", "stopping")

    @property
    def worker(self) -> str:
        """Its name in the history of jobs: pool and index of a worker, the host of any other session."""
        return self.host if self.index is None else worker_name(self.pool, self.index)

    @property
    def holder(self) -> ClaimHolder:
        """The session as the holder of claims."""
        return ClaimHolder(self.id, self.worker)

    def remaining(self, mono: float, boot: str) -> float:
        """Return the seconds left of its lease; 0 if the record of the lease is damaged."""
        if type(self.expires) is not float or type(self.lease) is not float:
            return 0.0
        return lease_left(self.expires, self.boot, self.lease, mono, boot)


def lease_left(expires: float, granted_in: str, lease: float, mono: float, boot: str) -> float:
    """Return the seconds until a lease of a session or a term ends, 0 or less once it has.

    Leases are measured by the monotonic clock, whose readings cannot be compared between boots: a lease of another boot
    is over. Where boots have no ids, a lease that has more left than its whole length is from another boot.
    """
    left = expires - mono
    return left if granted_in == boot and left <= lease + LEASE_SLACK else min(left, 0.0)


def json_texts(texts: Iterable[str]) -> str:
    """Return texts as a JSON list for json_each.

    Texts that are not valid Unicode (an undecodable shell argument) cannot have been stored and are left out.
    """
    wanted = list(texts)
    try:
        return msgspec.json.encode(wanted).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode([text for text in wanted if text.isascii() or text.isprintable()]).decode()


class Queue(msgspec.Struct):
    """A queue with its settings in effect."""

    id: int
    name: str
    version: int
    declared: QueueSettings
    override: QueueOverride | None
    settings: QueueSettings
    slots: Slots | None
    topic: str
    weighted: bool
    """Whether any lane has a weight other than 1."""
    problem: str | None
    """Why its settings cannot be read, if they cannot."""


class QueueCache:
    """Queues by name and id, lane terms, and the seqs of claimed jobs. Never the state of a job.

    A counter in the file shows when another process has changed settings.
    """

    def __init__(self) -> None:
        self.names: dict[str, Queue] = {}
        self.numbers: dict[int, Queue] = {}
        self.seqs: dict[str, int] = {}
        """Seqs of jobs claimed by this process, by job id: a hint that is always verified."""
        self._terms: dict[tuple[int, str], LaneTerms] = {}
        self._epoch = -1

    def clear(self) -> None:
        """Drop everything, after a transaction was rolled back or settings have changed."""
        self.names.clear()
        self.numbers.clear()
        self._terms.clear()
        # SQLite assigns a seq again that was assigned in a rolled-back transaction.
        self.seqs.clear()
        self._epoch = -1

    def add_seqs(self, pairs: Iterable[tuple[str, int]]) -> None:
        """Keep the seqs of jobs that were claimed."""
        if len(self.seqs) > MOST_CACHED_SEQS:
            self.seqs.clear()
        self.seqs.update(pairs)

    def refresh(self, connection: sqlite3.Connection) -> None:
        """Clear the cache if another process has changed settings. Called once in each step that reads a queue."""
        [epoch] = connection.execute(SQL["settings_epoch"]).fetchone()
        if epoch != self._epoch:
            self.clear()
            self._epoch = epoch

    def add(self, row: tuple[int, str, int, str, str | None]) -> Queue:
        """Keep the queue of a row."""
        number, name, version, declared_json, override_json = row
        declared, override, settings, problem = read_settings(name, declared_json, override_json)
        weighted = any(rule.weight != 1.0 for rule in settings.lanes)
        topic = queue_topic(name)
        queue = Queue(number, name, version, declared, override, settings, settings.slots, topic, weighted, problem)
        self.names[name] = queue
        self.numbers[number] = queue
        return queue

    def terms(self, queue: Queue, lane: str) -> LaneTerms:
        """Return the terms of a lane; '' is the lane of jobs without one."""
        if not lane or not queue.settings.lanes:
            return OPEN_TERMS
        found = self._terms.get((queue.id, lane))
        if found is None:
            if len(self._terms) >= MOST_CACHED_TERMS:
                self._terms.clear()
            found = self._terms[queue.id, lane] = terms(queue.settings, lane)
        return found
