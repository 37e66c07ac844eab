"""The state of the model: plain records that rules change, and queries that several rules share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fairlane.model.binding import Binding, BindingState
from fairlane.model.ended import EndedJob
from fairlane.model.job import Job, JobKind, JobState, NewJob, Priority, Reason
from fairlane.model.lanes import LaneTerms, terms
from fairlane.model.reading import JobPosition, QueueReading
from fairlane.model.session import NewSession, Session, SessionKind, SessionState, Term
from fairlane.model.settings import QueueOverride, QueueSettings
from fairlane.model.states import Transition
from fairlane.store.clock import ManualClock

from .fair_order import FairOrder

Domain = tuple[str, Priority, int | str | None]
"""Queue, class, and the index of the worker whose inbox it is, None for the shared one, the task for declined jobs."""


class Mismatch(AssertionError):
    """The store did something that the rules do not allow."""


@dataclass(frozen=True)
class Sight:
    """What readers of the store see after a step."""

    jobs: Mapping[str, Job]
    positions: Mapping[str, JobPosition | None]
    queues: Mapping[str, QueueReading]
    sessions: Mapping[str, Session]
    bindings: tuple[Binding, ...]
    leader: Term | None
    ended: Mapping[str, EndedJob]
    """What the feed of ended jobs has returned since the store was opened."""


@dataclass
class JobRecord:
    """One job. `arrival` is the model's own number: only its order is compared."""

    new: NewJob
    state: JobState
    enqueued_at: float
    due_at: float | None = None
    finished_at: float | None = None
    replaced: bytes | None = None
    """The payload that the last retry with one gave it."""
    reason: Reason | None = None
    attempt: int = 0
    fence: int = 0
    crashes: int = 0
    suspect: bool = False
    """None where it is unspecified."""
    returns: int = 0
    """Times in a row that it was handed back after it had begun."""
    started: bool = False
    """Its body has begun, so it does not expire any more."""
    holder: str | None = None
    claim: int = 0
    """The number of the claim that started it; 0 if it was never claimed."""
    arrival: int | None = None
    keeps_place: bool = False
    """It waits for a retry and closes its ordered lane meanwhile."""
    retrying: bool = False
    """It is scheduled after a run, so its sticky key is still in use."""
    crashed_last: bool = False
    index: int | None = None
    """The worker whose inbox it is in."""
    declined: bool = False
    """It waits for a session that knows its task."""
    cancel_requested: bool = False
    charge_unsaid: bool = False
    start_unsaid: bool = False
    paid: int = 0
    started_in: Domain | None = None
    parent: str | None = None
    swept: bool = False
    """For a broadcast: a pass of the promoter saw that its time to join is over."""
    written: dict[tuple[str, int], tuple[Transition, JobState]] = field(default_factory=dict)
    """What holders wrote, by session and fence, with the state it led to."""
    taken_back: set[tuple[str | None, int]] = field(default_factory=set)
    """Sessions and fences from which the store took the job back: when the session left or renewed without it."""

    @property
    def id(self) -> str:
        return self.new.id

    @property
    def payload(self) -> bytes:
        return self.new.payload if self.replaced is None else self.replaced

    @property
    def line(self) -> tuple[str, str | None]:
        return (self.new.queue, self.new.lane)

    @property
    def waiting(self) -> bool:
        return self.state in (JobState.SCHEDULED, JobState.PENDING)

    @property
    def in_line(self) -> bool:
        """Whether it counts in its lane: it has arrived and is not final, or keeps its place for a retry."""
        if self.new.kind is JobKind.BROADCAST:
            return False
        return self.state in (JobState.PENDING, JobState.RUNNING) or self.keeps_place

    @property
    def takes_slot(self) -> bool:
        """Whether it counts against slots and queue limits while it runs."""
        return self.state is JobState.RUNNING and self.new.kind in (JobKind.JOB, JobKind.CLEANUP)

    @property
    def domain(self) -> Domain:
        return (self.new.queue, self.new.priority, self.new.task if self.declined else self.index)


