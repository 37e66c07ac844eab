"""Changes of many jobs at once: retry, cancel, purge. The command line and every other edge use this one module.

A bulk verb walks over what a selection finds, newest first, page by page, and changes each page in one or two calls of
the store. It holds one page in memory and nothing in the store, so a million jobs take time and no more. It may be
interrupted anywhere and repeated: a retry has an id made of the id of the job it retries, so the store refuses the
second one; what is cancelled or forgotten is not found again. Jobs that are sent meanwhile are newer than where it
began, and are left alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypedDict

import msgspec

from .errors import Conflict, InvalidInput, NotFound
from .model.job import WAITING_STATES, Enqueued, Job, JobKind, JobState, NewJob
from .model.maintenance import Retention
from .model.names import check_count, check_seconds
from .model.reading import MOST_PER_PAGE, Filter
from .store.port import Store
from .task import Seconds, seconds

FIRST_PAGE = 50
LARGE_PAGE = 4 * 1024 * 1024
"""Bytes of a page of jobs beyond which the next one is shorter; below a quarter of it the next one is longer."""
SHOWN_JOBS = 10
REPEATABLE = (JobKind.JOB, JobKind.BROADCAST)
LIVE_STATES = (JobState.SCHEDULED, JobState.PENDING, JobState.RUNNING)
FINAL_STATES = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class Which(TypedDict, total=False):
    """Which jobs a bulk verb is about; what is left out does not matter. Ages count from when a job was sent."""

    state: JobState | None
    queue: str | None
    lane: str | None
    """Needs the queue beside it."""
    task: str | None
    sticky: str | None
    worker: str | None
    error_group: str | None
    older_than: Seconds | None
    newer_than: Seconds | None


class Unchanged(StrEnum):
    """Why a job that was selected is not changed."""

    ALREADY_RETRIED = "already_retried"
    UNIQUE_TAKEN = "unique_taken"
    """Another job of its task holds its unique value."""
    NOT_REPEATABLE = "not_repeatable"
    """A turn or a clean-up: there is no code to run again."""
    REFUSED = "refused"
    """The settings of its queue do not take it any more; `Bulk.refusal` has the first reason."""
    ALREADY_REQUESTED = "already_requested"
    """It runs and was asked to stop before."""
    TOO_LATE = "too_late"
    """It ended, or began, before the change came."""
    GONE = "gone"
    """It was forgotten meanwhile, or is written about at this moment."""


class Bulk(msgspec.Struct, kw_only=True):
    """What a bulk verb found and did, so far or in all."""

    matched: int = 0
    changed: int = 0
    """Retried, cancelled or forgotten. 0 in a dry run."""
    requested: int = 0
    """Of a cancel: running jobs that were asked to stop."""
    unchanged: dict[Unchanged, int] = {}
    refusal: str | None = None
    more: bool = False
    """It ended because as many as were wanted had been looked at."""
    dry_run: bool = False
    sample: tuple[Job, ...] = ()
    """The first jobs of the selection."""


OnBulk = Callable[[Bulk], None]
"""Called after each page with what was found and done so far."""


class BulkOptions(Which, total=False):
    """What a bulk verb takes: which jobs, and how."""

    dry_run: bool
    """Change nothing; say how many there are, and show some."""
    progress: OnBulk | None
    most: int | None
    """Look at no more jobs than this."""


class PurgeOptions(BulkOptions, total=False):
    """The same for a purge."""

    cancel_waiting: bool
    """Also what waits: it is cancelled first."""


class _Selection:
    """The jobs that are asked for: pages of them, state by state."""

    def __init__(self, which: Which, states: Sequence[JobState], now: float) -> None:
        self._after = _moment("newer_than", which.get("newer_than"), now)
        self._until = _moment("older_than", which.get("older_than"), now)
        if self._after is not None and self._until is not None and self._after >= self._until:
            raise InvalidInput("newer_than", "must be more than older_than: no job is in between")
        self._filters = [
            Filter(
                state=state,
                queue=which.get("queue"),
                lane=which.get("lane"),
                task=which.get("task"),
                sticky=which.get("sticky"),
                worker=which.get("worker"),
                error_group=which.get("error_group"),
            )
            for state in states
        ]

    async def pages(self, store: Store) -> AsyncIterator[list[Job]]:
        """What fits, newest first within each state."""
        for where in self._filters:
            cursor: str | None = None
            size = FIRST_PAGE
            while True:
                page = await store.find(where, limit=size, cursor=cursor)
                yield [job for job in page.jobs if self._fits(job)]
                cursor = page.cursor
                # The order is that of the store's numbers, and clocks of different machines may disagree a little: a
                # whole page must be too old before the rest is.
                old = self._after is not None and all(job.enqueued_at <= self._after for job in page.jobs)
                if cursor is None or old:
                    break
                size = _next_size(size, page.jobs)

    def _fits(self, job: Job) -> bool:
        if self._after is not None and job.enqueued_at <= self._after:
            return False
        return self._until is None or job.enqueued_at <= self._until


def _moment(field: str, age: Seconds | None, now: float) -> float | None:
    return None if age is None else now - check_seconds(field, seconds(field, age))


def _next_size(size: int, jobs: Sequence[Job]) -> int:
    """Pages are bounded by bytes too: each job may have a payload, a result and errors."""
    held = sum(len(job.payload) + len(job.result or b"") + len(job.error or "") for job in jobs)
    if held > LARGE_PAGE:
        return max(1, size // 2)
    return min(2 * size, MOST_PER_PAGE) if held < LARGE_PAGE // 4 else size


class _Walk:
    """One run of a bulk verb: pages, counts and reports."""

    def __init__(self, store: Store, options: BulkOptions, states: Sequence[JobState], now: float) -> None:
        self._store = store
        self._selection = _Selection(options, states, now)
        most = options.get("most")
        self._most = most if most is None else check_count("most", most, least=1)
        self._progress = options.get("progress")
        self._unchanged: Counter[Unchanged] = Counter()
        self.told = Bulk(dry_run=options.get("dry_run", False))
        self.seen: set[str] = set()
        """Jobs that were asked to stop, which may be found a second time among those that run."""

    def skip(self, why: Unchanged, count: int = 1) -> None:
        """So many jobs stay as they are."""
        if count:
            self._unchanged[why] += count

    def refuse(self, why: Unchanged, reason: str) -> None:
        """One job stays as it is, for a reason that the store gave."""
        self.skip(why)
        self.told.refusal = self.told.refusal or reason

    async def run(self, change: Callable[[_Walk, Sequence[Job]], Awaitable[None]]) -> Bulk:
        """Walk, and change each page."""
        told = self.told
        async for page in self._selection.pages(self._store):
            jobs = [job for job in page if job.id not in self.seen] if self.seen else page
            left = len(jobs) if self._most is None else self._most - told.matched
            if left < len(jobs):
                jobs, told.more = jobs[:left], True
            told.matched += len(jobs)
            told.sample = (*told.sample, *jobs[: SHOWN_JOBS - len(told.sample)])
            if jobs and not told.dry_run:
                await change(self, jobs)
            if self._progress is not None:
                self._progress(self.report())
            if told.more:
                break
        return self.report()

    def report(self) -> Bulk:
        """What was done so far, as a value of its own."""
        return msgspec.structs.replace(self.told, unchanged=dict(self._unchanged))


# -- the verbs -------------------------------------------------------------------------------------------------------


Send = Callable[[Sequence[NewJob]], Awaitable[list[Enqueued]]]


class Bulks:
    """The bulk verbs on one store. `send` stores retries, so that they carry what every enqueue of a client carries;
    `now` is the moment from which ages count.
    """

    def __init__(self, store: Store, send: Send, *, now: float) -> None:
        self._store = store
        self._send = send
        self._now = now

    async def retry(self, options: BulkOptions) -> Bulk:
        """Run final jobs once more; failed ones, unless the state says otherwise."""
        state = options.get("state") or JobState.FAILED
        if not state.final:
            raise InvalidInput("state", f"a {state.value} job has not ended; only one that has can be run again")
        return await _Walk(self._store, options, [state], self._now).run(self._retry)

    async def cancel(self, options: BulkOptions) -> Bulk:
        """Cancel jobs that wait and ask those that run to stop."""
        state = options.get("state")
        if state is not None and state.final:
            raise InvalidInput("state", f"a {state.value} job has ended, so there is nothing to cancel")
        # In the order in which a job goes through them, so that none slips past.
        states = LIVE_STATES if state is None else (state,)
        return await _Walk(self._store, options, states, self._now).run(self._cancel)

    async def purge(self, options: PurgeOptions, retention: Retention) -> Bulk:
        """Forget jobs that are final, and with `cancel_waiting` also those that wait, which are cancelled first."""
        state, cancel_waiting = options.get("state"), options.get("cancel_waiting", False)
        if state is JobState.RUNNING:
            raise InvalidInput("state", "a running job cannot be forgotten; cancel it, and purge when it has ended")
        if state in WAITING_STATES and not cancel_waiting:
            raise InvalidInput(
                "state", f"a {state} job has not ended; cancel it first, or ask to cancel what waits (cancel_waiting)"
            )
        states = (*((JobState.SCHEDULED, JobState.PENDING) if cancel_waiting else ()), *FINAL_STATES)

        async def forget(walk: _Walk, jobs: Sequence[Job]) -> None:
            await self._cancelled([job.id for job in jobs if not job.state.final])
            gone = await self._store.forget([job.id for job in jobs], retention)
            walk.told.changed += sum(gone)
            late = sum(not done and not job.state.final for job, done in zip(jobs, gone, strict=True))
            walk.skip(Unchanged.TOO_LATE, late)
            walk.skip(Unchanged.GONE, len(gone) - sum(gone) - late)

        return await _Walk(self._store, options, states if state is None else (state,), self._now).run(forget)

    # -- one page --------------------------------------------------------------------------------------------------

    async def _retry(self, walk: _Walk, jobs: Sequence[Job]) -> None:
        again = [job.as_new(retry_id(job.id)) for job in jobs if job.kind in REPEATABLE]
        walk.skip(Unchanged.NOT_REPEATABLE, len(jobs) - len(again))
        if not again:
            return
        try:
            answers = await self._send(again)
        except (Conflict, InvalidInput):
            # One of them is not taken; the others are.
            for new in again:
                try:
                    self._count_retried(walk, [new], await self._send([new]))
                except (Conflict, InvalidInput) as exc:
                    walk.refuse(Unchanged.REFUSED, str(exc))
            return
        self._count_retried(walk, again, answers)

    @staticmethod
    def _count_retried(walk: _Walk, asked: Sequence[NewJob], answers: Sequence[Enqueued]) -> None:
        for new, answer in zip(asked, answers, strict=True):
            if answer.created:
                walk.told.changed += 1
            else:
                walk.skip(Unchanged.ALREADY_RETRIED if answer.id == new.id else Unchanged.UNIQUE_TAKEN)

    async def _cancel(self, walk: _Walk, jobs: Sequence[Job]) -> None:
        asked = [job.id for job in jobs if not job.cancel_requested]
        walk.skip(Unchanged.ALREADY_REQUESTED, len(jobs) - len(asked))
        for id, state in zip(asked, await self._cancelled(asked), strict=True):
            if state is JobState.CANCELLED:
                walk.told.changed += 1
            elif state is JobState.RUNNING:
                walk.told.requested += 1
                walk.seen.add(id)
            else:
                walk.skip(Unchanged.GONE if state is None else Unchanged.TOO_LATE)

    async def _cancelled(self, ids: Sequence[str]) -> list[JobState | None]:
        """The states of jobs after a cancel; None for one that is gone. The store takes all or none of a call."""
        try:
            return list(await self._store.cancel(ids)) if ids else []
        except NotFound:
            if len(ids) == 1:
                return [None]
            return [state for id in ids for state in await self._cancelled([id])]


def retry_id(id: str) -> str:
    """The id of the retry of a job by a bulk verb: the same each time, so that repeating it makes no second one."""
    return f"retry-{hashlib.sha256(id.encode()).hexdigest()[:32]}"
