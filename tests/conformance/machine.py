"""Random sequences of calls, part two: claims and their results, the leader's passes, settings, time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hypothesis import strategies as st
from hypothesis.stateful import rule

from fairlane.model.job import Held, JobKind, JobState, Priority, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.session import Claim, SessionState
from fairlane.model.settings import QueueOverride, QueueSettings, SettingsChange
from fairlane.model.slots import Ask
from fairlane.model.states import Transition, cancel, complete, decline, fail, hand_back, retry, snooze, take_back
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .driver import SERVED, TERM_LEASE
from .fleet import Fleet, pick
from .model.records import JobRecord
from .wishes import Wish, WorkSettings, flags, numbers, wishes, work_settings

asks = st.builds(
    Ask,
    queue=st.sampled_from([None, *SERVED]),
    priority=st.sampled_from(list(Priority)),
    most=st.integers(1, 3),
    below=st.sampled_from([None, None, 1, 2]),
)
EVERYTHING = tuple(Ask(source, priority, 4) for priority in Priority for source in (None, *SERVED))
claims = st.one_of(st.just(EVERYTHING), st.lists(asks, min_size=1, max_size=3).map(tuple))
totals = st.integers(1, 5)
outcomes = st.sampled_from(
    [
        *("complete", "complete", "fail", "retry", "retry_later", "retry_changed", "crash"),
        *("snooze", "snooze_changed", "hand_back", "take_back", "decline", "cancel"),
    ]
)
terms = st.sampled_from(["none", "none", "present", "old"])


class Machine(Fleet):
    """One random sequence of calls on a store."""

    # -- claims --------------------------------------------------------------------------------------------------

    @rule(session=numbers, wanted=claims, total=totals)
    def claim(self, session: int, wanted: tuple[Ask, ...], total: int) -> None:
        """A worker claims; ended and dead workers try it too."""
        known = pick(self.workers(), session)
        if known is not None:
            self.driver.claim(known.new.id, Claim(number=known.claim + 2, asks=wanted, total=total))

    @rule(wanted=st.lists(wishes, min_size=1, max_size=3), session=numbers, total=totals)
    def enqueue_and_claim(self, wanted: list[Wish], session: int, total: int) -> None:
        """Jobs are sent, and there is a worker."""
        self.enqueue(wanted)
        self.claim(session, EVERYTHING, total)

    @rule(session=numbers, late=flags)
    def claim_oddly(self, session: int, late: bool) -> None:
        """The reply to a claim was lost, or a claim that was overtaken arrives late."""
        known = pick(self.workers(), session)
        if known is None or not known.claim:
            return
        if late:
            self.driver.claim(known.new.id, Claim(number=known.claim - 1, asks=EVERYTHING, total=5))
        elif known.state is not SessionState.STOPPING:
            self.driver.claim(known.new.id, self.driver.last_claims[known.new.id])

    @rule(
        session=numbers,
        ends=st.lists(st.tuples(numbers, outcomes), min_size=1, max_size=3),
        wanted=st.one_of(st.none(), claims),
        later=st.sampled_from([2, 2, 2, -1]),
    )
    def finish(self, session: int, ends: list[tuple[int, str]], wanted: tuple[Ask, ...] | None, later: int) -> None:
        """A session ends some of its jobs, and may claim in the same call; a late claim fails the whole call."""
        busy = [s for s in self.records.sessions.values() if self.records.held_by(s.new.id)]
        known = pick(busy, session)
        if known is None:
            return
        held = {job.id: job for job in self.records.held_by(known.new.id)}
        chosen = {job.id: outcome for n, outcome in ends if (job := pick(list(held.values()), n))}
        transitions = [transition(held[id], outcome) for id, outcome in chosen.items()]
        claim = None
        if wanted is not None and known.is_worker:
            claim = Claim(number=max(1, known.claim + later), asks=wanted, total=3)
        self.driver.finish(known.new.id, transitions, claim)

    @rule(session=numbers, total=totals, ends=st.lists(outcomes, min_size=1, max_size=4), goes_on=flags)
    def claim_and_finish(self, session: int, total: int, ends: list[str], goes_on: bool) -> None:
        """A worker claims, ends its jobs in different ways, and may claim the next ones in the same call."""
        known = pick([s for s in self.workers() if s.present], session)
        if known is not None:
            self.claim(self.workers().index(known), EVERYTHING, total)
            held = self.records.held_by(known.new.id)
            if held:
                ways = [transition(job, end) for job, end in zip(held, ends, strict=False)]
                claim = Claim(number=known.claim + 2, asks=EVERYTHING, total=total) if goes_on else None
                self.driver.finish(known.new.id, ways, claim)

    @rule(write=numbers)
    def repeat_finish(self, write: int) -> None:
        """The reply to a write was lost, perhaps long ago."""
        earlier = pick(self.driver.writes, write)
        if earlier is not None:
            self.driver.finish(earlier[0], [earlier[1]])

    @rule(start=numbers, outcome=outcomes, writer=st.one_of(st.none(), numbers))
    def replay_old_finish(self, start: int, outcome: str, writer: int | None) -> None:
        """A session writes that does not hold the job: an old holder under its fence, or another under the present one.

        Best a job that runs now, because there is a holder to be harmed.
        """
        starts = [s for s in self.driver.starts if self.records.jobs[s[1].id].state is JobState.RUNNING]
        if writer is None:
            past = [s for s in starts if self.records.jobs[s[1].id].fence != s[1].fence]
            earlier = pick(past or self.driver.starts, start)
        else:
            earlier = pick(starts or self.driver.starts, start)
        if earlier is None:
            return
        session, held = earlier
        others = [id for id in self.records.sessions if id != session]
        if writer is not None:
            session = pick(others, writer) or session
        self.driver.finish(session, [transition(self.records.jobs[held.id], outcome, held)])

    @rule(session=numbers, heir=st.one_of(st.none(), numbers), noticed=flags)
    def crash(self, session: int, heir: int | None, noticed: bool) -> None:
        """A process crashes or hangs; it does not renew. `noticed`: it is declared dead and another session gets its
        jobs, before it continues too late."""
        known = pick([s for s in self.records.sessions.values() if s.present], session)
        if known is None:
            return
        self.crashed.add(known.new.id)
        if noticed:
            held = self.driver.held(known.new.id)
            for _ in range(2):
                self.driver.advance(8.0)
                self.beat()
            self.driver.both("rescue")
            if heir is not None:
                self.claim(heir, EVERYTHING, 4)
            if held:
                self.driver.finish(known.new.id, [complete(each) for each in held])
            self.renew_one(known, held, False)

    @rule(start=numbers, fences=st.integers(-1, 1))
    def report(self, start: int, fences: int) -> None:
        """Progress under a current fence, an earlier one, or one that was never assigned."""
        earlier = pick(self.driver.starts, start)
        if earlier is not None:
            held = Held(earlier[1].id, earlier[1].fence + fences)
            self.driver.both("progress", earlier[0], [(held, b"0.5")])

    # -- the leader's passes -------------------------------------------------------------------------------------

    def term(self, which: str) -> int | None:
        last = self.driver.model.last_term
        return {"none": None, "present": last or None, "old": last - 1}[which]

    @rule(seconds=st.sampled_from([2.5, 6.0, 0.5, 16.0]), kept=st.sampled_from([True, True, False]), promoted=flags)
    def advance(self, seconds: float, kept: bool, promoted: bool) -> None:
        """Time passes; usually processes renew meanwhile, and the promoter runs."""
        self.driver.advance(seconds)
        if kept:
            self.beat()
        if promoted:
            self.driver.both("promote")

    @rule(verb=st.sampled_from(["rescue", "promote", "admit", "prune"]), term=terms)
    def look_after(self, verb: str, term: str) -> None:
        """A pass of one of the leader's services, or of a former leader."""
        arguments = [Retention()] if verb == "prune" else []
        self.driver.both(verb, *arguments, term=self.term(term))

    @rule(declare=flags)
    def look_after_everything(self, declare: bool) -> None:
        """All passes in a row; the rescuer may not trust its clock."""
        self.driver.both("rescue", declare=declare)
        self.driver.both("promote")
        self.driver.both("admit")
        self.driver.both("recount")

    @rule(session=st.sampled_from(["ann", "bob"]), term=terms, resigns=st.sampled_from([False, False, True]))
    def lead(self, session: str, term: str, resigns: bool) -> None:
        """A session stands for leadership, extends a term (perhaps of another session, or an old one), or resigns."""
        number = self.term(term)
        if resigns and number is not None:
            self.driver.both("resign", number)
        else:
            self.driver.both("lead", session, lease=TERM_LEASE, term=number)

    # -- settings and maintenance -------------------------------------------------------------------------------------

    @rule(settings=work_settings, newer=st.sampled_from([1, 1, 0, -1]))
    def configure(self, settings: WorkSettings, newer: int) -> None:
        """Another declaration, which is ignored if it is older than the stored one."""
        version = self.records.queue("work").version + newer
        self.driver.both("configure", [SettingsChange(queue="work", declared=settings.declared(), version=version)])

    @rule(
        queue=st.sampled_from(["work", "mail"]),
        paused=st.sampled_from([True, False, None]),
        limit=st.sampled_from([None, 1, 3]),
        declared=flags,
    )
    def limit_or_pause(self, queue: str, paused: bool | None, limit: int | None, declared: bool) -> None:
        """An operator pauses, resumes or limits a queue, or clears the override; or a declaration does so."""
        if declared:
            change = SettingsChange(queue="mail", declared=QueueSettings(limit=limit))
        elif paused is None:
            change = SettingsChange(queue=queue, override=None)
        elif limit is None:
            change = SettingsChange(queue=queue, override=QueueOverride(paused=paused))
        else:
            change = SettingsChange(queue=queue, override=QueueOverride(paused=paused, limit=limit + 1))
        self.driver.both("configure", [change])


