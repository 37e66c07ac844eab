"""Sessions: processes registered in the store, and the records they exchange with it.

A session stays alive by renewing its lease. Expired is not dead: a late renewal or finish is accepted until the
session is *declared* dead, which is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256

import msgspec

from ..errors import InvalidInput
from . import names
from .job import MOST_BYTES_PER_CALL, Claimed, Held, Verdict
from .slots import Ask, Slots

DEFAULT_LEASE = 15.0
LARGEST_JOB = names.PAYLOAD_BYTES + names.ERROR_BYTES + 1024
"""The most bytes that one job can add to a claim: payload, headers, and a little that a store keeps beside them."""
MOST_TASKS = 10_000
"""Tasks that one session can declare."""


class SessionKind(StrEnum):
    """What the process behind a session does."""

    WORKER = "worker"
    MANAGER = "manager"
    WAITER = "waiter"


class SessionState(StrEnum):
    """The states of a session; ended and dead are final."""

    LIVE = "live"
    STOPPING = "stopping"
    """It finishes its running jobs: no more claims, no new bindings."""
    ENDED = "ended"
    DEAD = "dead"


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """A request to register a process, validated when it is created."""

    id: str
    kind: SessionKind
    lease: float = DEFAULT_LEASE
    host: str = "localhost"
    pid: int = 0
    pool: str = "default"
    index: int | None = None
    """A *named* index, which keeps its bindings across a restart; None requests the lowest free one."""
    queues: tuple[str, ...] = ()
    slots: Slots | None = None
    tasks: tuple[str, ...] | None = None
    """The tasks a worker knows; None if it does not declare them, and then it may know any. Declared only here; a store
    keeps each distinct set once, under its `task_set`."""

    def __post_init__(self) -> None:
        names.check_key("id", self.id)
        names.check_seconds("lease", self.lease, least=0.05)
        names.check_key("host", self.host)
        names.check_count("pid", self.pid, least=0)
        names.check_name("pool", self.pool)
        if self.index is not None:
            names.check_count("index", self.index, least=0, most=1_000_000)
        for queue in self.queues:
            names.check_name("queues", queue)
        if type(self.kind) is not SessionKind:
            raise InvalidInput("kind", f"must be a SessionKind, not {type(self.kind).__name__}")
        if (self.kind is SessionKind.WORKER) != (self.slots is not None):
            raise InvalidInput("slots", "a worker session requires slots, and other sessions cannot have them")
        if self.tasks is not None:
            names.check_count("tasks", len(self.tasks), least=0, most=MOST_TASKS)
            for task in self.tasks:
                names.check_name("tasks", task)

    @property
    def task_set(self) -> str | None:
        """A hash of its set of tasks, equal for equal sets; None if it does not declare its tasks."""
        if self.tasks is None:
            return None
        return sha256("\n".join(sorted(set(self.tasks))).encode()).hexdigest()[:32]


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session as a reader sees it."""

    id: str
    kind: SessionKind
    state: SessionState
    host: str
    pid: int
    pool: str
    index: int | None
    named: bool
    queues: tuple[str, ...]
    slots: Slots | None
    started_at: float
    lease: float
    remaining: float
    """Seconds until the lease ends; negative once it has."""
    running: tuple[int, int, int]
    """Its running jobs, by class."""
    tasks: tuple[str, ...] | None = None
    """The tasks that it knows; None if it does not declare them."""

    @property
    def worker(self) -> str | None:
        """``pool/index``: the name of the worker and of its inbox; None for other sessions."""
        return None if self.index is None else worker_name(self.pool, self.index)


def worker_name(pool: str, index: int) -> str:
    """The name of a worker and of its inbox."""
    return f"{pool}/{index}"


UNKNOWN = "~"
"""The prefix of inboxes for jobs whose task a worker did not know. Pool names cannot contain it."""


def unknown_inbox(task: str) -> str:
    """The inbox of declined jobs of a task, shared by all sessions that know it. Ends in ``/`` without an index, as
    every inbox does that belongs to no single worker."""
    return f"{UNKNOWN}{task}/"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request for jobs. Numbers increase; repeating the last one returns the same jobs."""

    number: int
    asks: tuple[Ask, ...]
    total: int
    notified: bool = False
    """The worker is idle and was notified of a job, most likely of a single one. A store may search differently for it,
    but must return the same jobs."""
    most_bytes: int = MOST_BYTES_PER_CALL
    """The most bytes of payloads and headers to return: the first job beyond it ends the claim, unless it is the
    only one. A store may count a few bytes more per job."""

    def may_be_cut(self, jobs: Sequence[Claimed]) -> bool:
        """Whether the limit of bytes may have ended the claim that was answered with these jobs."""
        return sum(job.size for job in jobs) > self.most_bytes - LARGEST_JOB

    def __post_init__(self) -> None:
        names.check_count("most_bytes", self.most_bytes, least=1, most=2**53)
        names.check_count("number", self.number, least=1, most=2**53)
        names.check_count("total", self.total, least=0, most=100_000)


class Finished(msgspec.Struct, frozen=True):
    """The results of a batch of transitions, and the jobs claimed in the same call."""

    verdicts: tuple[Verdict, ...]
    claimed: tuple[Claimed, ...] = ()


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a renewal."""

    lost: tuple[Held, ...]
    """Claims it named but no longer owns: stop these jobs."""
    cancel: tuple[str, ...]
    """Jobs it runs for which a cancel was requested."""
    taken_back: tuple[str, ...]
    """Jobs recorded for it that it did not name, because the reply was lost; they are pending again, uncharged."""
    now: float
    """The store's clock, from which the session computes the offset of its own."""


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """A period of leadership. Numbers only increase, so that an old leader can be distinguished from a new one."""

    number: int
    session: str
    lease: float
    remaining: float
    """Seconds until it ends, by the store's clock, unless it is extended or resigned from."""
