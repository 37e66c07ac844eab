"""Where a waiting job stands in line, what holds it and how long it may take: out of figures that a store has counted.

Pure. A store counts only so far, because readers ask often: places as far as that is cheap, and of the other lanes the
first in fair order, each only so far as matters. What it did not look at is taken to be like the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..model.fairness import charge, tag
from ..model.job import JobKind, JobState, Priority
from ..model.lanes import terms
from ..model.reading import Gate, JobPosition, Rival, starts_before
from ..model.settings import QueueSettings
from ..model.slots import Reserved, Slots
from .codes import ARRIVING, CLEANUP, SCHEDULED, UNBOUND

MOST_LANES = 50
"""Other lanes that are looked at, at most."""
MOST_COUNTED = 2_000
"""Jobs of other lanes that are counted in all, at most."""
MANY_LANES = 1_000
"""Lanes are counted up to here."""
UNCOUNTED = float("inf")
IDLE = (0, 0, 0)

Worker = tuple[int, int, int, int, int, int]
"""A worker's slots, those reserved for high and for normal, and what it runs by class."""


class QueueFigures(msgspec.Struct, kw_only=True):
    """A queue as an estimate sees it."""

    name: str
    settings: QueueSettings
    pending: tuple[int, int, int]
    """Jobs that wait, by class."""
    busy: tuple[int, int, int]
    """Jobs that run and take a slot, by class."""
    workers: list[Worker]
    """Live workers that serve it."""
    seconds: float | None
    """The median run time of its last jobs; None while none has finished."""


class LineFigures(msgspec.Struct, kw_only=True):
    """The fair order of a job's class and inbox, from its own place in it."""

    clock: int
    finish: int
    """The finish time of its own lane, 0 when it has no record."""
    tag: int | None
    """The tag of the next job of its lane, None when that is not claimable."""
    active: int
    """Lanes with a claimable job, its own included."""
    limited: int
    """Lanes with a limit that have jobs; 0 in the inbox of a worker."""
    counted: int
    """Up to here the jobs of another lane were counted."""
    ready: list[tuple[str, int, float, int | None, int]]
    """Other lanes with claimable jobs, in fair order: key, tag, the cost of the next job, places, how many wait."""
    blocked: list[tuple[str, int | None, int, int]]
    """Limited lanes whose places are all taken: key, finish time, places, how many wait."""


class JobFigures(msgspec.Struct, kw_only=True):
    """A job that waits, as counted."""

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
    """Whether it has arrived in a lane with a limit."""
    ordered: bool
    """Whether that lane goes by arrival alone."""
    granted: bool
    due: float | None
    place: int | None
    of: int
    own: int
    """Jobs of its lane and class before it; in an ordered lane, of any class."""
    flows_before: int
    """Lanes whose next job starts before its own, counted up to the slots there are."""
    retry_until: float | None
    """Until when a job keeps its place in the lane for a retry."""
    workers: list[Worker] | None
    """The worker that its inbox names, if it names one: it alone could run it."""
    line: LineFigures | None
    exact: bool = True
    """Whether the jobs before it were counted to the end; otherwise `place` is a lower bound."""
    of_exact: bool = True
    likely: int | None = None
    """Where they were not: about how many of its lane are before it. `own` is as likely."""
    task: str = ""
    declined: bool = False
    """Whether the last session that claimed it did not know its task."""
    known: bool = True
    """Whether a live worker that could run it knows its task; looked up only for what was declined."""
    awaited_task: str | None = None
    """The task of a job that holds a place of its lane and waits for a worker that knows it."""
    settling: bool = False
    """Whether the jobs of its lane are just being given other places, so that they cannot be counted exactly."""


