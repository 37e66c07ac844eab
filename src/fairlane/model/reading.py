"""What readers query and receive: pages of jobs, a job's position in line and why it waits, queues and lanes."""

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
"""Places up to here are exact on every store; higher ones are exact where counting is cheap, else a lower bound."""
COUNTED_WHOLE = 5_000
"""In a queue with up to this many waiting jobs, every store counts the jobs of each lane exactly."""
LANES_LOOKED_AT = 500
"""Lanes of a queue that are examined for its oldest job: the cost does not grow with the number of lanes."""
MOST_DECLINED = 10_000
"""Declined jobs are counted up to here, the longest waiting first."""
ROUNDS = 20
"""The most iterations of an estimate. One is enough unless the limit of another lane matters."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list; a field that is None matches every job. `lane` requires `queue`."""

    state: JobState | None = None
    queue: str | None = None
    lane: str | None = None
    task: str | None = None
    sticky: str | None = None
    worker: str | None = None
    error_group: str | None = None

    def __post_init__(self) -> None:
        state: object = self.state
        if not (state is None or isinstance(state, JobState)):
            raise InvalidInput("state", f"must be a JobState, such as JobState.FAILED, not a {type(state).__name__}")
        for field in ("queue", "task"):
            value = getattr(self, field)
            if value is not None:
                names.check_name(field, value)
        for field in ("lane", "sticky", "worker", "error_group"):
            value = getattr(self, field)
            if value is not None:
                names.check_key(field, value)
        if self.lane is not None and self.queue is None:
            raise InvalidInput("lane", "requires queue=: a lane belongs to a queue")


class Page(msgspec.Struct, frozen=True):
    """Jobs, newest first; `cursor` continues after the last one, None at the end."""

    jobs: tuple[Job, ...]
    cursor: str | None


class Gate(StrEnum):
    """What a waiting job waits for. Of several reasons, the one that would hold it longest."""

    DUE = "due"
    ARRIVING = "arriving"
    QUEUE_PAUSED = "queue_paused"
    LANE_PAUSED = "lane_paused"
    LANE = "lane"
    """Jobs ahead of it hold the lane's places."""
    LANE_RETRY = "lane_retry"
    """The head of its ordered lane waits for a retry; `until` says when."""
    LANE_TASK = "lane_task"
    """The head of its ordered lane waits for a worker that knows its task; `task` is the task of the head."""
    UNBOUND = "unbound"
    """Its pool has no live worker to bind it to."""
    WORKER_GONE = "worker_gone"
    """The worker it is bound or addressed to is not running."""
    CLEANUP = "cleanup"
    """The clean-up of its binding is running; or it is the clean-up, and jobs of the key are left."""
    QUEUE_LIMIT = "queue_limit"
    NO_WORKER = "no_worker"
    """No live worker serves its queue."""
    UNKNOWN_TASK = "unknown_task"
    """Workers declined it, and no live worker that could run it knows its task."""
    DECLINED = "declined"
    """A worker that does not know its task declined it, and another one knows it; it is offered again at `until`."""
    SLOTS = "slots"
    """It is next, and all slots are busy."""
    AHEAD = "ahead"
    NONE = "none"
    """Nothing holds it: it starts as soon as a worker polls."""


UNTIMED = frozenset(
    {
        *(Gate.QUEUE_PAUSED, Gate.LANE_PAUSED, Gate.UNBOUND, Gate.WORKER_GONE, Gate.NO_WORKER),
        *(Gate.UNKNOWN_TASK, Gate.DECLINED, Gate.LANE_TASK),
    }
)
"""Gates whose opening time cannot be estimated."""


class JobPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a waiting job."""

    id: str
    now: float
    """The store's clock when the position was read."""
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
    """Whether `place` is exact; otherwise it is a lower bound."""
    of_exact: bool = True
    """The same for `of`."""
    likely: int | None = None
    """An estimate of the place where `place` is not exact; None when there is none."""
    queue_ahead: int
    """An estimate of the jobs of its queue that start before it."""
    servers: int
    """Slots of live workers that its class may use, within the queue's limit. For a turn, the places of its lane."""
    lane_limit: int | None
    service_seconds: float | None
    """Median run time of recent jobs of the queue; None while none has finished."""
    task: str | None = None

    @property
    def ahead(self) -> int | None:
        """Jobs of its lane that start before it."""
        return None if self.place is None else self.place - 1

    def eta(self) -> float | None:
        """An estimate of the seconds until it starts; None when it cannot be estimated."""
        if self.gate is Gate.DUE and self.until is not None:
            return max(0.0, self.until - self.now)
        place = self.place if self.exact else self.likely
        if place is None or self.service_seconds is None or not self.servers:
            return None
        if self.gate in UNTIMED:
            return None
        if self.gate is Gate.NONE:
            return 0.0
        # The slots finish their jobs at different times: the next one is half a service time away on average.
        services = (self.queue_ahead + 0.5) / self.servers
        if self.lane_limit:
            services = max(services, (place - 0.5) / self.lane_limit)
        wait = 0.0 if self.until is None else max(0.0, self.until - self.now)
        if self.gate is Gate.LANE_RETRY and self.lane_limit == 1:
            # Nothing of the lane starts until then, and the retried job starts first.
            wait += (place - 1) * self.service_seconds
        return max(services * self.service_seconds, wait)

    def why(self) -> str:
        """Describe in one sentence what the job waits for."""
        lane = f"lane {self.lane}" if self.lane else f"queue {self.queue} (no lane)"
        wait = "" if self.until is None else f"{max(0.0, self.until - self.now):.0f} s"
        limit = f" of {self.lane_limit}" if self.lane_limit else ""
        texts = {
            Gate.DUE: f"due in {wait}",
            Gate.ARRIVING: "waiting to be admitted to its queue",
            Gate.QUEUE_PAUSED: f"queue {self.queue} is paused",
            Gate.LANE_PAUSED: f"{lane} is paused",
            Gate.LANE: f"{self._ahead_text()} ahead in {lane}" if self.ahead else f"{lane} is at its limit{limit}",
            Gate.LANE_RETRY: f"{lane} waits for a retry that is due in {wait}",
            Gate.LANE_TASK: f"{lane} waits for a worker that knows task {self.task}",
            Gate.UNBOUND: "no live worker in its pool to bind it to",
            Gate.WORKER_GONE: f"worker {self.worker} is not running",
            Gate.CLEANUP: "waiting for the clean-up of its binding",
            Gate.QUEUE_LIMIT: f"queue {self.queue} is at its limit",
            Gate.NO_WORKER: f"no live worker serves queue {self.queue}",
            Gate.UNKNOWN_TASK: (
                f"its worker {self.worker} does not know task {self.task}"
                if self.worker
                else f"no live worker knows task {self.task}"
            ),
            Gate.DECLINED: f"waiting for a worker that knows task {self.task}",
            Gate.SLOTS: "next in line; all slots are busy",
            Gate.AHEAD: f"{self._ahead_text()} ahead in {lane}" if self.ahead else "waiting for its lane's turn",
            Gate.NONE: "ready to start",
        }
        return texts[self.gate]

    def _ahead_text(self) -> str:
        return "" if self.ahead is None else count_text(self.ahead, exact=self.exact)