def machine_of(opener: Callable[[ManualClock], Awaitable[Store]]) -> type[Machine]:
    """The machine for one kind of store."""
    return type("Life", (Machine,), {"open_store": staticmethod(opener)})


def _declinable(job: JobRecord) -> bool:
    """Whether a decline lets the job wait for those that know its task.

    Of bound jobs, in lanes, and for the second time the rules for declines are tested by themselves.
    """
    again = job.started_in is not None and isinstance(job.started_in[2], str)
    return job.new.kind is JobKind.JOB and job.index is None and job.new.lane is None and not again


def transition(job: JobRecord, outcome: str, held: Held | None = None) -> Transition:
    """A holder's decision. One that the job does not allow, or whose effect is unspecified, is replaced."""
    held = held or Held(job.id, job.fence)
    if job.new.kind is JobKind.TURN and outcome not in ("complete", "fail", "cancel"):
        outcome = "complete"
    if job.new.kind is JobKind.CLEANUP and outcome not in ("complete", "fail", "hand_back", "take_back"):
        outcome = "fail"
    if job.new.sticky is not None and outcome.startswith("snooze"):
        outcome = outcome.replace("snooze", "retry_later")
    if outcome == "decline" and not _declinable(job):
        outcome = "hand_back"
    if outcome == "complete":
        return complete(held, b"1")
    if outcome == "fail":
        return fail(held, Reason.ERROR, "boom")
    if outcome == "retry":
        return retry(held, 0.0, Reason.ERROR, "boom")
    if outcome == "retry_changed":
        return retry(held, 0.0, Reason.ERROR, "boom", payload=b"[[%d],{}]" % held.fence)
    if outcome == "retry_later":
        return retry(held, 3.2, Reason.TIMEOUT, "slow")
    if outcome == "retry_later_changed":
        return retry(held, 3.2, Reason.TIMEOUT, "slow", payload=b'[["later"],{}]')
    if outcome == "crash":
        return retry(held, 0.0, Reason.CRASHED, "killed")
    if outcome == "snooze":
        return snooze(held, 3.2)
    if outcome == "snooze_changed":
        return snooze(held, 3.2, payload=b"[[],{}]")
    if outcome == "hand_back":
        return hand_back(held)
    if outcome == "take_back":
        return take_back(held)
    if outcome == "decline":
        return decline(held, "no such task")
    return cancel(held)
