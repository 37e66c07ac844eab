"""The words for one request to run a task: what a client sends, what a worker holds, what a reader sees.

All values are frozen and know nothing of stores or clocks. Times a reader sees are seconds since 1970 by the
store's clock; times a client sends are durations, except `run_at`, which a person named.
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
"""What one call carries of payloads, results or progress, if it can be cut: a link of 128 KiB/s has it there in 8 s."""
MOST_BYTES_PER_ENQUEUE = 16 * 1024 * 1024
"""The same for jobs that are stored together, all or none."""
MOST_RETRIES = 1_000
KEPT_ATTEMPTS = 20


T = TypeVar("T")


def parts_of(
    items: Sequence[T], size_of: Callable[[T], int], *, most: int = MOST_JOBS_PER_CALL, most_bytes: int
) -> list[Sequence[T]]:
    """A list cut into parts for one call each: of at most so many items and bytes, and of one item at least."""
    if len(items) <= most and sum(map(size_of, items)) <= most_bytes:
        return [items] if items else []
    parts: list[Sequence[T]] = []
    start = carried = 0
    for place, item in enumerate(items):
        size = size_of(item)
        if place > start and (carried + size > most_bytes or place - start >= most):
            parts.append(items[start:place])
            start, carried = place, 0
        carried += size
    return [*parts, items[start:]]


class Priority(IntEnum):
    """A job's class in the dispatch rule; the lower number goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @property
    def label(self) -> str:
        """The word used on every surface: high, normal or low."""
        return self.name.lower()

    @classmethod
    def parse(cls, word: str) -> Priority:
        """The priority called `word`; anything else is refused, naming the words there are."""
        try:
            return cls[word.upper()]
        except (KeyError, AttributeError):
            raise InvalidInput("priority", f"{names.shown(word)} is none of 'high', 'normal', 'low'") from None


class JobState(StrEnum):
    """Where a job is in its life. `docs/states.md` draws the moves."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether nothing can change it any more."""
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
    """What a record stands for. Only `job` and `cleanup` are ever claimed by a worker's ask."""

    JOB = "job"
    TURN = "turn"
    """Permission for the waiter's own code; started by the step that grants it."""
    BROADCAST = "broadcast"
    """The parent of one child per worker; runs until all children are final."""
    CLEANUP = "cleanup"
    """The last job of a binding; made by `release` only."""


class CronSlot(msgspec.Struct, frozen=True):
    """The place of a job in a schedule: at most one job exists for each."""

    schedule: str
    slot: float

    def __post_init__(self) -> None:
        names.check_name("schedule", self.schedule)
        names.check_instant("slot", self.slot)


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """One request to run a task, checked when it is made: a `NewJob` that exists is valid."""

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
    """Seconds from the enqueue in which it must have started, else it is cancelled as `expired`."""
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
    """For a turn: the session that waits, and that owns it once granted."""
    ttl: float = 0.0
    """For a broadcast: workers that register within this many seconds get a copy too."""
    retry_of: str | None = None
    cron: CronSlot | None = None
    headers: bytes | None = None
    """JSON the system carries and never reads, such as a trace context."""

    @property
    def size(self) -> int:
        """The bytes of it that a call counts."""
        return len(self.payload) + len(self.headers or b"")

    def __post_init__(self) -> None:
        names.check_key("id", self.id)
        names.check_name("task", self.task)
        names.check_name("queue", self.queue)
        names.check_size("payload", self.payload, names.PAYLOAD_BYTES)
        _check_json("payload", self.payload)
        if self.lane is not None:
            names.check_key("lane", self.lane)
        if type(self.priority) is not Priority:
            raise InvalidInput("priority", f"{names.shown(self.priority)} is none of 'high', 'normal', 'low'")
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
                raise InvalidInput("unique_for", "needs unique= beside it")
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
                raise InvalidInput("waiter", "a turn needs the session that waits for it")
            names.check_key("waiter", self.waiter)
            if self.lane is None:
                raise InvalidInput("lane", "a turn needs a lane")
            if placed:
                raise InvalidInput("sticky", "a turn runs in its caller and cannot be placed on a worker")
            if late:
                raise InvalidInput("delay", "a turn begins to wait at once")
        elif self.waiter is not None:
            raise InvalidInput("waiter", "only a turn has a waiter")
        if self.kind is JobKind.BROADCAST:
            names.check_seconds("ttl", self.ttl)
            if placed:
                raise InvalidInput("sticky", "a broadcast goes to every worker of the pool")
            if self.lane is not None:
                raise InvalidInput("lane", "a broadcast has no lane: nothing may hold a copy back")
            if late:
                raise InvalidInput("delay", "a broadcast is sent at once")
        elif self.ttl != 0:
            raise InvalidInput("ttl", "only a broadcast has a ttl")
        if self.kind is JobKind.CLEANUP and (placed or self.lane is not None or late):
            raise InvalidInput("cleanup", "a clean-up is placed by its binding: give no lane, sticky, worker or delay")


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """The answer to one `NewJob`: the job there is now, and whether this call made it."""

    id: str
    created: bool
    state: JobState


