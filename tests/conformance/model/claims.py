"""Claims: what a session may start, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fairlane.errors import SessionLost, Stale
from fairlane.model.job import Claimed, JobKind, JobState, Reason
from fairlane.model.session import Claim, SessionState
from fairlane.model.slots import Ask

from . import bindings, endings, lines
from .records import Domain, JobRecord, Mismatch, Records, SessionRecord


def refusal(records: Records, session: str, claim: Claim) -> Exception | None:
    """The error that a claim must raise, if any."""
    record = records.sessions.get(session)
    if record is None or not record.present:
        return SessionLost(session)
    if claim.number < record.claim:
        return Stale(f"{claim.number} after {record.claim}")
    return None


def check(records: Records, session: str, claim: Claim, answer: Sequence[Claimed]) -> None:
    """Check the answer to a claim job by job: each must be one that may start next, and none may be left out."""
    record = records.sessions[session]
    if claim.number == record.claim:
        held = {job.id for job in records.held_by(session) if job.claim == claim.number}
        if {job.id for job in answer} != held or len(answer) != len(held):
            raise Mismatch(f"the repeated claim answers {_ids(answer)}, held under it are {sorted(held)}")
    else:
        if answer:
            # An empty answer is not recorded: its number may be used again.
            record.claim = claim.number
        if record.state is SessionState.STOPPING:
            if answer:
                raise Mismatch(f"a stopping session started {_ids(answer)}")
        else:
            _Dispatch(records, record, claim).follow([job.id for job in answer])
    for job in answer:
        _check_fields(records.jobs[job.id], job)


class _Dispatch:
    """The state of one claim, ask by ask."""

    def __init__(self, records: Records, session: SessionRecord, claim: Claim) -> None:
        self.records = records
        self.session = session
        self.claim = claim
        self.ready_before = {job.id for ask in claim.asks for job in self._ready(ask)}

    def follow(self, answer: Sequence[str]) -> None:
        rest = list(answer)
        started = 0
        for ask in self.claim.asks:
            taken = 0
            while started < self.claim.total and taken < ask.most and self._has_room(ask):
                chosen = self._next(ask, rest)
                if chosen is None:
                    # An expired job that was cancelled may have opened the gate of a clean-up.
                    self._expire()
                    chosen = self._next(ask, rest)
                if chosen is None:
                    self._check_nothing_left(ask, rest)
                    break
                self._start(ask, chosen)
                rest.pop(0)
                started += 1
                taken += 1
        if rest:
            raise Mismatch(f"{rest} may not start for {self.claim}")
        self._expire()

    def _next(self, ask: Ask, rest: Sequence[str]) -> JobRecord | None:
        return next((job for job in self._may_start(ask) if rest and job.id == rest[0]), None)

    def _has_room(self, ask: Ask) -> bool:
        """Whether the session may start one more of the class."""
        slots = self.session.new.slots
        assert slots is not None
        running = self.records.running_of(self.records.held_by(self.session.new.id))
        return slots.room(running, ask.priority) > 0 and (ask.below is None or running[ask.priority] < ask.below)

    def _check_nothing_left(self, ask: Ask, rest: Sequence[str]) -> None:
        """A claim continues with the next ask only when no job may start, and has then cancelled expired jobs."""
        ready = [job for job in self._ready(ask) if self._may_not_be_left(job)]
        left = [job.id for job in ready if not self.records.past_expiry(job)]
        if left:
            raise Mismatch(f"{left} may start for {ask}, the answer goes on with {rest[:1]}")
        for job in ready:
            if self.records.terms(job).limit is None and not self.records.shown_expired(job):
                raise Mismatch(f"{job.id} is past its expiry, was met by {ask}, and was not cancelled")

    def _may_not_be_left(self, job: JobRecord) -> bool:
        """Not for a clean-up whose gate this claim opened: its queue may be one that the claim has already left."""
        return job.new.kind is not JobKind.CLEANUP or job.id in self.ready_before

    def _expire(self) -> None:
        """How far a claim searches is unspecified: it may cancel any expired job."""
        for job in list(self.records.jobs.values()):
            pending = job.state is JobState.PENDING
            if pending and self.records.past_expiry(job) and self.records.shown_expired(job):
                endings.end(self.records, job, JobState.CANCELLED, Reason.EXPIRED)

    def _may_start(self, ask: Ask) -> list[JobRecord]:
        """The jobs of which any may start next: one for each queue, more where the rules leave a choice."""
        allowed: list[JobRecord] = []
        for late_hold in (True, False):
            for domain, heads in self._heads(ask, late_hold).items():
                order = self.records.order(domain)
                allowed += [job for lane, job in heads.items() if lane in order.first(self._field(ask, job))]
        return allowed

    def _field(self, ask: Ask, job: JobRecord) -> dict[str | None, int]:
        """The arrivals of the jobs that a job competes with, and its own."""
        heads = self._heads(ask, True).get(job.domain, {})
        return {lane: head.arrival or 0 for lane, head in heads.items()} | {job.new.lane: job.arrival or 0}

    def _heads(self, ask: Ask, late_hold: bool) -> dict[Domain, dict[str | None, JobRecord]]:
        """The next job of each lane in each domain that an ask covers."""
        heads: dict[Domain, dict[str | None, JobRecord]] = {}
        for job in sorted(self._ready(ask, late_hold), key=lambda job: job.arrival or 0):
            if not self.records.past_expiry(job):
                heads.setdefault(job.domain, {}).setdefault(job.new.lane, job)
        return heads

    def _ready(self, ask: Ask, late_hold: bool = True) -> Iterator[JobRecord]:
        """The jobs of the ask that may start."""
        for job in self.records.jobs.values():
            startable = job.state is JobState.PENDING and job.new.kind in (JobKind.JOB, JobKind.CLEANUP)
            if startable and job.new.priority is ask.priority and self._in_source(ask, job):
                free = self._queue_lets(job) and bindings.startable(self.records, job)
                if free and job.id in lines.holders(self.records, job.line, late_hold=late_hold):
                    yield job

    def _in_source(self, ask: Ask, job: JobRecord) -> bool:
        if ask.queue is not None:
            return job.new.queue == ask.queue and not placed(job) and not job.declined
        if job.declined:
            # Sessions here do not report their tasks, so each may know all of them.
            return job.new.queue in self.session.new.queues
        return job.index is not None and (job.new.pool, job.index) == (self.session.new.pool, self.session.index)

    def _queue_lets(self, job: JobRecord) -> bool:
        settings = self.records.settings(job.new.queue)
        if settings.paused:
            return False
        if settings.slots is None:
            return True
        running = self.records.running_of(j for j in self.records.jobs.values() if j.new.queue == job.new.queue)
        return settings.slots.room(running, job.new.priority) > 0

    def _start(self, ask: Ask, job: JobRecord) -> None:
        domain, paid = job.domain, lines.price(self.records, job)
        self.records.order(domain).start(job.new.lane, self._field(ask, job), paid)
        lines.start(self.records, job, self.session.new.id, self.claim.number)
        job.paid, job.started_in = paid, domain


def placed(job: JobRecord) -> bool:
    """Whether the job belongs into one worker's inbox."""
    return job.new.worker is not None or job.new.sticky is not None or job.new.kind is JobKind.CLEANUP


def _check_fields(job: JobRecord, claimed: Claimed) -> None:
    new = job.new
    ruled = (job.fence, job.attempt, new.task, new.queue, new.lane, new.priority, job.payload, new.retries, new.kind)
    stored = (
        *(claimed.fence, claimed.attempt, claimed.task, claimed.queue, claimed.lane),
        *(claimed.priority, claimed.payload, claimed.retries, claimed.kind),
    )
    # A clean-up may show the key that it belongs to.
    sticky = new.sticky if new.kind is JobKind.JOB else claimed.sticky
    if stored != ruled or claimed.backoff != new.backoff or claimed.sticky != sticky:
        raise Mismatch(f"{job.id} was handed out as {claimed}, by the rules it is {ruled}")
    if claimed.suspect != job.suspect:
        raise Mismatch(f"{job.id} was handed out with suspect={claimed.suspect}")


def _ids(answer: Sequence[Claimed]) -> list[str]:
    return [job.id for job in answer]
