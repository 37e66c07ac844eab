"""The records of a job: what a client sends, what a worker holds, what a reader sees.

All values are frozen and independent of stores and clocks. Times that a reader sees are seconds since 1970 by the
store's clock; times that a client sends are durations, except `run_at`, which a user specifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from typing import TypeVar

import msgspec

from ..errors import InvalidInput
from . import names
from .retry import DEFAULT_BACKOFF, Backoff

MOST_JOBS_PER_CALL = 1_000
MOST_BYTES_PER_CALL = 1024 * 1024
"""Payloads, results or progress in one call that can be split: a link of 128 KiB/s transfers it in 8 s."""
MOST_BYTES_PER_ENQUEUE = 16 * 1024 * 1024
"""The same for jobs that are stored together, all or none, and so cannot be split."""
MOST_RETRIES = 1_000
KEPT_ATTEMPTS = 20


T = TypeVar("T")


def parts_of(
    items: Sequence[T], size_of: Callable[[T], int], *, most: int = MOST_JOBS_PER_CALL, most_bytes: int
) -> list[Sequence[T]]:
    """Split a list into one part per call: each with at most so many items and bytes, and at least one item."""
    if len(items) <= most and sum(map(size_of, items)) <= most_bytes:
        return [items] if items else []
    parts: list[Sequence[T]] = []
    start = carried = 0
    for end, item in enumerate(items):
        size = size_of(item)
        if end > start and (carried + size > most_bytes or end - start >= most):
            parts.append(items[start:end])
            start, carried = end, 0
        carried += size
    return [*parts, items[start:]]


class Priority(IntEnum):
    """A job's priority class; the lower number starts first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @property
    def label(self) -> str:
        """The name users see: high, normal or low."""
        return self.name.lower()

    @classmethod
    def parse(cls, word: str) -> Priority:
        """Return the priority called `word`; raises `InvalidInput` for any other word."""
        try:
            return cls[word.upper()]
        except (KeyError, AttributeError):
            raise InvalidInput("priority", f"must be 'high', 'normal' or 'low', not {names.shown(word)}") from None


class JobState(StrEnum):
    """The states of a job. `docs/states.md` draws the moves between them."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the job has ended: nothing changes it any more."""
        return self in FINAL_STATES


FINAL_STATES = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
WAITING_STATES = frozenset({JobState.SCHEDULED, JobState.PENDING})


class Reason(StrEnum):
    """Why a job failed or was cancelled, or why an attempt ended as it did."""

    ERROR = "error"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    BAD_PAYLOAD = "bad_payload"
    UNKNOWN_TASK = "unknown_task"
    BY_USER = "by_user"
    EXPIRED = "expired"
    WAITER_GONE = "waiter_gone"
    WORKER_LOST = "worker_lost"
    REOPENED = "reopened"


FAILED_REASONS = frozenset({Reason.ERROR, Reason.TIMEOUT, Reason.CRASHED, Reason.BAD_PAYLOAD, Reason.UNKNOWN_TASK})
CANCELLED_REASONS = frozenset(Reason) - FAILED_REASONS


class JobKind(StrEnum):
    """The kind of a record. Workers claim only `job` and `cleanup`."""

    JOB = "job"
    TURN = "turn"
    """Permission for the caller's own code to proceed; the store starts it when it grants the place."""
    BROADCAST = "broadcast"
    """The parent of one child per worker; runs until all children are final."""
    CLEANUP = "cleanup"
    """The last job of a binding; created by `release` only."""