class Held(msgspec.Struct, frozen=True, gc=False):
    """A claim as its holder names it. The fence tells one claim of a job from every other."""

    id: str
    fence: int


class Claimed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job a session may run now, with all a worker needs and nothing it must ask for."""

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
    """It was running in a process that died, and has not finished since: run it apart from others."""
    limited: bool
    """It has a place of a limited lane: without contact to the store its body must end before the lease does."""
    headers: bytes | None
    waited: float | None = None
    """Seconds from when it was due until this start; None for a run that is not the first, whose wait is not kept."""

    @property
    def held(self) -> Held:
        """The claim's name."""
        return Held(self.id, self.fence)

    @property
    def size(self) -> int:
        """The bytes of it that a claim counts."""
        return len(self.payload) + len(self.headers or b"")


def waiting_since(
    enqueued_at: float, delay: float | None, run_at: float | None, ended_at: float | None = None
) -> float:
    """Since when a job waits: it was sent, or due, or its last run ended."""
    return max(enqueued_at + (delay or 0.0), run_at or 0.0, ended_at or 0.0)


def waited(
    fence: int, started_at: float | None, enqueued_at: float, delay: float | None, run_at: float | None
) -> float | None:
    """How long a job waited for the claim of this fence, once it was due."""
    if fence != 1 or started_at is None:
        return None
    return max(0.0, started_at - waiting_since(enqueued_at, delay, run_at))


class Acceptance(StrEnum):
    """How the store took one fenced write."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """The same write under the same fence came before; this one changed nothing."""
    STALE = "stale"
    """The writer does not hold the job; nothing was changed."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The answer to one fenced write: how it was taken, and the state the job is in by it.

    A repeated write gets the stored outcome, a stale one the present state, or None when the job is unknown.
    """

    id: str
    acceptance: Acceptance
    state: JobState | None

    @property
    def accepted(self) -> bool:
        """Whether the writer may go on believing it."""
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
    """The state the job went to by it."""
    reason: Reason | None = None
    error: str | None = None
    refused: int = 0
    """Writes that came under this fence after it had lost the job."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a reader sees it: one consistent snapshot."""

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
    """The index it was sent to."""
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

    def as_new(self, id: str) -> NewJob:
        """The request that would run this job again, under a new `id`; its `retry_of` names this one."""
        if self.kind not in (JobKind.JOB, JobKind.BROADCAST):
            raise InvalidInput("id", f"a {self.kind.value} cannot be run again; ask for a new one")
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
    """Refuse more ids than one call takes."""
    if len(ids) > MOST_JOBS_PER_CALL:
        raise InvalidInput("ids", f"{len(ids)} are more than {MOST_JOBS_PER_CALL} in one call; send them in parts")


def _check_json(field: str, value: bytes) -> None:
    try:
        msgspec.json.decode(value, type=msgspec.Raw)
        # Skipping over a text does not look at its bytes, and JSON is UTF-8.
        if not value.isascii():
            value.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidInput(field, f"is not JSON ({exc})") from None