@dataclass
class SessionRecord:
    """One session; times by the monotonic clock."""

    new: NewSession
    index: int | None
    lease_ends: float
    state: SessionState = SessionState.LIVE
    claim: int = 0

    @property
    def present(self) -> bool:
        """Whether it is known as alive: expired is not dead."""
        return self.state in (SessionState.LIVE, SessionState.STOPPING)

    @property
    def is_worker(self) -> bool:
        return self.new.kind is SessionKind.WORKER


@dataclass
class BindingRecord:
    """One binding, active while it is open or draining."""

    pool: str
    key: str
    index: int
    state: BindingState = BindingState.OPEN
    cleanup: str | None = None

    @property
    def active(self) -> bool:
        return self.state in (BindingState.OPEN, BindingState.DRAINING)


@dataclass
class QueueRecord:
    """The settings of a queue."""

    declared: QueueSettings = field(default_factory=QueueSettings)
    version: int = 0
    override: QueueOverride | None = None

    @property
    def settings(self) -> QueueSettings:
        return self.declared if self.override is None else self.override.over(self.declared)


@dataclass
class Records:
    """All records."""

    clock: ManualClock
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    bindings: list[BindingRecord] = field(default_factory=list)
    queues: dict[str, QueueRecord] = field(default_factory=dict)
    orders: dict[Domain, FairOrder] = field(default_factory=dict)
    arrivals: int = 0
    last_arrival: dict[str, int] = field(default_factory=dict)
    """The arrival number that the store showed for a job before this step."""
    sight: Sight | None = None
    """What the store shows after the step that is about to be applied."""

    @property
    def now(self) -> float:
        return self.clock.now()

    @property
    def seen(self) -> Sight:
        assert self.sight is not None, "the store was not looked at"
        return self.sight

    def look(self, sight: Sight) -> None:
        """Note what the store shows now."""
        for id, shown in self.sight.jobs.items() if self.sight is not None else ():
            if shown.arrival is not None:
                self.last_arrival[id] = shown.arrival
        self.sight = sight

    def queue(self, name: str) -> QueueRecord:
        return self.queues.setdefault(name, QueueRecord())

    def settings(self, queue: str) -> QueueSettings:
        return self.queue(queue).settings

    def terms(self, job: JobRecord) -> LaneTerms:
        return terms(self.settings(job.new.queue), job.new.lane)

    def order(self, domain: Domain) -> FairOrder:
        return self.orders.setdefault(domain, FairOrder())

    def lane(self, line: tuple[str, str | None]) -> list[JobRecord]:
        """The jobs that count in a lane."""
        return [job for job in self.jobs.values() if job.line == line and job.in_line]

    def held_by(self, session: str) -> list[JobRecord]:
        return [j for j in self.jobs.values() if j.state is JobState.RUNNING and j.holder == session]

    def running_of(self, jobs: Iterable[JobRecord]) -> tuple[int, int, int]:
        """How many of `jobs` take a slot, by class."""
        counts = [0, 0, 0]
        for job in jobs:
            if job.takes_slot:
                counts[job.new.priority] += 1
        return (counts[0], counts[1], counts[2])

    def live_workers(self, pool: str) -> dict[int, SessionRecord]:
        """Workers that may get new work, by index: their lease is not over, and they are not stopping."""
        now = self.clock.monotonic()
        return {
            s.index: s
            for s in self.sessions.values()
            if s.state is SessionState.LIVE and s.lease_ends > now and s.new.pool == pool and s.index is not None
        }

    def children(self, parent: str) -> list[JobRecord]:
        return [job for job in self.jobs.values() if job.parent == parent]

    def past_expiry(self, job: JobRecord) -> bool:
        """Whether it must not start any more because it has expired. A job that has started once does not expire."""
        if job.new.expires is None or self.now < job.enqueued_at + job.new.expires:
            return False
        return not job.started

    def shown_expired(self, job: JobRecord) -> bool:
        """Whether the store shows it as cancelled by its expiry."""
        shown = self.seen.jobs.get(job.id)
        return shown is not None and shown.state is JobState.CANCELLED and shown.reason is Reason.EXPIRED
