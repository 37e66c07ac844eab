"""The store port: what every deployment can do, in terms of jobs. These docstrings are the contract, and
`tests/conformance` tests it.

Rules that hold for every verb:

- **Atomic.** A call happens completely or not at all; it returns after its effects are durable.
- **Repeatable.** A caller that did not get the reply may call again with the same arguments: job ids, claim
  numbers and fences ensure that nothing happens twice. A repeated pass of the leader finds less to do.
- **One clock.** The store's clock. Arguments are durations, except where a user specified a point in time.
- **Validated.** Records are validated when they are created. A verb raises `InvalidInput` for what only the store
  can check, and then has stored nothing.
- **Failures.** `StoreUnavailable`: the outcome is unknown, repeat the call. `StoreFull`, `StoreReadOnly`: nothing
  was stored.
- **Batches.** A single item is a batch of one. Results are in the order of the arguments.
- **Quiet.** A call that finds nothing to do writes nothing, and verbs that only read wait for no writer.

Verbs of the leader take its `term`: a number that is not the current term raises `TermLost` and changes nothing.
None runs the verb without leadership, which is always safe: all of them are idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..model.binding import Binding, Release
from ..model.ended import EndedPage
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
    """A durable store of jobs that decides which job starts next."""

    @property
    def wakeups(self) -> Wakeups:
        """The wake-ups of this store. Verbs publish theirs after their effects are durable."""

    # -- sessions --------------------------------------------------------------------------------------------

    async def register(self, session: NewSession) -> Session:
        """Register a session, and assign an index to a worker.

        A named index that a live session holds: on the same host the new session takes over the index and its
        bindings, and the old one is dead (its jobs are taken back as after a crash); on another host it raises
        `IndexTaken`. Without a named index the worker gets the lowest free one of the pool. A new worker receives the
        sticky jobs that waited for a worker, and the broadcasts whose time to join is not over. `tasks` are stored as
        one set that all sessions with the same tasks share. Repeating the call with the same id returns the same
        session and renews the lease; the id of a session that has ended or is dead raises `SessionLost`.
        """

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        """Extend the lease, and reconcile the session's jobs with the records.

        `held` names every job that the session runs or whose end has not been confirmed to it; `claim` is the number
        of the last claim whose reply it received. Jobs recorded under that or a lower number and not named are taken
        back, uncharged. `stopping` (permanent) means no more claims and no more bindings. Raises `SessionLost` once
        the session has ended or was declared dead. Turns are not claimed, so they are never taken back.
        """

    async def leave(self, session: str, *, begun: Sequence[Held] | None = None) -> None:
        """End a session. Its jobs are taken back: those in `begun` as after a crash, the others uncharged.

        For a process that stops (`begun` empty) and for a supervisor whose child died. None treats all jobs as
        begun. Its turns are cancelled. An automatic index loses its bindings immediately; a named one keeps them
        until the lease would have ended. Leaving twice is harmless; an unknown session raises `NotFound`.
        """

    # -- jobs ------------------------------------------------------------------------------------------------

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store up to 1,000 jobs, all or none, and admit those that are due.

        Where several calls meet at one queue, the next call that looks at it may admit them instead: a claim, an
        enqueue or `admit`. Until then a job has no arrival. Calls that follow each other arrive in their order.

        A known id with the same content returns ``created=False``; with other content it raises `Conflict`. A
        `unique` value held by another job of the same task returns that job. Raises `QueueFull` (with
        `fairlane.model.reading.room_after` as its `retry_after`), and `InvalidInput` for a lane outside a closed
        set, a turn in a lane without a limit, or a turn whose waiter is not live.
        """

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        """Start jobs for a worker: ask by ask, at most `total`, in fair order within each source.

        Slots, reservations, the queue limit, lane grants, bindings and pauses are decided in one step; jobs past
        their expiry are cancelled instead. A number is used up once it has started jobs: repeating the last one
        returns those of its jobs that the session still holds, and a lower one raises `Stale`. An empty result
        leaves no trace, so that idle polling writes nothing; its number may be used again. Raises `SessionLost`.

        The result contains at most `claim.most_bytes`: the first job beyond it ends the claim, unless it is the only
        one. A job whose record cannot be read is failed as `bad_payload` and is not in the result; it blocks no other
        job. If the result would be empty because of it, either the jobs behind it were searched, or the queues of the
        asks are announced in this process as if a job had arrived.
        """

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        """Apply a session's decisions about jobs it holds, each fenced by (job, fence, session), then claim.

        A finished job passes its grant on in the same step. A transition that the session already wrote under this
        fence returns the stored outcome; one for a job it lost is `stale`, changes nothing but the count of refused
        writes, and never raises. When a cancel was requested, a completion stays completed and everything else
        becomes cancelled.

        A retry because the process of the run died (`Reason.CRASHED`) counts as a crash and makes the job a suspect,
        as `rescue` does; any other retry and a snooze end the suspicion. Hand-backs are not charged,
        `states.MOST_HAND_BACKS` times in a row: with the last of them the job becomes a suspect, and every further
        one is charged like a crash, until a run ends otherwise. A take-back is for a claim that never began: it is
        never charged and changes nothing else. A job that has started no longer expires.

        The `payload` of a retry or a snooze replaces that of the job in the same step, also for `as_new`; not when
        the write is stale or the job becomes cancelled. The id still stands for the content that was enqueued:
        repeating that enqueue returns ``created=False``, and the new payload under this id is a `Conflict`.

        A declined job is returned like one that is taken back, but offered only to sessions that know its task or do
        not declare their tasks. A job that only this worker can run, or that was already waiting for such sessions, is
        scheduled after `states.decline_delay` of the time since its first decline. Once its patience is over, a
        decline fails it; a run that began in between makes the next decline a first one again. Of consecutive declines
        the history keeps the first and the last.

        Expired sessions may finish; writes of dead ones are stale. With `claim`, it claims afterwards as `claim` does;
        if that raises, nothing of the call was applied.
        """

    async def progress(self, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
        """Store the latest progress of running jobs, fenced like `finish`."""

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        """Cancel jobs, and return the state each is in now.

        A waiting job is `cancelled` immediately. For a `running` one a cancel is requested: it keeps its slot, lane
        and count until its run has really ended. A final one stays as it is. An unknown id raises `NotFound`, and
        nothing is cancelled. Cancelling a broadcast cancels its children.
        """

    async def forget(self, ids: Sequence[str], retention: Retention) -> list[bool]:
        """Delete up to 1,000 final jobs, and return for each whether this call deleted it.

        False: it is waiting or running, it is unknown, or another process is writing to it at this moment. Its id
        stays taken as after `prune`: for `id_seconds` of the retention after the job ended, and the id of a retry
        for as long as failed jobs are kept. Counts of ended jobs do not change.
        """

    async def release(self, pool: str, key: str, cleanup: NewJob | None = None) -> Release:
        """Release a sticky key: the clean-up runs first and alone, then the key is released. Repeating changes nothing.

        `cleanup` (of kind `cleanup`) runs on the bound worker once no other job of the key is pending,
        running or retrying. A job of the key that arrives before it starts cancels it and re-opens the
        binding.
        """

    # -- the leader's passes ---------------------------------------------------------------------------------

    async def promote(self, *, limit: int = 1_000, term: int | None = None) -> Promoted:
        """Process time: due jobs arrive, ordered by class, due time and id; expired ones are cancelled."""

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        """Admit jobs that were committed in a user's transaction, bind unbound sticky jobs, and repair grants.

        Declined jobs whose patience is over are offered to every session again. In an unordered lane a grant that is
        held unclaimed for 2 s by a job whose bound worker cannot take it moves to the next job that can run.
        """

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        """Declare sessions whose lease has expired dead (only if `declare`), and take back the jobs of dead sessions.

        Every running job whose session is dead or missing is retried while its budget lasts, otherwise failed as
        `crashed`; turns are cancelled. Bindings of workers that are gone are closed as lost, their waiting jobs are
        bound to other workers, and their clean-ups are cancelled.
        """

    async def prune(self, retention: Retention, *, limit: int = 1_000, term: int | None = None) -> Pruned:
        """Delete everything whose retention is over."""

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        """Stand for leadership (`term` None), or extend the session's term.

        Standing returns the term that is current afterwards: a new, higher one of this session if there was no leader;
        its own if the session leads already (its reply was lost); otherwise that of the leader, unchanged, with what
        remains of it. So a standby knows when to try again. Extending returns the same term, or None once it has ended,
        even if no other session leads since. The session need not be registered.
        """

    async def resign(self, term: int) -> None:
        """End a term immediately. A term that is not the current one is left alone."""

    # -- settings --------------------------------------------------------------------------------------------

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        """Declare or override settings of queues. A lower version than the stored one is ignored.

        Changes take effect in the same step: lowering a lane's limit revokes unstarted grants, newest first;
        raising it grants places immediately. Pausing is a setting.
        """

    async def declare(self, schedules: Sequence[Schedule]) -> list[StoredSchedule]:
        """Store schedules, or refresh the known ones; returns all schedules, with the store's clock (`now`).

        A changed timetable counts as newly stored: no slot from before the change fires.
        """

    async def add_token(self, token: NewToken) -> AccessToken:
        """Store a token of the HTTP service, and return it with its times by the store's clock.

        Storing the same token again returns the same; another digest under its id raises `Conflict`.
        """

    async def revoke_token(self, id: str) -> bool:
        """Revoke a token permanently. False if it was revoked before; an unknown id raises `NotFound`."""

    # -- reading ---------------------------------------------------------------------------------------------

    async def schedules(self) -> list[StoredSchedule]:
        """Every schedule that was ever declared, ordered by name."""

    async def leader(self) -> Term | None:
        """The current term; None if there is no leader."""

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        """Jobs with their history; None for unknown ids. A damaged record is returned as far as it can be read."""

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        """A page of jobs, newest first."""

    async def positions(self, ids: Sequence[str]) -> list[JobPosition | None]:
        """The positions of jobs in line and what they wait for; None for jobs that do not wait and for unknown ids."""

    async def queues(self) -> list[QueueReading]:
        """Every queue that has settings or ever had a job, ordered by name."""

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        """The lanes of a queue that have work, the longest backlog first. An unknown queue raises `NotFound`.

        The result is a list with a `cursor` for the next page. Where lanes are sampled, paging is approximate and ends
        after `listings.LANES_PAGED` lanes; `exact` is False then.
        """

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        """The jobs of a lane in the order in which they start: the running ones, then the waiting ones.

        None is the line of the jobs without a lane. In an ordered lane jobs are ordered by arrival, elsewhere by class,
        then arrival. Jobs that are not due yet are not in line, except for a retry in an ordered lane. The cost of a
        page depends on its length and the running jobs, not on the backlog. An unknown queue raises `NotFound`; a lane
        without work is an empty page.
        """

    async def declined(self, *, limit: int = 100) -> list[DeclinedTask]:
        """Tasks whose jobs wait because workers declined them, the longest waiting first."""

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        """Failed jobs that are still kept, grouped by task and error group, the largest group first.

        The newest `listings.MOST_FAILURES` failed jobs, of the queue if one is given, are examined; if there are more,
        `exact` of the groups is False. An unknown queue or task has no groups.
        """

    async def ended(self, after: str | None, *, limit: int = 1_000) -> EndedPage:
        """Jobs that ended as failed or cancelled since a page of this feed was read, oldest end first.

        `after` is the cursor of that page, in any process and however long ago. None begins at the present: the page is
        empty, and its cursor leads to what ends from now on. Every way to end counts, and every kind of job: the parent
        and the copies of a broadcast, turns and clean-ups too. Completed jobs do not appear.

        At least once: no job is left out because its end became visible later than that of a job that ended after it,
        or because the clock was set back by less than a minute. A job may be returned again: when its record was
        written to since, when another transaction was open on the server at the time of the last read (PostgreSQL), and
        when the store went back to an earlier state, which returns all of them again. A job that is pruned or forgotten
        before it is read is left out, and a record that cannot be read is omitted.

        A page has at most `limit` jobs, 1,000 at most, and fewer if their errors are long; `more` says whether to read
        on at once. The cost of a page depends on its length and, on PostgreSQL, on the number of queues and on the jobs
        that ended in the last minute; never on how many have ended. `InvalidInput` for a cursor of another store.
        """

    async def sessions(self) -> list[Session]:
        """Every session that retention still keeps, the newest first."""

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        """Bindings, open ones first, then the latest."""

    async def tokens(self) -> list[AccessToken]:
        """Every token, the oldest first, including revoked and expired ones."""

    # -- the store itself ------------------------------------------------------------------------------------

    async def recount(self) -> Recount:
        """Recompute all derived data from the job records, correct differences, and report them.

        A live job whose identity is missing gets a placeholder, and one whose record cannot be read is ended.
        """

    async def migrate(self) -> int:
        """Bring the schema up to date and return its version. Running it twice, even at once, is harmless."""

    async def close(self) -> None:
        """Release all resources. Closing twice is harmless."""
