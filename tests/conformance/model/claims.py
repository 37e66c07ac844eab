"""Claims: what a session may start, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fairlane.errors import SessionLost, Stale
from fairlane.job import Claimed, JobKind, JobState, Reason
from fairlane.session import Claim, SessionState
from fairlane.slots import Ask

from . import bindings, endings, lines
from .records import Domain, JobRecord, Mismatch, Records, SessionRecord


def refusal(records: Records, session: str, claim: Claim) -> Exception | None:
    """Why a claim must be refused, if it must."""
    record = records.sessions.get(session)
    if record is None or not record.present:
        return SessionLost(session)
    if claim.number < record.claim:
        return Stale(f"{claim.number} after {record.claim}")
    return None


def check(records: Records, session: str, claim: Claim, answer: Sequence[Claimed]) -> None:
    """Follow the answer to a claim job by job: each must be one that may start next, and nothing may be left out."""
    record = records.sessions[session]
    if claim.number == record.claim:
        held = {job.id for job in records.held_by(session) if job.claim == claim.number}
        if {job.id for job in answer} != held or len(answer) != len(held):
            raise Mismatch(f"the repeated claim answers {_ids(answer)}, held under it are {sorted(held)}")
    else:
        record.claim = claim.number
        if record.state is SessionState.STOPPING:
            if answer:
                raise Mismatch(f"a stopping session started {_ids(answer)}")
        else:
            _Dispatch(records, record, claim).follow([job.id for job in answer])
    for job in answer:
        _check_fields(records.jobs[job.id], job)


class _Dispatch:
    """One claim on its way: ask by ask."""

    def __init__(self, records: Records, session: SessionRecord, claim: Claim) -> None:
        self.records = records
        self.session = session
        self.claim = claim

    def follow(self, answer: Sequence[str]) -> None:
        rest = list(answer)
        started = 0
        for ask in self.claim.asks:
            taken = 0
            while started < self.claim.total and taken < ask.most:
                allowed = self._allowed(ask)
                chosen = next((job for job in allowed if rest and job.id == rest[0]), None)
                if chosen is not None and not self.records.past_expiry(chosen):
                    self._start(chosen)
                    rest.pop(0)
                    started += 1
                    taken += 1
                elif not self._expire(allowed):
                    if allowed:
                        names = sorted(job.id for job in allowed)
                        raise Mismatch(f"{names} may start for {ask}, the answer goes on with {rest[:1]}")
                    break
        if rest:
            raise Mismatch(f"{rest} may not start for {self.claim}")
        self._expire_others()

    def _expire(self, met: Sequence[JobRecord]) -> bool:
        """Cancel what the claim met and is past its expiry."""
        expired = [job for job in met if self.records.past_expiry(job)]
        for job in expired:
            if not self.records.shown_expired(job):
                raise Mismatch(f"{job.id} is next, past its expiry, and was not cancelled")
            endings.end(self.records, job, JobState.CANCELLED, Reason.EXPIRED)
        return bool(expired)

    def _expire_others(self) -> None:
        """How far a claim looks is its own affair: it may cancel any job that is past its expiry."""
        for job in list(self.records.jobs.values()):
            pending = job.state is JobState.PENDING
            if pending and self.records.past_expiry(job) and self.records.shown_expired(job):
                endings.end(self.records, job, JobState.CANCELLED, Reason.EXPIRED)

    def _allowed(self, ask: Ask) -> list[JobRecord]:
        """The jobs of which any may start next for an ask: one for each queue, more where a domain may be forgotten."""
        records = self.records
        slots = self.session.new.slots
        assert slots is not None
        running = records.running_of(records.held_by(self.session.new.id))
        if not slots.room(running, ask.priority):
            return []
        if ask.below is not None and running[ask.priority] >= ask.below:
            return []
        allowed: list[JobRecord] = []
        for domain, heads in self._heads(ask).items():
            arrivals = {lane: job.arrival or 0 for lane, job in heads.items()}
            allowed += [heads[lane] for lane in records.order(domain).first(arrivals)]
        return allowed

    def _heads(self, ask: Ask) -> dict[Domain, dict[str | None, JobRecord]]:
        """The next job of each lane in each domain that an ask looks at."""
        heads: dict[Domain, dict[str | None, JobRecord]] = {}
        for job in sorted(self._ready(ask), key=lambda job: job.arrival or 0):
            heads.setdefault(job.domain, {}).setdefault(job.new.lane, job)
        return heads

    def _ready(self, ask: Ask) -> Iterator[JobRecord]:
        """The jobs that nothing holds back."""
        records = self.records
        for job in records.jobs.values():
            if job.state is not JobState.PENDING or job.new.priority is not ask.priority:
                continue
            if job.new.kind not in (JobKind.JOB, JobKind.CLEANUP):
                continue
            if ask.queue is None:
                mine = job.index is not None and (job.new.pool, job.index) == (
                    self.session.new.pool,
                    self.session.index,
                )
            else:
                mine = job.new.queue == ask.queue and not placed(job)
            free = mine and self._queue_lets(job) and bindings.startable(records, job)
            if free and job.id in lines.holders(records, job.line):
                yield job

    def _queue_lets(self, job: JobRecord) -> bool:
        settings = self.records.settings(job.new.queue)
        if settings.paused:
            return False
        if settings.slots is None:
            return True
        running = self.records.running_of(j for j in self.records.jobs.values() if j.new.queue == job.new.queue)
        return settings.slots.room(running, job.new.priority) > 0

    def _start(self, job: JobRecord) -> None:
        records = self.records
        ask = Ask(None if placed(job) else job.new.queue, job.new.priority, 1)
        arrivals = {lane: head.arrival or 0 for lane, head in self._heads(ask)[job.domain].items()}
        paid = lines.price(records, job)
        records.order(job.domain).start(job.new.lane, arrivals, paid)
        domain = job.domain
        lines.start(records, job, self.session.new.id, self.claim.number)
        job.paid, job.started_in = paid, domain


def placed(job: JobRecord) -> bool:
    """Whether the job belongs into one worker's inbox."""
    return job.new.worker is not None or job.new.sticky is not None or job.new.kind is JobKind.CLEANUP


def _check_fields(job: JobRecord, claimed: Claimed) -> None:
    new = job.new
    ruled = (job.fence, job.attempt, new.task, new.queue, new.lane, new.priority, new.payload, new.retries, new.kind)
    told = (
        *(claimed.fence, claimed.attempt, claimed.task, claimed.queue, claimed.lane),
        *(claimed.priority, claimed.payload, claimed.retries, claimed.kind),
    )
    # A clean-up may show the key it cleans up after.
    sticky = new.sticky if new.kind is JobKind.JOB else claimed.sticky
    if told != ruled or claimed.backoff != new.backoff or claimed.sticky != sticky:
        raise Mismatch(f"{job.id} was handed out as {claimed}, by the rules it is {ruled}")
    if job.suspect is not None and claimed.suspect != job.suspect:
        raise Mismatch(f"{job.id} was handed out with suspect={claimed.suspect}")


def _ids(answer: Sequence[Claimed]) -> list[str]:
    return [job.id for job in answer]
