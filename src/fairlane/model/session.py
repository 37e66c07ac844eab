"""Sessions: live processes known to the store, and what passes between them and it.

A session lives by renewing its lease. Expired is not dead: a late renewal or finish is taken until the
session was *declared* dead, and that is final.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256

import msgspec

from ..errors import InvalidInput
from . import names
from .job import MOST_BYTES_PER_CALL, Claimed, Held, Verdict
from .slots import Ask, Slots

DEFAULT_LEASE = 15.0
MOST_TASKS = 10_000
"""Tasks that one session can declare."""


class SessionKind(StrEnum):
    """What the process behind a session does."""

    WORKER = "worker"
    MANAGER = "manager"
    WAITER = "waiter"


class SessionState(StrEnum):
    """Where a session is in its life; ended and dead are final."""

    LIVE = "live"
    STOPPING = "stopping"
    """It finishes what it has: no claims, no new bindings."""
    ENDED = "ended"
    DEAD = "dead"


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """A process that introduces itself. Checked when it is made."""

    id: str
    kind: SessionKind
    lease: float = DEFAULT_LEASE
    host: str = "localhost"
    pid: int = 0
    pool: str = "default"
    index: int | None = None
    """A *named* index, which keeps its bindings over a restart; None asks for the lowest free one."""
    queues: tuple[str, ...] = ()
    slots: Slots | None = None
    tasks: tuple[str, ...] | None = None
    """The tasks a worker knows; None when it does not say, and then it may know any. Given once, here: a store keeps
    each distinct set once, under its `task_set`."""

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
            raise InvalidInput("slots", "a worker has slots, and nobody else has")
        if self.tasks is not None:
            names.check_count("tasks", len(self.tasks), least=0, most=MOST_TASKS)
            for task in self.tasks:
                names.check_name("tasks", task)

    @property
    def task_set(self) -> str | None:
        """The name of its set of tasks: equal for equal sets. None when it does not say what it knows."""
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
    """Jobs it runs, by class."""
    tasks: tuple[str, ...] | None = None
    """The tasks that it knows; None when it does not say."""

    @property
    def worker(self) -> str | None:
        """``pool/index``, the name of a worker's place; its private inbox goes by it."""
        return None if self.index is None else worker_name(self.pool, self.index)


def worker_name(pool: str, index: int) -> str:
    """The name of a worker's place in its pool, and of its inbox."""
    return f"{pool}/{index}"


UNKNOWN = "~"
"""How the names of inboxes begin that jobs wait in because a worker did not know their task. No pool is called so."""


def unknown_inbox(task: str) -> str:
    """Where jobs wait that workers declined: an inbox that all sessions which know the task share. It ends as those do
    that are no worker's."""
    return f"{UNKNOWN}{task}/"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A call for work. Numbers grow; repeating the last one returns the same jobs."""

    number: int
    asks: tuple[Ask, ...]
    total: int
    told: bool = False
    """The worker has nothing to do and was told of a job, most likely of one alone. How a store looks for it may depend
    on that, never what it finds."""
    most_bytes: int = MOST_BYTES_PER_CALL
    """What the answer may carry of payloads and headers: the first job beyond it ends the claim, unless it is
    the only one. A store may count a little more than those."""

    def __post_init__(self) -> None:
        names.check_count("most_bytes", self.most_bytes, least=1, most=2**53)
        names.check_count("number", self.number, least=1, most=2**53)
        names.check_count("total", self.total, least=0, most=100_000)


class Finished(msgspec.Struct, frozen=True):
    """The answers to a batch of transitions, and the jobs claimed in the same step."""

    verdicts: tuple[Verdict, ...]
    claimed: tuple[Claimed, ...] = ()


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """What a session learns when it renews."""

    lost: tuple[Held, ...]
    """Claims it named that are not its own any more: stop those bodies."""
    cancel: tuple[str, ...]
    """Jobs it runs that somebody asked to cancel."""
    taken_back: tuple[str, ...]
    """Jobs recorded for it that it did not name: their reply was lost; they are pending again, uncharged."""
    now: float
    """The store's clock, for a look at the offset."""


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """A period of leadership. Numbers only ever grow, so an old leader can always be told from a new one."""

    number: int
    session: str
    lease: float
    remaining: float
