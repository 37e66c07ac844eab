"""The position of a waiting job, what holds it and how long it may wait, computed from counts that a store made.

Pure. Positions are read often, so a store limits what it counts: the jobs ahead in the same lane as far as that is
cheap, and the first of the other lanes in fair order, each as far as it matters. The rest is assumed to be alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..model.fairness import charge, tag
from ..model.job import JobKind, JobState, Priority
from ..model.lanes import terms
from ..model.reading import CompetingLane, Gate, JobPosition, starts_before
from ..model.settings import QueueSettings
from ..model.slots import Reserved, Slots
from .codes import ARRIVING, CLEANUP, SCHEDULED, UNBOUND

MOST_LANES = 50
"""Most other lanes that are read."""
MOST_COUNTED = 2_000
"""Most jobs of other lanes that are counted in all."""
MANY_LANES = 1_000
"""Lanes are counted up to this number."""
UNCOUNTED = float("inf")
IDLE = (0, 0, 0)

Worker = tuple[int, int, int, int, int, int]
"""Slots of a worker, those reserved for high and for normal, and its running jobs by class."""


class QueueSnapshot(msgspec.Struct, kw_only=True):
    """The state of a queue that positions depend on."""

    name: str
    settings: QueueSettings
    pending: tuple[int, int, int]
    """Waiting jobs by class."""
    busy: tuple[int, int, int]
    """Running jobs that take a slot, by class."""
    workers: list[Worker]
    """Live workers that serve it."""
    seconds: float | None
    """The median run time of its last jobs; None if none has completed."""


class CompetingLanes(msgspec.Struct, kw_only=True):
    """The other lanes that share a job's class and inbox, and the state of its own lane in their fair order."""

    clock: int
    finish: int
    """The finish time of its own lane, 0 if it is not stored."""
    tag: int | None
    """The tag of the next job of its lane, None if that is not claimable."""
    active: int
    """Lanes with a claimable job, its own included."""
    limited: int
    """Lanes with a limit that have jobs; 0 in the inbox of a worker."""
    counted: int
    """The number up to which jobs of another lane were counted."""
    ready: list[tuple[str, int, float, int | None, int]]
    """Other lanes with claimable jobs, in fair order: key, tag, cost of the next job, places, waiting jobs."""
    blocked: list[tuple[str, int | None, int, int]]
    """Lanes at their limit: key, finish time, places, number of waiting jobs."""


class WaitingJob(msgspec.Struct, kw_only=True):
    """A waiting job with the counts that its position depends on."""

    id: str
    queue: int
    kind: str
    priority: int
    state: int
    gate: int
    inbox: str
    lane: str | None
    cost: float
    limited: bool
    """Whether it is in a lane with a limit."""
    ordered: bool
    """Whether that lane is ordered by arrival alone."""
    granted: bool
    due: float | None
    place: int | None
    of: int
    own: int
    """Jobs of its lane and class ahead of it; in an ordered lane, of any class."""
    flows_before: int
    """Lanes whose next job starts before that of its own lane, counted up to the number of slots."""
    retry_until: float | None
    """Until when another job of the lane keeps its place for a retry."""
    workers: list[Worker] | None
    """The worker that its inbox names, if any: only that one could run it."""
    competing: CompetingLanes | None
    exact: bool = True
    """Whether the jobs ahead of it were counted completely; otherwise `place` is a lower bound."""
    of_exact: bool = True
    likely: int | None = None
    """If they were not: an estimate of the jobs of its lane ahead of it. `own` is an estimate too."""
    task: str = ""
    declined: bool = False
    """Whether the last session that claimed it did not know its task."""
    known: bool = True
    """Whether a live worker that could run it knows its task; looked up only for declined jobs."""
    awaited_task: str | None = None
    """The task of a job that holds a place of its lane and waits for a worker that knows it."""
    settling: bool = False
    """Whether the jobs of its lane are being reordered, so that they cannot be counted exactly."""


