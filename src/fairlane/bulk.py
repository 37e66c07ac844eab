"""Operations on many jobs: retry, cancel, purge. The command line, HTTP and the client all use this module.

An operation reads the selected jobs page by page, newest first, and changes each page with one or two calls to the
store. It keeps one page in memory and nothing in the store, so a million jobs take more time but no more memory. It may
be interrupted at any point and repeated: the id of a retry is derived from the id of the job it retries, so the store
does not create a second one, and cancelled or deleted jobs are not found again. Jobs sent meanwhile are newer than the
first page and are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypedDict

import msgspec

from .errors import Conflict, InvalidInput, NotFound
from .model.ids import retry_id
from .model.job import WAITING_STATES, Enqueued, Job, JobKind, JobState, NewJob
from .model.maintenance import Retention
from .model.names import check_count, check_seconds
from .model.reading import MOST_PER_PAGE, Filter
from .store.port import Store
from .task import Seconds, seconds

FIRST_PAGE = 50
LARGE_PAGE = 4 * 1024 * 1024
"""If a page of jobs has more bytes than this, the next page is shorter; below a quarter of it, longer."""
SHOWN_JOBS = 10
REPEATABLE = (JobKind.JOB, JobKind.BROADCAST)
LIVE_STATES = (JobState.SCHEDULED, JobState.PENDING, JobState.RUNNING)
FINAL_STATES = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class JobSelection(TypedDict, total=False):
    """Which jobs an operation applies to; a missing field matches every job. Ages count from when a job was sent."""

    state: JobState | None
    queue: str | None
    lane: str | None
    """Requires the queue."""
    task: str | None
    sticky: str | None
    worker: str | None
    error_group: str | None
    older_than: Seconds | None
    newer_than: Seconds | None


class Unchanged(StrEnum):
    """Why a selected job was not changed."""

    ALREADY_RETRIED = "already_retried"
    UNIQUE_TAKEN = "unique_taken"
    """Another job of its task holds its unique value."""
    NOT_REPEATABLE = "not_repeatable"
    """A turn or a clean-up, which cannot be run again."""
    REFUSED = "refused"
    """The settings of its queue no longer allow it; `Bulk.refusal` has the first reason."""
    ALREADY_REQUESTED = "already_requested"
    """It is running, and a cancel was requested before."""
    TOO_LATE = "too_late"
    """It ended, or started, before the change was made."""
    GONE = "gone"
    """It was deleted meanwhile, or another process is writing to it at this moment."""


class Bulk(msgspec.Struct, kw_only=True):
    """What an operation found and changed, so far or in total."""

    matched: int = 0
    changed: int = 0
    """Retried, cancelled or deleted. 0 in a dry run."""
    requested: int = 0
    """For a cancel: running jobs for which a cancel was requested."""
    unchanged: dict[Unchanged, int] = {}
    """Why jobs were not changed. In a dry run of a retry: the jobs that were already retried or cannot be."""
    refusal: str | None = None
    more: bool = False
    """Whether it stopped because it had examined `most` jobs."""
    dry_run: bool = False
    sample: tuple[Job, ...] = ()
    """The first jobs of the selection."""


OnBulk = Callable[[Bulk], None]
"""Called after each page with the result so far."""


class BulkOptions(JobSelection, total=False):
    """The options of an operation: which jobs, and how."""

    dry_run: bool
    """Change nothing; only count the jobs and return a sample."""
    progress: OnBulk | None
    most: int | None
    """Examine at most this many jobs."""


class PurgeOptions(BulkOptions, total=False):
    """The options of a purge."""

    cancel_waiting: bool
    """Also delete waiting jobs; they are cancelled first."""


class _SelectedJobs:
    """Pages of the selected jobs, state by state."""

    def __init__(self, selection: JobSelection, states: Sequence[JobState], now: float) -> None:
        self._after = _time_of_age("newer_than", selection.get("newer_than"), now)
        self._until = _time_of_age("older_than", selection.get("older_than"), now)
        if self._after is not None and self._until is not None and self._after >= self._until:
            raise InvalidInput("newer_than", "must be greater than older_than; no job can match both")
        self._filters = [
            Filter(
                state=state,
                queue=selection.get("queue"),
                lane=selection.get("lane"),
                task=selection.get("task"),
                sticky=selection.get("sticky"),
                worker=selection.get("worker"),
                error_group=selection.get("error_group"),
            )
            for state in states
        ]

    async def pages(self, store: Store) -> AsyncIterator[list[Job]]:
        """The matching jobs, newest first within each state."""
        for where in self._filters:
            cursor: str | None = None
            size = FIRST_PAGE
            while True:
                page = await store.find(where, limit=size, cursor=cursor)
                yield [job for job in page.jobs if self._matches(job)]
                cursor = page.cursor
                # Pages are ordered by the store's numbers, and the clocks of machines may differ a little: only when a
                # whole page is too old are all further pages too old as well.
                old = self._after is not None and all(job.enqueued_at <= self._after for job in page.jobs)
                if cursor is None or old:
                    break
                size = _next_size(size, page.jobs)

    def _matches(self, job: Job) -> bool:
        if self._after is not None and job.enqueued_at <= self._after:
            return False
        return self._until is None or job.enqueued_at <= self._until


def _time_of_age(field: str, age: Seconds | None, now: float) -> float | None:
    return None if age is None else now - check_seconds(field, seconds(field, age))


def _next_size(size: int, jobs: Sequence[Job]) -> int:
    """The size of the next page. Pages are bounded by bytes too: a job may have a payload, a result and errors."""
    held = sum(len(job.payload) + len(job.result or b"") + len(job.error or "") for job in jobs)
    if held > LARGE_PAGE:
        return max(1, size // 2)
    return min(2 * size, MOST_PER_PAGE) if held < LARGE_PAGE // 4 else size


class _BulkRun:
    """One run of an operation: reads pages, counts and reports progress."""

    def __init__(self, store: Store, options: BulkOptions, states: Sequence[JobState], now: float) -> None:
        self._store = store
        self._selected = _SelectedJobs(options, states, now)
        most = options.get("most")
        self._most = most if most is None else check_count("most", most, least=1)
        self._progress = options.get("progress")
        self._unchanged: Counter[Unchanged] = Counter()
        self.totals = Bulk(dry_run=options.get("dry_run", False))
        self.seen: set[str] = set()
        """Jobs for which a cancel was requested; they may be found a second time among the running jobs."""

    def skip(self, why: Unchanged, count: int = 1) -> None:
        """Count jobs that were not changed."""
        if count:
            self._unchanged[why] += count

    def refuse(self, why: Unchanged, reason: str) -> None:
        """Count a job that the store rejected, and keep the first reason."""
        self.skip(why)
        self.totals.refusal = self.totals.refusal or reason

    async def run(self, change: Step, examine: Step | None = None) -> Bulk:
        """Read all pages and apply `change` to each; in a dry run `examine`, which only counts."""
        totals = self.totals
        async for page in self._selected.pages(self._store):
            jobs = [job for job in page if job.id not in self.seen] if self.seen else page
            left = len(jobs) if self._most is None else self._most - totals.matched
            if left < len(jobs):
                jobs, totals.more = jobs[:left], True
            totals.matched += len(jobs)
            totals.sample = (*totals.sample, *jobs[: SHOWN_JOBS - len(totals.sample)])
            step = examine if totals.dry_run else change
            if jobs and step is not None:
                await step(self, jobs)
            if self._progress is not None:
                self._progress(self.report())
            if totals.more:
                break
        return self.report()

    def report(self) -> Bulk:
        """A copy of the totals so far."""
        return msgspec.structs.replace(self.totals, unchanged=dict(self._unchanged))


Step = Callable[[_BulkRun, Sequence[Job]], Awaitable[None]]

# -- the verbs -------------------------------------------------------------------------------------------------------


Send = Callable[[Sequence[NewJob]], Awaitable[list[Enqueued]]]


class Bulks:
    """Operations on many jobs of one store. `send` stores retries, so that they get the same headers as any other
    enqueue of the client; ages are relative to `now`.
    """

    def __init__(self, store: Store, send: Send, *, now: float) -> None:
        self._store = store
        self._send = send
        self._now = now

    async def retry(self, options: BulkOptions) -> Bulk:
        """Run final jobs again; failed ones unless `state` is given."""
        state = options.get("state") or JobState.FAILED
        if not state.final:
            raise InvalidInput("state", f"a {state.value} job has not ended; only jobs that have ended can be retried")
        return await _BulkRun(self._store, options, [state], self._now).run(self._retry, self._count_retries)

    async def cancel(self, options: BulkOptions) -> Bulk:
        """Cancel waiting jobs and request a cancel of running ones."""
        state = options.get("state")
        if state is not None and state.final:
            raise InvalidInput("state", f"a {state.value} job has already ended and cannot be cancelled")
        # In the order in which a job passes through the states, so that no job is missed.
        states = LIVE_STATES if state is None else (state,)
        return await _BulkRun(self._store, options, states, self._now).run(self._cancel)

    async def purge(self, options: PurgeOptions, retention: Retention) -> Bulk:
        """Delete final jobs, and with `cancel_waiting` also waiting ones, which are cancelled first."""
        state, cancel_waiting = options.get("state"), options.get("cancel_waiting", False)
        if state is JobState.RUNNING:
            raise InvalidInput("state", "a running job cannot be purged; cancel it, and purge it once it has ended")
        if state in WAITING_STATES and not cancel_waiting:
            raise InvalidInput("state", f"a {state} job has not ended; cancel it first, or set cancel_waiting")
        states = (*((JobState.SCHEDULED, JobState.PENDING) if cancel_waiting else ()), *FINAL_STATES)

        async def forget(run: _BulkRun, jobs: Sequence[Job]) -> None:
            await self._cancelled([job.id for job in jobs if not job.state.final])
            gone = await self._store.forget([job.id for job in jobs], retention)
            run.totals.changed += sum(gone)
            late = sum(not done and not job.state.final for job, done in zip(jobs, gone, strict=True))
            run.skip(Unchanged.TOO_LATE, late)
            run.skip(Unchanged.GONE, len(gone) - sum(gone) - late)

        return await _BulkRun(self._store, options, states if state is None else (state,), self._now).run(forget)

    # -- one page --------------------------------------------------------------------------------------------------

    async def _count_retries(self, run: _BulkRun, jobs: Sequence[Job]) -> None:
        """Count the jobs that a retry would not change. A retry that was deleted since is not seen."""
        ids = [job.id for job in jobs if job.kind in REPEATABLE]
        run.skip(Unchanged.NOT_REPEATABLE, len(jobs) - len(ids))
        run.skip(Unchanged.ALREADY_RETRIED, len(await retried(self._store, ids)))

    async def _retry(self, run: _BulkRun, jobs: Sequence[Job]) -> None:
        again = [job.as_new(retry_id(job.id)) for job in jobs if job.kind in REPEATABLE]
        run.skip(Unchanged.NOT_REPEATABLE, len(jobs) - len(again))
        if not again:
            return
        try:
            answers = await self._send(again)
        except (Conflict, InvalidInput):
            # At least one was rejected: send them one by one, so that the others are stored.
            for new in again:
                try:
                    self._count_retried(run, [new], await self._send([new]))
                except (Conflict, InvalidInput) as exc:
                    run.refuse(Unchanged.REFUSED, str(exc))
            return
        self._count_retried(run, again, answers)

    @staticmethod
    def _count_retried(run: _BulkRun, asked: Sequence[NewJob], answers: Sequence[Enqueued]) -> None:
        for new, answer in zip(asked, answers, strict=True):
            if answer.created:
                run.totals.changed += 1
            else:
                run.skip(Unchanged.ALREADY_RETRIED if answer.id == new.id else Unchanged.UNIQUE_TAKEN)

    async def _cancel(self, run: _BulkRun, jobs: Sequence[Job]) -> None:
        asked = [job.id for job in jobs if not job.cancel_requested]
        run.skip(Unchanged.ALREADY_REQUESTED, len(jobs) - len(asked))
        for id, state in zip(asked, await self._cancelled(asked), strict=True):
            if state is JobState.CANCELLED:
                run.totals.changed += 1
            elif state is JobState.RUNNING:
                run.totals.requested += 1
                run.seen.add(id)
            else:
                run.skip(Unchanged.GONE if state is None else Unchanged.TOO_LATE)

    async def _cancelled(self, ids: Sequence[str]) -> list[JobState | None]:
        """Cancel jobs and return their states; None for a deleted one. The store accepts all or none of a call, so
        an unknown id means cancelling them one by one.
        """
        try:
            return list(await self._store.cancel(ids)) if ids else []
        except NotFound:
            if len(ids) == 1:
                return [None]
            return [state for id in ids for state in await self._cancelled([id])]


async def retried(store: Store, ids: Sequence[str]) -> set[str]:
    """Which of these jobs have a retry that is still stored, by a selection or one by one."""
    found: set[str] = set()
    # In short batches: a retry may have a large result.
    for start in range(0, len(ids), FIRST_PAGE):
        some = ids[start : start + FIRST_PAGE]
        retries = await store.get([retry_id(id) for id in some])
        found.update(id for id, retry in zip(some, retries, strict=True) if retry is not None)
    return found
