"""The model: one method for each verb of the port.

Each method takes the arguments of the verb and `reply`, what the store returned. It raises the error that the verb must
raise, having changed nothing; or `Mismatch` when the answer is not one that the rules allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec

from fairlane.errors import TermLost
from fairlane.model.binding import Release
from fairlane.model.job import Acceptance, Claimed, Enqueued, Held, JobKind, JobState, NewJob, Reason, Verdict
from fairlane.model.maintenance import Admitted, Promoted, Pruned, Recount, Rescued, Retention
from fairlane.model.session import Claim, Finished, NewSession, Renewal, Session, Term
from fairlane.model.settings import SettingsChange
from fairlane.model.states import Move, Transition
from fairlane.store.clock import ManualClock

from . import bindings, claims, endings, lines, requests, sessions
from .records import Mismatch, Records, Sight

T = TypeVar("T")
Reply: TypeAlias = T | Exception


class Model:
    """The rules of a store."""

    def __init__(self, clock: ManualClock) -> None:
        self.records = Records(clock)
        self.last_term = 0
        self.leader: Term | None = None
        """The last term so far; `leads` is whether it is current."""
        self.term_ends = 0.0

    def see(self, sight: Sight) -> None:
        """Note what the store shows after a verb, before the verb is applied here."""
        self.records.look(sight)

    def settle(self) -> None:
        """The end of every step: remove what is unused, and start turns that hold a place."""
        records = self.records
        bindings.adopt(records, "default")
        bindings.lose_copies(records)
        bindings.settle(records)
        lines.start_turns(records)
        endings.settle_broadcasts(records)
        busy = {job.domain for job in records.jobs.values() if job.state is JobState.PENDING}
        for domain, order in records.orders.items():
            if domain not in busy:
                order.idle()

    # -- sessions ------------------------------------------------------------------------------------------------

    def register(self, session: NewSession, *, reply: Reply[Session]) -> None:
        record = sessions.register(self.records, session)
        answer = _answer(reply)
        if (answer.id, answer.index, answer.state) != (session.id, record.index, record.state):
            raise Mismatch(f"registered as {answer}, by the rules index {record.index}")

    def renew(
        self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False, reply: Reply[Renewal]
    ) -> None:
        answer = None if isinstance(reply, Exception) else reply
        sessions.renew(self.records, session, held, claim, stopping, answer)

    def leave(self, session: str, *, begun: Sequence[Held] | None = None, reply: Reply[None]) -> None:
        sessions.leave(self.records, session, begun)
        _answer(reply)

    # -- jobs ----------------------------------------------------------------------------------------------------

    def enqueue(self, jobs: Sequence[NewJob], *, reply: Reply[list[Enqueued]]) -> None:
        answers = requests.enqueue(self.records, jobs)
        given = _answer(reply)
        self.settle()
        _same("enqueue", given, requests.answer(self.records, answers))

    def claim(self, session: str, claim: Claim, *, reply: Reply[list[Claimed]]) -> None:
        refusal = claims.refusal(self.records, session, claim)
        if refusal is not None:
            raise refusal
        claims.check(self.records, session, claim, _answer(reply))

    def finish(
        self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None, reply: Reply[Finished]
    ) -> None:
        refusal = claims.refusal(self.records, session, claim) if claim is not None else None
        if refusal is not None:
            raise refusal
        answer = _answer(reply)
        if len(answer.verdicts) != len(transitions):
            raise Mismatch(f"{len(answer.verdicts)} verdicts for {len(transitions)} transitions")
        for transition, verdict in zip(transitions, answer.verdicts, strict=True):
            self._finish_one(session, transition, verdict)
        if claim is not None:
            claims.check(self.records, session, claim, answer.claimed)
        elif answer.claimed:
            raise Mismatch(f"nothing was claimed, and {answer.claimed} came")

    def _finish_one(self, session: str, transition: Transition, verdict: Verdict) -> None:
        held = transition.held
        job = self.records.jobs.get(held.id)
        if job is None:
            _same("a write to an unknown job", verdict, Verdict(held.id, Acceptance.STALE, None))
            return
        if self._holds(session, held):
            endings.write(self.records, job, transition)
            job.written[session, held.fence] = (transition, job.state)
            _same(f"{transition.move.name}", verdict, Verdict(held.id, Acceptance.APPLIED, job.state))
            return
        earlier = job.written.get((session, held.fence))
        stale = Verdict(held.id, Acceptance.STALE, job.state)
        if earlier is None:
            # The store itself recorded this move under this fence, so it may answer "repeated".
            taken_back = transition.move is Move.TAKE_BACK and (session, held.fence) in job.taken_back
            states = {job.state, JobState.PENDING, JobState.CANCELLED} if taken_back else set()
            if verdict in [Verdict(held.id, Acceptance.REPEATED, state) for state in states]:
                return
            _same("a write by one who does not hold the job", verdict, stale)
            return
        wrote, state = earlier
        states = {state} if state.final else {state, job.state, JobState.SCHEDULED, JobState.PENDING}
        allowed = {Verdict(held.id, Acceptance.REPEATED, state) for state in states if state}
        # A dead session, or another move under a fence that was written already: the store may also reject the write.
        if wrote != transition or not self.records.sessions[session].present:
            allowed.add(stale)
        if verdict not in allowed:
            raise Mismatch(f"the repeated {transition.move.name} was answered {verdict}, allowed is {allowed}")

    def progress(self, session: str, reports: Sequence[tuple[Held, bytes]], *, reply: Reply[list[Verdict]]) -> None:
        for (held, _), verdict in zip(reports, _answer(reply), strict=True):
            job = self.records.jobs.get(held.id)
            state = None if job is None else job.state
            taken = Acceptance.APPLIED if self._holds(session, held) else Acceptance.STALE
            _same("progress", verdict, Verdict(held.id, taken, state))

    def _holds(self, session: str, held: Held) -> bool:
        job = self.records.jobs.get(held.id)
        running = job is not None and job.state is JobState.RUNNING
        return job is not None and running and (job.holder, job.fence) == (session, held.fence)

    def cancel(self, ids: Sequence[str], *, reply: Reply[list[JobState]]) -> None:
        requests.cancel(self.records, ids)
        answer = _answer(reply)
        self.settle()
        _same("cancel", answer, [self.records.jobs[id].state for id in ids])

    def release(self, pool: str, key: str, cleanup: NewJob | None = None, *, reply: Reply[Release]) -> None:
        requests.release(self.records, pool, key, cleanup, _answer(reply))

    # -- the leader's passes -------------------------------------------------------------------------------------

    def promote(self, *, term: int | None = None, reply: Reply[Promoted]) -> None:
        self._check_term(term)
        records = self.records
        answer = _answer(reply)
        expired = [job for job in records.jobs.values() if job.waiting and records.past_expiry(job)]
        due = [j for j in records.jobs.values() if j.due_at is not None and j.due_at <= records.now]
        arriving = sorted(
            (job for job in due if job not in expired), key=lambda j: (j.new.priority, j.due_at or 0, j.id)
        )
        late = max((records.now - job.due_at for job in arriving if job.due_at is not None), default=None)
        for job in expired:
            endings.end(records, job, JobState.CANCELLED, Reason.EXPIRED)
        # A draining binding ends with its last job, even if that expires just before another job of its key arrives.
        bindings.settle(records)
        for job in arriving:
            lines.promote(records, job)
        for job in records.jobs.values():
            if job.new.kind is JobKind.BROADCAST and records.now >= job.enqueued_at + job.new.ttl:
                job.swept = True
        _same("promoted, expired", (answer.promoted, answer.expired), (len(arriving), len(expired)))
        if (answer.late is None) != (late is None) or abs((answer.late or 0.0) - (late or 0.0)) > 1e-3:
            raise Mismatch(f"the longest overdue job was late by {late} s, the promoter got {answer.late}")
        waits = [job.due_at - records.now for job in records.jobs.values() if job.due_at is not None]
        if waits and (answer.next_due is None or answer.next_due > min(waits) + 1e-3):
            raise Mismatch(f"the next job is due in {min(waits)} s, the promoter got {answer.next_due}")

    def admit(self, *, term: int | None = None, reply: Reply[Admitted]) -> None:
        """Bind unbound jobs. Every verb passes places on by itself: without faults nothing needs repair."""
        self._check_term(term)
        answer = _answer(reply)
        _same("moved, repaired, more", (answer.moved, answer.repaired, answer.more), (0, 0, False))
        bindings.rebind(self.records, "default")

    def rescue(self, *, declare: bool = True, term: int | None = None, reply: Reply[Rescued]) -> None:
        self._check_term(term)
        sessions.rescue(self.records, declare=declare, reply=_answer(reply))

    def prune(self, retention: Retention, *, term: int | None = None, reply: Reply[Pruned]) -> None:
        """Nothing here gets old enough for retention."""
        self._check_term(term)
        _same("pruned jobs", _answer(reply).jobs, 0)

    # -- leading -------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> Term | None:
        """The current term."""
        return self.leader if self.records.clock.monotonic() < self.term_ends else None

    def _check_term(self, term: int | None) -> None:
        if term is not None and (self.leads is None or self.leads.number != term):
            raise TermLost(str(term))

    def lead(self, session: str, *, lease: float, term: int | None = None, reply: Reply[Term | None]) -> None:
        answer = _answer(reply)
        present = self.leads
        if term is None:
            if present is not None and present.session != session:
                left = self.term_ends - self.records.clock.monotonic()
                if answer is not None and abs(answer.remaining - left) < 1e-3:
                    answer = msgspec.structs.replace(answer, remaining=present.remaining)
                _same("standing while another session leads", answer, present)
                return
            if present is not None:
                term = present.number
        if term is None:
            if answer is None or answer.session != session or answer.number <= self.last_term:
                raise Mismatch(f"nobody leads, {self.last_term} was the last term, and {session} got {answer}")
            self.last_term = answer.number
        elif present is None or (present.number, present.session) != (term, session):
            _same("extending a term that has ended", answer, None)
            return
        elif answer is None or answer.number != term:
            raise Mismatch(f"the present term is {term}, and its own leader was answered {answer}")
        self.leader = answer
        self.term_ends = self.records.clock.monotonic() + answer.remaining

    def resign(self, term: int, *, reply: Reply[None]) -> None:
        _answer(reply)
        if self.leads is not None and self.leads.number == term:
            self.term_ends = 0.0

    # -- settings and maintenance -------------------------------------------------------------------------------------

    def configure(self, changes: Sequence[SettingsChange], *, reply: Reply[None]) -> None:
        _answer(reply)
        for change in changes:
            queue = self.records.queue(change.queue)
            if change.declared is not None and change.version >= queue.version:
                queue.declared, queue.version = change.declared, change.version
            if not isinstance(change.override, msgspec.UnsetType):
                queue.override = change.override

    def recount(self, *, reply: Reply[Recount]) -> None:
        _same("recount", _answer(reply).differences, ())


def _answer(reply: Reply[T]) -> T:
    if isinstance(reply, Exception):
        raise Mismatch(f"refused with {reply!r}, and nothing was wrong")
    return reply


def _same(what: str, reply: object, ruled: object) -> None:
    if reply != ruled:
        raise Mismatch(f"{what}: returned {reply}, by the rules {ruled}")
