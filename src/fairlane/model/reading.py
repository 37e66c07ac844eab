"""What readers ask for and see: pages of jobs, where a job stands in line and why, queues and lanes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from ..errors import InvalidInput
from . import names
from .job import Job, JobState
from .lanes import LaneTerms
from .settings import QueueOverride, QueueSettings
from .slots import FLOOR

MOST_PER_PAGE = 500
EXACT_PLACES = 1_000
"""Places up to here are exact on every store; beyond, where counting is cheap, else a lower bound that says so."""
COUNTED_WHOLE = 5_000
"""A queue with up to so many waiting jobs has the jobs of its lanes counted to the end on every store."""
LANES_LOOKED_AT = 500
"""Lanes of a queue that are looked at for its oldest job, so that the look costs the same however many there are."""
MOST_DECLINED = 10_000
"""Jobs that were declined are counted up to here, the longest waiting first."""
ROUNDS = 20
"""Each brings an estimate closer. Most need one: no limit of another lane matters."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list; fields that are None do not matter. A lane belongs to a queue, so it needs one."""

    state: JobState | None = None
    queue: str | None = None
    lane: str | None = None
    task: str | None = None
    sticky: str | None = None
    worker: str | None = None
    error_group: str | None = None

    def __post_init__(self) -> None:
        for field in ("queue", "task"):
            value = getattr(self, field)
            if value is not None:
                names.check_name(field, value)
        for field in ("lane", "sticky", "worker", "error_group"):
            value = getattr(self, field)
            if value is not None:
                names.check_key(field, value)
        if self.lane is not None and self.queue is None:
            raise InvalidInput("lane", "a lane belongs to a queue: give queue= too")


class Page(msgspec.Struct, frozen=True):
    """Jobs, newest first; `cursor` continues after the last one, None at the end."""

    jobs: tuple[Job, ...]
    cursor: str | None


class Gate(StrEnum):
    """What a waiting job waits for, the one named that would hold it longest."""

    DUE = "due"
    ARRIVING = "arriving"
    QUEUE_PAUSED = "queue_paused"
    LANE_PAUSED = "lane_paused"
    LANE = "lane"
    """Jobs before it hold the lane's places."""
    LANE_RETRY = "lane_retry"
    """The head of its ordered lane waits for a retry; `until` says when."""
    LANE_TASK = "lane_task"
    """The head of its ordered lane waits for a worker that knows its task; `task` is that of the head."""
    UNBOUND = "unbound"
    """Its pool has no live worker to bind it to."""
    WORKER_GONE = "worker_gone"
    """The worker it is meant for is not there."""
    CLEANUP = "cleanup"
    """The clean-up of its binding runs; or it is the clean-up, and jobs of the key are left."""
    QUEUE_LIMIT = "queue_limit"
    NO_WORKER = "no_worker"
    """No live worker serves its queue."""
    UNKNOWN_TASK = "unknown_task"
    """Workers declined it, and no live worker that could run it knows its task."""
    DECLINED = "declined"
    """A worker that does not know its task declined it, another one knows it; offered again at `until`."""
    SLOTS = "slots"
    """It is next, and every slot is taken."""
    AHEAD = "ahead"
    NONE = "none"
    """Nothing holds it: it starts as soon as a worker looks."""


UNTIMED = frozenset(
    {
        *(Gate.QUEUE_PAUSED, Gate.LANE_PAUSED, Gate.UNBOUND, Gate.WORKER_GONE, Gate.NO_WORKER),
        *(Gate.UNKNOWN_TASK, Gate.DECLINED, Gate.LANE_TASK),
    }
)
"""Gates of which nobody can tell when they open."""


class JobPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a waiting job stands."""

    id: str
    now: float
    """The store's clock at this look."""
    state: JobState
    gate: Gate
    until: float | None
    """When the gate opens, if that is known."""
    worker: str | None
    lane: str | None
    queue: str
    place: int | None
    """1 for the next of its lane; None before it has arrived."""
    of: int
    """Waiting jobs of its lane; never less than `place`."""
    exact: bool
    """Whether `place` was counted to the end; otherwise it is a lower bound."""
    of_exact: bool = True
    """The same for `of`."""
    likely: int | None = None
    """Where `place` is not exact: about where the job is, as far as that can be told."""
    queue_ahead: int
    """An estimate of the jobs of its queue that start before it."""
    servers: int
    """Slots of live workers that its class may use, within the queue's limit; for a turn, the places of its lane."""
    lane_limit: int | None
    service_seconds: float | None
    """Median run time of recent jobs of the queue; None while none has finished."""
    task: str | None = None

    @property
    def ahead(self) -> int | None:
        """Jobs of its lane that go before it."""
        return None if self.place is None else self.place - 1

    def eta(self) -> float | None:
        """Seconds until it starts, as far as can be told; None says that it cannot."""
        if self.gate is Gate.DUE and self.until is not None:
            return max(0.0, self.until - self.now)
        place = self.place if self.exact else self.likely
        if place is None or self.service_seconds is None or not self.servers:
            return None
        if self.gate in UNTIMED:
            return None
        if self.gate is Gate.NONE:
            return 0.0
        # The servers end their jobs one after another, not all at once; the next end is half a turn away on average.
        turns = (self.queue_ahead + 0.5) / self.servers
        if self.lane_limit:
            turns = max(turns, (place - 0.5) / self.lane_limit)
        wait = 0.0 if self.until is None else max(0.0, self.until - self.now)
        if self.gate is Gate.LANE_RETRY and self.lane_limit == 1:
            # The lane stands still until then, and the job that is retried comes first.
            wait += (place - 1) * self.service_seconds
        return max(turns * self.service_seconds, wait)

    def why(self) -> str:
        """The gate in words."""
        lane = f"lane {self.lane}" if self.lane else f"queue {self.queue} without a lane"
        wait = "" if self.until is None else f"{max(0.0, self.until - self.now):.0f} s"
        words = {
            Gate.DUE: f"due in {wait}",
            Gate.ARRIVING: "arriving",
            Gate.QUEUE_PAUSED: f"queue {self.queue} is paused",
            Gate.LANE_PAUSED: f"{lane} is paused",
            Gate.LANE: f"{self._ahead_words()} ahead in {lane}" if self.ahead else f"{lane} runs all it may",
            Gate.LANE_RETRY: f"{lane} waits for a retry, due in {wait}",
            Gate.LANE_TASK: f"{lane} waits for a worker that knows task {self.task}",
            Gate.UNBOUND: "no live worker to bind it to",
            Gate.WORKER_GONE: f"worker {self.worker} is not there",
            Gate.CLEANUP: "waits for the clean-up of its binding",
            Gate.QUEUE_LIMIT: f"queue {self.queue} runs all it may",
            Gate.NO_WORKER: f"no live worker serves queue {self.queue}",
            Gate.UNKNOWN_TASK: (
                f"its worker {self.worker} does not know task {self.task}"
                if self.worker
                else f"no live worker knows task {self.task}"
            ),
            Gate.DECLINED: f"waiting for a worker that knows task {self.task}",
            Gate.SLOTS: "next; every slot is taken",
            Gate.AHEAD: f"{self._ahead_words()} ahead in {lane}" if self.ahead else "its turn among the lanes comes",
            Gate.NONE: "ready to start",
        }
        return words[self.gate]

    def _ahead_words(self) -> str:
        return "" if self.ahead is None else told_count(self.ahead, exact=self.exact)


def told_count(count: int, *, exact: bool) -> str:
    """A number of jobs in words: of one that was not counted to the end, what it is more than."""
    if exact:
        return str(count)
    return f"more than {count - 1:,}" if count > EXACT_PLACES else f"about {count}"


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """Another lane with jobs of the same class, as an estimate of a job's start sees it."""

    waiting: float
    """Its jobs that wait; infinite where they were not counted to the end."""
    turns: float
    """How many jobs fair order lets it start first, if it has so many."""
    limit: int | None = None
    lanes: float = 1.0
    """How many lanes it stands for, when only some of many were looked at."""