def counted(own: int, active: int, limited: int) -> int:
    """Up to how many jobs of another lane are worth counting, for one with `own` before it."""
    # Whoever has twice as many may have any number of them.
    return min(2 * own + 10, MOST_COUNTED // min(MOST_LANES, max(1, active + limited)))


def servers(workers: Iterable[Worker], settings: QueueSettings, class_: int) -> int:
    """How many jobs of a class those workers run at once when they do nothing else, within the queue's limit."""
    slots = sum(_slots(worker).room(IDLE, Priority(class_)) for worker in workers)
    return slots if settings.slots is None else min(slots, settings.slots.room(IDLE, Priority(class_)))


def room_of(worker: Worker, class_: int) -> int:
    """Free slots of a worker for a class."""
    return _slots(worker).room(worker[3:], Priority(class_))


def _slots(worker: Worker) -> Slots:
    return Slots(total=worker[0], reserved=Reserved(high=worker[1], normal=worker[2]))


def standing_of(job: JobFigures, queue: QueueFigures, now: float) -> JobPosition:
    """Where a job stands at a moment."""
    return _Stander(job, queue).positions(now)


class _Stander:
    """The look at one job."""

    def __init__(self, job: JobFigures, queue: QueueFigures) -> None:
        self.job = job
        self.queue = queue
        self.terms = terms(queue.settings, job.lane)
        self.workers: Sequence[Worker] = queue.workers if job.workers is None else job.workers

    def positions(self, now: float) -> JobPosition:
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
        """About which place it has; None when that cannot be told."""
        job = self.job
        if job.place is None or job.exact:
            return job.place
        return None if job.likely is None else max(job.place, job.likely + 1)

    def _servers(self) -> tuple[int, int]:
        """Free slots and all slots that could run it. A turn needs none: the places of its lane serve it."""
        if self.job.kind == JobKind.TURN:
            places = self.terms.limit or 0
            return places, places
        free = sum(room_of(worker, self.job.priority) for worker in self.workers)
        return free, servers(self.workers, self.queue.settings, self.job.priority)

    def _queue_ahead(self, all_slots: int) -> int:
        """An estimate of what starts before it, out of the lanes it shares the queue with."""
        job = self.job
        if job.place is None:
            return 0
        if job.kind == JobKind.TURN:
            return job.place - 1
        rivals = [] if job.line is None else _Line(job, job.line, self.queue.settings).rivals()
        higher = self._higher()
        waiting = higher + self.queue.pending[job.priority]
        ahead = starts_before(job.own, rivals, all_slots, higher=higher)
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
        # The heads of other lanes, or higher classes, may take all the slots that are free.
        return (Gate.AHEAD if self._higher() + job.flows_before >= free else Gate.NONE), None

    def _no_worker(self) -> Gate:
        return Gate.NO_WORKER if self.job.workers is None else Gate.WORKER_GONE

    def _declined_gate(self) -> tuple[Gate, float | None]:
        """It is left alone for a moment; what it really waits for is a worker."""
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


class _Line:
    """The other lanes as an estimate sees them: how many of their jobs start before a given one."""

    def __init__(self, job: JobFigures, line: LineFigures, settings: QueueSettings) -> None:
        self.line = line
        self.cost = job.cost
        self.settings = settings
        head = tag(line.clock, line.finish) if line.tag is None else line.tag
        # The tag it will have when its turn comes, if nothing but fair order holds it.
        self.start = head + job.own * self._charge(job.lane, job.cost)

    def rivals(self) -> list[Rival]:
        return self._ready() + self._blocked()

    def _ready(self) -> list[Rival]:
        rows = self.line.ready
        lanes = 1.0
        # They come in fair order: behind one that starts later than this job there is none that starts sooner.
        if len(rows) == MOST_LANES and rows[-1][1] <= self.start:
            lanes = max(1.0, self.line.active / MOST_LANES)
        return [
            self._rival(lane, next_tag, cost, places, waiting, lanes) for lane, next_tag, cost, places, waiting in rows
        ]

    def _blocked(self) -> list[Rival]:
        rows = self.line.blocked
        lanes = 1.0
        if len(rows) == MOST_LANES:
            # Those with claimable jobs are counted above.
            lanes = max(1.0, (self.line.limited - self.line.active) / MOST_LANES)
        return [
            self._rival(lane, tag(self.line.clock, finish or 0), self.cost, places, waiting, lanes)
            for lane, finish, places, waiting in rows
            if waiting
        ]

    def _rival(self, lane: str, next_tag: int, cost: float, places: int | None, waiting: int, lanes: float) -> Rival:
        # Of two with the same tag either may come first.
        turns = max(0.0, (self.start - next_tag) / self._charge(lane, cost) + 0.5)
        most = self.line.counted
        return Rival(waiting=waiting if waiting < most else UNCOUNTED, turns=turns, limit=places, lanes=lanes)

    def _charge(self, lane: str | None, cost: float) -> int:
        return charge(cost, terms(self.settings, lane or None).weight)