class CronSlot(msgspec.Struct, frozen=True):
    """One slot of a schedule: at most one job exists for each."""

    schedule: str
    slot: float

    def __post_init__(self) -> None:
        names.check_name("schedule", self.schedule)
        names.check_instant("slot", self.slot)


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """One request to run a task, validated when it is created: a `NewJob` that exists is valid."""

    id: str
    task: str
    queue: str = "default"
    payload: bytes = b"[[],{}]"
    lane: str | None = None
    priority: Priority = Priority.NORMAL
    cost: float = 1.0
    delay: float = 0.0
    run_at: float | None = None
    expires: float | None = None
    """Seconds after the enqueue within which it must start; otherwise it is cancelled as `expired`."""
    retries: int = 3
    backoff: Backoff = DEFAULT_BACKOFF
    timeout: float | None = None
    unique: str | None = None
    unique_for: float | None = None
    pool: str = "default"
    sticky: str | None = None
    worker: int | None = None
    kind: JobKind = JobKind.JOB
    waiter: str | None = None
    """For a turn: the session that waits for it, and owns it once it is granted."""
    ttl: float = 0.0
    """For a broadcast: workers that register within this many seconds get a copy too."""
    retry_of: str | None = None
    cron: CronSlot | None = None
    headers: bytes | None = None
    """JSON that Fairlane carries and never reads, such as a trace context."""

    @property
    def size(self) -> int:
        """The bytes that count towards the size of a call."""
        return len(self.payload) + len(self.headers or b"")

    def __post_init__(self) -> None:
        names.check_key("id", self.id)
        names.check_name("task", self.task)
        names.check_name("queue", self.queue)
        check_payload(self.payload)
        if self.lane is not None:
            names.check_key("lane", self.lane)
        if type(self.priority) is not Priority:
            raise InvalidInput("priority", f"must be 'high', 'normal' or 'low', not {names.shown(self.priority)}")
        names.check_factor("cost", self.cost)
        if self.delay != 0:
            names.check_seconds("delay", self.delay)
        if self.run_at is not None:
            names.check_instant("run_at", self.run_at)
            if self.delay:
                raise InvalidInput("run_at", "give either delay or run_at, not both")
        if self.expires is not None:
            names.check_seconds("expires", self.expires)
        names.check_count("retries", self.retries, least=0, most=MOST_RETRIES)
        if type(self.backoff) is not Backoff:
            raise InvalidInput("backoff", f"must be a Backoff, not {type(self.backoff).__name__}")
        if self.timeout is not None:
            names.check_seconds("timeout", self.timeout, least=0.001)
        if self.unique is not None:
            names.check_key("unique", self.unique)
        if self.unique_for is not None:
            names.check_seconds("unique_for", self.unique_for)
            if self.unique is None:
                raise InvalidInput("unique_for", "requires unique=")
        names.check_name("pool", self.pool)
        if self.sticky is not None:
            names.check_key("sticky", self.sticky)
        if self.worker is not None:
            names.check_count("worker", self.worker, least=0)
            if self.sticky is not None:
                raise InvalidInput("worker", "give either sticky or worker, not both")
        if self.headers is not None:
            names.check_size("headers", self.headers, names.ERROR_BYTES)
            _check_json("headers", self.headers)
        if self.retry_of is not None:
            names.check_key("retry_of", self.retry_of)
        if self.cron is not None and type(self.cron) is not CronSlot:
            raise InvalidInput("cron", f"must be a CronSlot, not {type(self.cron).__name__}")
        if self.kind is not JobKind.JOB or self.waiter is not None or self.ttl != 0:
            self._check_kind()

    def _check_kind(self) -> None:
        if type(self.kind) is not JobKind:
            raise InvalidInput("kind", f"must be a JobKind, not {type(self.kind).__name__}")
        placed = self.sticky is not None or self.worker is not None
        late = self.delay != 0 or self.run_at is not None
        if self.kind is JobKind.TURN:
            if self.waiter is None:
                raise InvalidInput("waiter", "a turn requires the session that waits for it")
            names.check_key("waiter", self.waiter)
            if self.lane is None:
                raise InvalidInput("lane", "a turn requires a lane")
            if placed:
                raise InvalidInput("sticky", "a turn runs in its caller and cannot be placed on a worker")
            if late:
                raise InvalidInput("delay", "a turn cannot be delayed")
        elif self.waiter is not None:
            raise InvalidInput("waiter", "only a turn has a waiter")
        if self.kind is JobKind.BROADCAST:
            names.check_seconds("ttl", self.ttl)
            if placed:
                raise InvalidInput("sticky", "a broadcast goes to every worker of the pool")
            if self.lane is not None:
                raise InvalidInput("lane", "a broadcast cannot have a lane: no limit may hold back a copy")
            if late:
                raise InvalidInput("delay", "a broadcast cannot be delayed")
        elif self.ttl != 0:
            raise InvalidInput("ttl", "only a broadcast has a ttl")
        if self.kind is JobKind.CLEANUP and (placed or self.lane is not None or late):
            raise InvalidInput("cleanup", "a clean-up is placed by its binding: give no lane, sticky, worker or delay")


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """The result for one `NewJob`: the job that exists now, and whether this call created it."""

    id: str
    created: bool
    state: JobState


class Held(msgspec.Struct, frozen=True, gc=False):
    """Identifies a claim. The fence distinguishes one claim of a job from every other."""

    id: str
    fence: int