def starts_before(own: int, rivals: Sequence[Rival], servers: int, *, higher: int = 0) -> int:
    """An estimate of the jobs of a queue that start before one with `own` before it in its lane and class.

    Rivals send what fair order lets before it, as far as they have it; one with a limit no more than that many for
    each service time that passes, so how much depends on how long it takes. `higher`: jobs of higher classes, which
    all go first, but for the one start in ten that every class keeps.
    """
    most = sum(rival.lanes * min(rival.waiting, rival.turns) for rival in rivals)
    sent = most
    for _ in range(ROUNDS):
        start = _behind(higher, own + sent)
        took = (start + 1) / max(1, servers)
        before, sent = sent, sum(rival.lanes * _sends(rival, took) for rival in rivals)
        if before - sent < 0.5:
            break
    return round(_behind(higher, own + sent))


def _sends(rival: Rival, took: float) -> float:
    sent = min(rival.waiting, rival.turns)
    return sent if rival.limit is None else min(sent, rival.limit * took)


def _behind(higher: int, among: float) -> float:
    return min(higher + among, FLOOR * (among + 1) - 1)


def room_after(service_seconds: float | None, servers: float, *, limit: int | None = None) -> float | None:
    """Seconds until one more job has probably started, so that a full queue or lane takes the next one.

    `servers` as in `JobPosition`, or a lane's share of them; `limit` is the lane's. None when nothing has finished yet,
    or no worker serves it.
    """
    rate = servers if limit is None else min(servers, limit)
    return None if service_seconds is None or rate <= 0 else service_seconds / rate


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by state; the final ones count all that ever ended, not only those still kept."""

    scheduled: int = 0
    pending: int = 0
    running: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class QueueReading(msgspec.Struct, frozen=True, kw_only=True):
    """A queue with its settings and counts by class (high, normal, low)."""

    name: str
    settings: QueueSettings
    """What counts: the declaration with the override laid over it."""
    declared: QueueSettings
    """The declaration alone."""
    version: int
    override: QueueOverride | None
    classes: tuple[Counts, Counts, Counts]
    workers: int
    """Live workers that serve it."""
    oldest_wait: float | None
    """Seconds for which its oldest waiting job has waited: since it was sent or due, or since it ran last. None when
    none waits. Of each class, the `LANES_LOOKED_AT` lanes that come next are looked at: exact up to that many lanes."""
    problem: str | None = None
    """What of its stored settings cannot be read. They are taken for the defaults until they are declared again."""

    @property
    def counts(self) -> Counts:
        """All classes together."""
        return Counts(**{f: sum(getattr(c, f) for c in self.classes) for f in Counts.__struct_fields__})


class LaneReading(msgspec.Struct, frozen=True, kw_only=True):
    """A lane that has work."""

    queue: str
    lane: str | None
    terms: LaneTerms
    pending: int
    running: int
    exact: bool = True
    """False where `pending` was not counted to the end: it is an estimate, or a lower bound where none can be made."""
    oldest_wait: float | None = None
    """Seconds for which its oldest waiting job has waited, as in `QueueReading`; None when none waits."""
    share: float | None = None
    """The part of the queue's starts that is due to it: its weight among the lanes in which something waits. 0 for one
    that is paused or in which nothing waits; None on a page that does not have all lanes. A limit may keep it below."""


class DeclinedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task of which jobs wait because the workers that claimed them did not know it."""

    queue: str
    task: str
    waiting: int
    """Jobs that wait for that reason, as far as those of all tasks together are counted."""
    since: float
    """When the first of them was declined for the first time."""
    known: bool
    """Whether a live worker that serves the queue knows it now."""


def check_page(limit: int) -> int:
    """The length of a page."""
    return names.check_count("limit", limit, least=1, most=MOST_PER_PAGE)
