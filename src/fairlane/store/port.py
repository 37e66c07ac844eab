"""The port to a store: what every deployment can do, in words of jobs. The contract is these docstrings, and
`tests/conformance` is their proof.

Rules that hold for every verb:

- **Atomic.** A call happens as a whole or not at all; its answer is given after it is durable.
- **Repeatable.** A caller that lost the reply may call again with the same arguments: job ids, claim numbers
  and fences see to it that nothing happens twice. The leader's passes simply find less to do.
- **One clock.** The store's. Arguments are durations, except where a person named an instant.
- **Checked.** The records are validated when they are made; a verb raises `InvalidInput` for what only the
  store can see, and then has stored nothing.
- **Failures.** `StoreUnavailable`: unknown outcome, repeat the call. `StoreFull`, `StoreReadOnly`: nothing
  stored.
- **Batches.** One is a batch of one. Answers come in the order of the arguments.
- **Quiet.** A call that finds nothing to do writes nothing, and verbs that only read wait for no writer.

Verbs of the leader take its `term`: a number that is not the present term is refused with `TermLost` and
changes nothing. None runs the verb without leadership, which is always safe: every one of them is idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..model.binding import Binding, Release
from ..model.job import Claimed, Enqueued, Held, Job, JobState, NewJob, Verdict
from ..model.listings import FailureGroup, LaneListing, LanePage
from ..model.maintenance import Admitted, Promoted, Pruned, Recount, Rescued, Retention
from ..model.reading import DeclinedTask, Filter, JobPosition, Page, QueueReading
from ..model.schedule import Schedule, StoredSchedule
from ..model.session import Claim, Finished, NewSession, Renewal, Session, Term
from ..model.settings import SettingsChange
from ..model.states import Transition
from ..model.tokens import AccessToken, NewToken
from .wakeups import Wakeups


class Store(Protocol):
    """A durable home for jobs, with the dispatch rule built in."""

    @property
    def wakeups(self) -> Wakeups:
        """Hints from this store. Verbs publish their own, after they are durable."""

    # -- sessions --------------------------------------------------------------------------------------------

    async def register(self, session: NewSession) -> Session:
        """Make a session known, and give a worker its index.

        A named index that a live session holds: on the same host the new session takes its place and its
        bindings, and the old one is dead (its jobs are taken back as after a crash); on another host
        `IndexTaken`. Without a name the lowest free index of the pool. A new worker receives the sticky jobs
        that waited for one, and the broadcasts whose time to join is not over. `tasks` are kept as one set that all
        sessions with the same tasks share. Repeating the call with the
        same id answers the same and renews the lease; the id of a session that is over raises `SessionLost`.
        """

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        """Extend the lease, and compare what the session believes with what is recorded.

        `held` names every job the session runs or has not yet been told the end of; `claim` is the number of
        the last claim whose reply it has. Jobs recorded under that or an older number and not named are taken
        back, uncharged. `stopping` (for good) means no more claims and no more bindings. Raises `SessionLost`
        once it has ended or was declared dead. Turns are not claimed, so they are never taken back.
        """

    async def leave(self, session: str, *, begun: Sequence[Held] | None = None) -> None:
        """End a session. Its jobs are given back: those in `begun` as after a crash, the others uncharged.

        For a process that stops (`begun` empty) and for a supervisor whose child died. None treats all as
        begun. Its turns are cancelled. An automatic index gives up its bindings at once; a named one keeps
        them until the lease would have ended. Leaving twice is harmless; an unknown session raises
        `NotFound`.
        """

    # -- jobs ------------------------------------------------------------------------------------------------

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store up to 1,000 jobs, all or none, and admit those that are due.

        A known id with the same content answers ``created=False``; with other content it raises `Conflict`. A
        `unique` value held by another job of the same task answers with that job. Raises `QueueFull` (with
        `fairlane.model.reading.room_after` as its `retry_after`), and `InvalidInput` for a lane outside a closed
        set, a turn in a lane without a limit, or a turn whose waiter is not live.
        """

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        """Start jobs for a worker: ask by ask, at most `total`, in fair order inside each source.

        One decision over slots, reservations, queue limit, lane grants, bindings and pauses; jobs past their
        expiry are cancelled instead. A number counts once it has started jobs: repeating the last one returns
        those of its jobs that the session still holds, and a lower one raises `Stale`. An empty answer leaves
        no trace, so that idle polling writes nothing; its number may be used again. Raises `SessionLost`.

        The answer carries at most `claim.most_bytes`: the first job beyond it ends the claim, unless it is the only
        one. A job whose record cannot be read is failed as `bad_payload` and is not in the answer; it holds up nobody.
        If nothing else is in the answer, what stands behind it was looked for, or the queues asked are announced in
        this process as if a job had come.
        """

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        """Apply what a session decided about jobs it holds, each fenced by (job, fence, session), then claim.

        A finished job hands its grant on in the same step. A transition the session already wrote under this
        fence is answered with the stored outcome; one for a job it lost is `stale`, changes nothing but the
        count of refused writes, and never raises. When a cancel was requested, complete stays completed and
        all else becomes cancelled. A retry because the body's process died (`Reason.CRASHED`) counts as a
        crash and leaves the job a suspect, as `rescue` does; any other retry and a snooze clear it of
        suspicion. Hand-backs are not charged, `states.MOST_HAND_BACKS` times in a row: with the last of them
        the job is a suspect, and every further one is charged as a crash is, until a run ends otherwise. A
        take-back is about a claim that never began: it is never charged, and changes nothing else. A job
        that has started does not expire any more. A declined job goes back as one that is taken back, but only
        sessions that know its task, or do not say what they know, are offered it. One that can wait for this
        worker alone, or was in that place already, is scheduled after `states.decline_delay` of the time since
        its first decline. Once its patience is over a decline fails it; a run that began in between makes the
        next decline a first one again. Of declines in a row the history keeps the first and the last. Expired
        sessions may finish; dead ones are stale. With
        `claim`, as `claim` afterwards; if that raises, nothing of the call was applied.
        """

    async def progress(self, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
        """Store the latest progress of running jobs, fenced like `finish`."""

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        """Cancel jobs, and answer the state each is in now.

        A waiting job is `cancelled` at once. A `running` one was asked to stop: it keeps its slot, lane and
        count until its body has really ended. A final one stays as it is. An unknown id raises `NotFound`,
        and nothing is cancelled. Cancelling a broadcast cancels its children.
        """

    async def forget(self, ids: Sequence[str], retention: Retention) -> list[bool]:
        """Forget up to 1,000 jobs that are final, and answer for each whether it is forgotten by this call.

        False: it waits or runs, it is not known, or another process writes about it at this moment. Its id stays
        taken as `prune` would leave it: for `id_seconds` of the retention after the job ended, and that of a
        retry for as long as failed jobs are kept. Counts of ended jobs stay as they are.
        """

    async def release(self, pool: str, key: str, cleanup: NewJob | None = None) -> Release:
        """Release a sticky key: clean-up first and alone, release last. Repeating it changes nothing.

        `cleanup` (of kind `cleanup`) runs on the bound worker once no other job of the key is pending,
        running or retrying. A job of the key that arrives before it starts cancels it and re-opens the
        binding.
        """

    # -- the leader's passes ---------------------------------------------------------------------------------

    async def promote(self, *, limit: int = 1_000, term: int | None = None) -> Promoted:
        """Let time pass: due jobs arrive, ordered by class, due time and id; expired ones are cancelled."""

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        """Admit jobs whose insert was committed elsewhere, bind what waits unbound, and repair grants.

        Jobs that were declined and whose patience is over are offered to every session again.
        In an unordered lane a grant held unclaimed for 2 s by a job whose bound worker cannot take it moves
        to the next job that can run.
        """

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        """Declare sessions whose lease has ended dead (only if `declare`), and take back jobs of the dead.

        Every running job whose session is dead or missing is retried while its budget lasts, else failed as
        `crashed`; turns are cancelled. Bindings of workers that are gone are closed as lost, their waiting
        jobs bound anew, their clean-ups cancelled.
        """

    async def prune(self, retention: Retention, *, limit: int = 1_000, term: int | None = None) -> Pruned:
        """Forget what retention does not keep."""

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        """Stand for leadership (`term` None), or extend the term one has.

        JobPosition: a new, higher term if nobody leads; its own term if the session leads already (the reply was
        lost); else None. Extending: the same term, or None when it has ended, even if nobody else leads since.
        The session need not be registered.
        """

    async def resign(self, term: int) -> None:
        """Give up a term at once. A term that is not the present one is left alone."""

    # -- settings --------------------------------------------------------------------------------------------

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        """Declare or override settings of queues. A lower version than the stored one is ignored.

        Takes effect in the same step: lowering a lane's limit takes back unstarted grants, newest first;
        raising it hands out places at once. Pausing is a setting.
        """

    async def declare(self, schedules: Sequence[Schedule]) -> list[StoredSchedule]:
        """Store schedules, or refresh the ones that are known; answers with all there are.

        A changed timetable counts as newly stored: no slot from before it fires.
        """

    async def add_token(self, token: NewToken) -> AccessToken:
        """Store a token of the HTTP service, and answer with what is stored: its times are the store's.

        Storing the same token again answers the same; another digest under its id raises `Conflict`.
        """

    async def revoke_token(self, id: str) -> bool:
        """Revoke a token for good. False when it was revoked before; an unknown id raises `NotFound`."""

    # -- reading ---------------------------------------------------------------------------------------------

    async def schedules(self) -> list[StoredSchedule]:
        """Every schedule that was ever declared, by name."""

    async def leader(self) -> Term | None:
        """The present term, None when nobody leads."""

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        """Jobs with their history; None for ids that are unknown. Of a damaged record what can be read is shown."""

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        """A page of jobs, newest first."""

    async def positions(self, ids: Sequence[str]) -> list[JobPosition | None]:
        """Where jobs stand in line and what holds them; None for what does not wait, unknown ids included."""

    async def queues(self) -> list[QueueReading]:
        """Every queue that has settings or ever had a job, by name."""

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        """The lanes of a queue that have work, the longest backlog first. An unknown queue raises `NotFound`.

        The answer is a list with a `cursor` that leads to the next lanes. Where lanes are sampled, paging is
        approximate and ends after `listings.LANES_PAGED` lanes; the answer says so (`exact` is false).
        """

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        """The jobs of a lane in the order in which they start: those that run, then those that wait.

        None is the line of the jobs without a lane. In an ordered lane jobs stand by arrival, elsewhere by class, then
        arrival. What is not due yet is not in line, except for a retry in an ordered lane. The cost of a page depends
        on its length and on what runs, not on the backlog. An unknown queue raises `NotFound`; a lane without work is
        an empty page.
        """

    async def declined(self, *, limit: int = 100) -> list[DeclinedTask]:
        """Tasks of which jobs wait because workers declined them, the longest waiting first."""

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        """Failed jobs that are still kept, grouped by task and error group, the largest group first.

        The newest `listings.MOST_FAILURES` failed jobs, of the queue if one is named, are looked at; when there are
        more the groups say so (`exact` is false). A queue or task that is unknown has none.
        """

    async def sessions(self) -> list[Session]:
        """Every session that is still remembered, the newest first."""

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        """Bindings, open ones first, then the latest."""

    async def tokens(self) -> list[AccessToken]:
        """Every token, the oldest first; those that are revoked or have expired as well."""

    # -- the store itself ------------------------------------------------------------------------------------

    async def recount(self) -> Recount:
        """Compute everything derived anew from the job records, correct what differs, and say what did.

        A live job whose identity is missing gets one that stands for it, and one whose record cannot be read ends.
        """

    async def migrate(self) -> int:
        """Bring the schema up to date and return its version. Running it twice, even at once, is harmless."""

    async def close(self) -> None:
        """Let go of every resource. Closing twice is harmless."""
