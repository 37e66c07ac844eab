"""The suite's own record of which session holds which job under which fence, kept without reading the store.

It knows the rules of one queue without lanes, limits or priorities, which is all that fencing needs. Each
answer of the store is compared with it, and then taken over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fairlane.model.job import Acceptance, Claimed, Held, Job, JobState, NewJob, Verdict
from fairlane.model.states import MOST_HAND_BACKS, Move, Transition, after_crash

S = JobState


@dataclass
class Holding:
    """One job as it must be."""

    new: NewJob
    state: JobState = S.PENDING
    fence: int = 0
    charged: int = 0
    crashes: int = 0
    returns: int = 0
    holder: str | None = None
    claim: int = 0
    cancel_requested: bool = False
    due: float = 0.0

    def wait(self, now: float, delay: float) -> None:
        """No session holds it; it waits again, after `delay`."""
        self.holder = None
        self.state, self.due = (S.SCHEDULED, now + delay) if delay else (S.PENDING, 0.0)

    def end(self, state: JobState) -> None:
        """It is final: nothing may change it any more."""
        assert not self.state.final
        self.holder = None
        self.state = state


@dataclass
class Holders:
    """Which session holds which job."""

    jobs: dict[str, Holding]
    leases: dict[str, float] = field(default_factory=dict)
    """The end of the lease of each session that is not over."""
    written: dict[tuple[str, Held], tuple[Move, JobState]] = field(default_factory=dict)
    claims: list[tuple[str, Held]] = field(default_factory=list)
    """Every claim so far, for late writes."""

    def of(self, session: str) -> list[Held]:
        """The claims that a session holds."""
        return [Held(id, job.fence) for id, job in self.jobs.items() if job.holder == session]

    def waiting(self) -> int:
        """How many jobs may start."""
        return sum(job.state is S.PENDING for job in self.jobs.values())

    def unfinished(self) -> list[str]:
        """The jobs that are not final."""
        return [id for id, job in self.jobs.items() if not job.state.final]

    def check(self, seen: list[Job | None]) -> None:
        """Compare with what a reader sees."""
        for job in seen:
            assert job is not None
            expected = self.jobs[job.id]
            assert (job.state, job.fence) == (expected.state, expected.fence), job.id
            if job.state is S.RUNNING:
                assert job.session == expected.holder, job.id
                assert job.cancel_requested == expected.cancel_requested, job.id

    def claimed(self, session: str, number: int, total: int, claimed: list[Claimed]) -> None:
        """A claim was answered: with as many jobs as may start, each waiting until now, under a new fence."""
        assert len(claimed) == min(total, self.waiting())
        for each in claimed:
            job = self.jobs[each.id]
            assert job.state is S.PENDING, each.id
            job.state, job.holder, job.claim = S.RUNNING, session, number
            job.fence += 1
            job.charged += 1
            assert (each.fence, each.attempt) == (job.fence, job.charged), each.id
            self.claims.append((session, each.held))

    def finished(self, session: str, move: Transition, now: float, verdict: Verdict) -> None:
        """A write was answered: applied if and only if the writer held the job."""
        held = move.held
        job = self.jobs[held.id]
        if session in self.leases and (job.holder, job.fence) == (session, held.fence):
            self._apply(job, move, now)
            self.written[session, held] = (move.move, job.state)
            assert verdict == Verdict(held.id, Acceptance.APPLIED, job.state)
            return
        assert verdict.acceptance is not Acceptance.APPLIED, f"a stale write was accepted: {session} {move}"
        before = self.written.get((session, held))
        if before is None:
            assert verdict == Verdict(held.id, Acceptance.STALE, job.state)
        elif session in self.leases and before[0] is move.move:
            assert verdict == Verdict(held.id, Acceptance.REPEATED, before[1])

    def _apply(self, job: Holding, move: Transition, now: float) -> None:
        if move.move is Move.COMPLETE:
            job.end(S.COMPLETED)
        elif job.cancel_requested or move.move is Move.CANCEL:
            job.end(S.CANCELLED)
        elif move.move is Move.FAIL:
            job.end(S.FAILED)
        elif move.move is Move.HAND_BACK and job.returns >= MOST_HAND_BACKS:
            self._charge(job, now)
        else:
            job.returns = job.returns + 1 if move.move is Move.HAND_BACK else 0
            if move.move is not Move.RETRY:
                job.charged -= 1
            job.wait(now, move.delay)

    def cancelled(self, id: str, answer: JobState) -> None:
        """A cancel was answered: final at once for whatever waits, a request for whatever runs."""
        job = self.jobs[id]
        if job.state is S.RUNNING:
            job.cancel_requested = True
        elif not job.state.final:
            job.end(S.CANCELLED)
        assert answer is job.state

    def give_back(self, held: Held, now: float) -> None:
        """A job was taken back uncharged."""
        job = self.jobs[held.id]
        job.charged -= 1
        if job.cancel_requested:
            job.end(S.CANCELLED)
        else:
            job.wait(now, 0.0)

    def crash(self, held: Held, now: float) -> None:
        """The process that ran a job died."""
        job = self.jobs[held.id]
        job.returns = 0
        self._charge(job, now)

    def _charge(self, job: Holding, now: float) -> None:
        job.crashes += 1
        fate = after_crash(
            cancel_requested=job.cancel_requested,
            attempt=job.charged,
            retries=job.new.retries,
            crashes=job.crashes,
            backoff=job.new.backoff,
            draw=1.0,
        )
        if fate.state.final:
            job.end(fate.state)
        else:
            job.wait(now, fate.delay)

    def over(self, session: str, begun: list[Held], now: float) -> None:
        """A session ended: what had begun crashed, the rest is given back."""
        del self.leases[session]
        for held in self.of(session):
            if held in begun:
                self.crash(held, now)
            else:
                self.give_back(held, now)

    def promote(self, now: float) -> int:
        """Let time pass. Returns how many jobs became due."""
        due = [job for job in self.jobs.values() if job.state is S.SCHEDULED and job.due <= now]
        for job in due:
            job.wait(now, 0.0)
        return len(due)