def count_text(count: int, *, exact: bool) -> str:
    """A number of jobs as text; "more than" or "about" a number for one that is not exact."""
    if exact:
        return str(count)
    return f"more than {count - 1:,}" if count > EXACT_PLACES else f"about {count}"


class CompetingLane(msgspec.Struct, frozen=True, kw_only=True):
    """Another lane with jobs of the same class, as input of an estimate."""

    waiting: float
    """Its waiting jobs; infinite where they were not counted exactly."""
    turns: float
    """How many of its jobs fair order starts first, if it has that many."""
    limit: int | None = None
    lanes: float = 1.0
    """How many lanes it represents, when only a sample of the lanes was read."""


def starts_before(own: int, competing: Sequence[CompetingLane], servers: int, *, higher: int = 0) -> int:
    """Estimate how many jobs of a queue start before a job that has `own` jobs ahead of it in its lane and class.

    Each competing lane starts as many jobs as fair order puts first, if it has them. A lane with a limit starts at most
    that many per service time, so its number depends on how long the wait takes; the estimate is iterated. `higher`:
    jobs of higher classes, which all start first, except for the one start in ten that every class keeps.
    """
    most = sum(lane.lanes * min(lane.waiting, lane.turns) for lane in competing)
    sent = most
    for _ in range(ROUNDS):
        start = _behind(higher, own + sent)
        took = (start + 1) / max(1, servers)
        before, sent = sent, sum(lane.lanes * _sends(lane, took) for lane in competing)
        if before - sent < 0.5:
            break
    return round(_behind(higher, own + sent))


def _sends(lane: CompetingLane, took: float) -> float:
    sent = min(lane.waiting, lane.turns)
    return sent if lane.limit is None else min(sent, lane.limit * took)


def _behind(higher: int, among: float) -> float:
    return min(higher + among, FLOOR * (among + 1) - 1)


def room_after(service_seconds: float | None, servers: float, *, limit: int | None = None) -> float | None:
    """Estimate the seconds until a full queue or lane starts a job and so has room for another one.

    `servers` as in `JobPosition`, or a lane's share of them; `limit` is the lane's. None when nothing has finished yet,
    or no worker serves it.
    """
    rate = servers if limit is None else min(servers, limit)
    return None if service_seconds is None or rate <= 0 else service_seconds / rate


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs by state. Final states count all jobs that ever ended, not only those still kept."""

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
    """The effective settings: the declaration with the override applied."""
    declared: QueueSettings
    """The declaration alone."""
    version: int
    override: QueueOverride | None
    classes: tuple[Counts, Counts, Counts]
    workers: int
    """Live workers that serve it."""
    oldest_wait: float | None
    """Seconds for which its oldest waiting job has waited: since it was sent or due, or since its last run. None when
    no job waits. Only the next `LANES_LOOKED_AT` lanes of each class are examined: exact up to that many lanes."""
    problem: str | None = None
    """Why its stored settings cannot be read. The defaults apply until they are declared again."""

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
    """False where `pending` is not exact: it is an estimate, or a lower bound where there is no estimate."""
    oldest_wait: float | None = None
    """Seconds for which its oldest waiting job has waited, as in `QueueReading`; None when no job waits."""
    share: float | None = None
    """Its fair share of the queue's starts: its weight relative to all lanes with waiting jobs. 0 for a lane that is
    paused or has no waiting jobs; None on a page that does not contain all lanes. A limit may keep it below its share.
    """


class DeclinedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task whose jobs wait because the workers that claimed them did not know it."""

    queue: str
    task: str
    waiting: int
    """Jobs that wait for this reason; at most `MOST_DECLINED` jobs of all tasks are counted."""
    since: float
    """When the first of them was first declined."""
    known: bool
    """Whether a live worker that serves the queue knows the task now."""


def check_page(limit: int) -> int:
    """Check the length of a page."""
    return names.check_count("limit", limit, least=1, most=MOST_PER_PAGE)