def counted(own: int, active: int, limited: int) -> int:
    """Return up to how many jobs of another lane are worth counting, for a job with `own` jobs ahead of it."""
    # More than twice as many make no difference.
    return min(2 * own + 10, MOST_COUNTED // min(MOST_LANES, max(1, active + limited)))


def servers(workers: Iterable[Worker], settings: QueueSettings, class_: int) -> int:
    """Return how many jobs of a class these workers can run at once if idle, within the limit of the queue."""
    slots = sum(_slots(worker).room(IDLE, Priority(class_)) for worker in workers)
    return slots if settings.slots is None else min(slots, settings.slots.room(IDLE, Priority(class_)))


def room_of(worker: Worker, class_: int) -> int:
    """Return the free slots of a worker for a class."""
    return _slots(worker).room(worker[3:], Priority(class_))


def _slots(worker: Worker) -> Slots:
    return Slots(total=worker[0], reserved=Reserved(high=worker[1], normal=worker[2]))


def job_position(job: WaitingJob, queue: QueueSnapshot, now: float) -> JobPosition:
    """Return the position of a job."""
    return _PositionBuilder(job, queue).position(now)


class _PositionBuilder:
    """Computes the position of one job."""

    def __init__(self, job: WaitingJob, queue: QueueSnapshot) -> None:
        self.job = job
        self.queue = queue
        self.terms = terms(queue.settings, job.lane)
        self.workers: Sequence[Worker] = queue.workers if job.workers is None else job.workers

    def position(self, now: float) -> JobPosition:
        job = self.job
        free, all_slots = self._servers()
        gate, until = self._gate(free)
        return JobPosition(
            id=job.id,
            now=now,
            state=JobState.SCHEDULED if job.state == SCHEDULED else JobState.PENDING,
            gate=gate,
            until=until,
            worker=job.inbox if job.inbox and not job.inbox.endswith("/") else None,
            lane=job.lane,
            queue=self.queue.name,
            place=job.place,
            of=max(job.of, job.place or 0),
            exact=job.place is None or (job.exact and not job.settling),
            of_exact=job.of_exact and not job.settling,
            likely=self._likely(),
            queue_ahead=self._queue_ahead(all_slots),
            servers=all_slots,
            lane_limit=self.terms.limit,
            service_seconds=self.queue.seconds,
            task=(job.awaited_task if gate is Gate.LANE_TASK else job.task) or None,
        )

    def _likely(self) -> int | None:
        """Return its estimated place; None if there is no estimate."""
        job = self.job
        if job.place is None or job.exact:
            return job.place
        return None if job.likely is None else max(job.place, job.likely + 1)

    def _servers(self) -> tuple[int, int]:
        """Return the free slots and all slots that could run it. A turn takes no slot: the places of its lane count."""
        if self.job.kind == JobKind.TURN:
            places = self.terms.limit or 0
            return places, places
        free = sum(room_of(worker, self.job.priority) for worker in self.workers)
        return free, servers(self.workers, self.queue.settings, self.job.priority)

    def _queue_ahead(self, all_slots: int) -> int:
        """Estimate how many jobs of the queue start before it."""
        job = self.job
        if job.place is None:
            return 0
        if job.kind == JobKind.TURN:
            return job.place - 1
        competing = (
            [] if job.competing is None else _CompetitionEstimate(job, job.competing, self.queue.settings).competing()
        )
        higher = self._higher()
        waiting = higher + self.queue.pending[job.priority]
        ahead = starts_before(job.own, competing, all_slots, higher=higher)
        return max(job.own, min(waiting - 1, ahead))

    def _higher(self) -> int:
        return sum(self.queue.pending[: self.job.priority])

    def _gate(self, free: int) -> tuple[Gate, float | None]:
        job = self.job
        if job.state == SCHEDULED:
            return self._declined_gate() if job.declined else (Gate.DUE, job.due)
        if job.state == ARRIVING:
            return Gate.ARRIVING, None
        if self.queue.settings.paused:
            return Gate.QUEUE_PAUSED, None
        if job.limited and not job.granted:
            return self._lane_gate()
        if job.gate == UNBOUND:
            return Gate.UNBOUND, None
        if job.gate == CLEANUP:
            return Gate.CLEANUP, None
        if not self.workers:
            return self._no_worker(), None
        if job.declined:
            return (Gate.DECLINED if job.known else Gate.UNKNOWN_TASK), None
        if self._queue_is_full():
            return Gate.QUEUE_LIMIT, None
        if job.place is not None and job.place > 1:
            return Gate.AHEAD, None
        if free == 0:
            return Gate.SLOTS, None
        # The next jobs of other lanes, or of higher classes, may take all free slots.
        return (Gate.AHEAD if self._higher() + job.flows_before >= free else Gate.NONE), None

    def _no_worker(self) -> Gate:
        return Gate.NO_WORKER if self.job.workers is None else Gate.WORKER_GONE

    def _declined_gate(self) -> tuple[Gate, float | None]:
        """Return the gate of a declined job that is offered again later: it really waits for a worker."""
        if self.queue.settings.paused:
            return Gate.QUEUE_PAUSED, None
        if not self.workers:
            return self._no_worker(), None
        return (Gate.DECLINED if self.job.known else Gate.UNKNOWN_TASK), self.job.due

    def _lane_gate(self) -> tuple[Gate, float | None]:
        if self.terms.paused:
            return Gate.LANE_PAUSED, None
        if self.terms.ordered and self.job.awaited_task is not None:
            return Gate.LANE_TASK, None
        if self.terms.ordered and self.job.retry_until is not None:
            return Gate.LANE_RETRY, self.job.retry_until
        return Gate.LANE, None

    def _queue_is_full(self) -> bool:
        slots = self.queue.settings.slots
        return slots is not None and slots.room(self.queue.busy, Priority(self.job.priority)) == 0


class _CompetitionEstimate:
    """Estimates how many jobs of each other lane start before a given job."""

    def __init__(self, job: WaitingJob, lanes: CompetingLanes, settings: QueueSettings) -> None:
        self.lanes = lanes
        self.cost = job.cost
        self.settings = settings
        head = tag(lanes.clock, lanes.finish) if lanes.tag is None else lanes.tag
        # The tag it will start with, if only fair order holds it.
        self.start = head + job.own * self._charge(job.lane, job.cost)

    def competing(self) -> list[CompetingLane]:
        return self._ready() + self._blocked()

    def _ready(self) -> list[CompetingLane]:
        rows = self.lanes.ready
        lanes = 1.0
        # They are in fair order: after a lane that starts later than this job, no lane starts earlier.
        if len(rows) == MOST_LANES and rows[-1][1] <= self.start:
            lanes = max(1.0, self.lanes.active / MOST_LANES)
        return [
            self._competing_lane(lane, next_tag, cost, places, waiting, lanes)
            for lane, next_tag, cost, places, waiting in rows
        ]

    def _blocked(self) -> list[CompetingLane]:
        rows = self.lanes.blocked
        lanes = 1.0
        if len(rows) == MOST_LANES:
            # Lanes with claimable jobs are counted in `_ready`.
            lanes = max(1.0, (self.lanes.limited - self.lanes.active) / MOST_LANES)
        return [
            self._competing_lane(lane, tag(self.lanes.clock, finish or 0), self.cost, places, waiting, lanes)
            for lane, finish, places, waiting in rows
            if waiting
        ]

    def _competing_lane(
        self, lane: str, next_tag: int, cost: float, places: int | None, waiting: int, lanes: float
    ) -> CompetingLane:
        # Of two jobs with the same tag either may start first.
        turns = max(0.0, (self.start - next_tag) / self._charge(lane, cost) + 0.5)
        most = self.lanes.counted
        return CompetingLane(waiting=waiting if waiting < most else UNCOUNTED, turns=turns, limit=places, lanes=lanes)

    def _charge(self, lane: str | None, cost: float) -> int:
        return charge(cost, terms(self.settings, lane or None).weight)