class Claimed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job that a session may run now, with everything a worker needs to run it."""

    id: str
    fence: int
    attempt: int
    task: str
    queue: str
    lane: str | None
    priority: Priority
    payload: bytes
    retries: int
    backoff: Backoff
    timeout: float | None
    kind: JobKind
    sticky: str | None
    suspect: bool
    """It was running in a process that died, and no run has finished since: run it apart from other jobs."""
    limited: bool
    """It holds a place of a limited lane: without contact to the store it must be stopped before the lease ends."""
    headers: bytes | None
    waited: float | None = None
    """Seconds from when it was due until this start. Kept for the first run only; None for later ones."""

    @property
    def held(self) -> Held:
        """The identity of the claim."""
        return Held(self.id, self.fence)

    @property
    def size(self) -> int:
        """The bytes that count towards the size of a claim."""
        return len(self.payload) + len(self.headers or b"")


def waiting_since(
    enqueued_at: float, delay: float | None, run_at: float | None, ended_at: float | None = None
) -> float:
    """When a job began to wait: it was sent, became due, or its last run ended."""
    return max(enqueued_at + (delay or 0.0), run_at or 0.0, ended_at or 0.0)


def waited(
    fence: int, started_at: float | None, enqueued_at: float, delay: float | None, run_at: float | None
) -> float | None:
    """How long a due job waited for the claim of this fence; None for a claim that is not the first."""
    if fence != 1 or started_at is None:
        return None
    return max(0.0, started_at - waiting_since(enqueued_at, delay, run_at))


class Acceptance(StrEnum):
    """What the store did with one fenced write."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """The same write under the same fence was applied before; this one changed nothing."""
    STALE = "stale"
    """The writer does not own the job; nothing was changed."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The result of one fenced write: whether it was applied, and the state of the job after it.

    A repeated write returns the stored outcome, a stale one the current state, or None when the job is unknown.
    """

    id: str
    acceptance: Acceptance
    state: JobState | None

    @property
    def accepted(self) -> bool:
        """Whether the write counts: it was applied, now or before."""
        return self.acceptance is not Acceptance.STALE


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One claim of a job, in its history."""

    fence: int
    attempt: int
    session: str
    worker: str
    started_at: float
    ended_at: float | None = None
    outcome: str | None = None
    """completed, retry, failed, snoozed, handed_back, declined, cancelled, crashed or taken_back."""
    state: JobState | None = None
    """The state of the job after this attempt."""
    reason: Reason | None = None
    error: str | None = None
    refused: int = 0
    """Stale writes under this fence: they came after the job was lost."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent snapshot of a job."""

    id: str
    task: str
    queue: str
    kind: JobKind
    state: JobState
    reason: Reason | None
    lane: str | None
    priority: Priority
    cost: float
    payload: bytes
    headers: bytes | None
    retries: int
    backoff: Backoff
    timeout: float | None
    unique: str | None
    pool: str
    sticky: str | None
    direct: int | None
    """The worker index it was addressed to."""
    worker: str | None
    """``pool/index`` of the worker it is bound to, runs on, or ran on last."""
    session: str | None
    attempt: int
    fence: int
    arrival: int | None
    """Its number in the order of admission; None before it has arrived."""
    retry_of: str | None
    parent: str | None
    enqueued_at: float
    due_at: float | None
    expires_at: float | None
    started_at: float | None
    finished_at: float | None
    cancel_requested: bool
    suspect: bool
    progress: bytes | None
    result: bytes | None
    error: str | None
    error_group: str | None
    attempts: tuple[Attempt, ...]
    first_due_at: float | None = None
    """When it was to run first; None if it was sent to run at once. `due_at` is None from then on."""

    def as_new(self, id: str) -> NewJob:
        """Return a request that runs this job again under a new `id`; its `retry_of` names this job."""
        if self.kind not in (JobKind.JOB, JobKind.BROADCAST):
            raise InvalidInput("id", f"a {self.kind.value} cannot be retried; create a new one")
        return NewJob(
            id=id,
            task=self.task,
            queue=self.queue,
            payload=self.payload,
            lane=self.lane,
            priority=self.priority,
            cost=self.cost,
            retries=self.retries,
            backoff=self.backoff,
            timeout=self.timeout,
            unique=self.unique,
            pool=self.pool,
            sticky=self.sticky,
            worker=self.direct,
            kind=self.kind,
            retry_of=self.id,
            headers=self.headers,
        )


def check_ids(ids: Sequence[str]) -> None:
    """Reject more ids than one call takes."""
    if len(ids) > MOST_JOBS_PER_CALL:
        raise InvalidInput("ids", f"at most {MOST_JOBS_PER_CALL} in one call, not {len(ids)}; send them in batches")


def check_payload(payload: bytes) -> None:
    """Reject what cannot be the payload of a job: anything but JSON, or more than `names.PAYLOAD_BYTES`."""
    names.check_size("payload", payload, names.PAYLOAD_BYTES)
    _check_json("payload", payload)


def _check_json(field: str, value: bytes) -> None:
    try:
        msgspec.json.decode(value, type=msgspec.Raw)
        # Decoding to Raw does not validate the bytes of strings, and JSON must be UTF-8.
        if not value.isascii():
            value.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput(field, f"is not JSON ({exc})") from None
