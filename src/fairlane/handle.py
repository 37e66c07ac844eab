"""Handles: one job as its client sees it. A handle is an id and a way to the store; it remembers nothing of the job.

Verbs raise `NotFound` for an id the store does not know, except `position` and `eta`, which are None for whatever does
not wait. Times shown are the store's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from .errors import InvalidInput, JobCancelled, JobFailed, NotFound, StoreUnavailable, WouldDeadlock
from .model import codec, foreign_words
from .model.ids import new_id
from .model.job import WAITING_STATES, Job, JobKind, JobState
from .model.names import check_seconds
from .model.reading import JobPosition
from .runtime.connection import Connection
from .runtime.job_watcher import Watch
from .runtime.running_job import places_held
from .store.port import Store

R = TypeVar("R")
ReadResult = Callable[[bytes | None], R]


class Position(msgspec.Struct, frozen=True):
    """Where a waiting job is in line."""

    ahead: int
    """Jobs of its lane that go before it."""
    place: int
    """1 for the next of its lane."""
    of: int
    """Waiting jobs of its lane; never less than `place`."""
    exact: bool
    """False where the jobs before it were not counted to the end: `place` and `ahead` are lower bounds."""
    eta: float | None
    """Seconds until it starts, as far as can be told; None says that it cannot."""
    queue_ahead: int
    """An estimate of the jobs of its whole queue that start before it."""
    of_exact: bool = True
    """False where the jobs of its lane were not counted to the end: `of` is a lower bound."""

    def same_place(self, other: Position | None) -> bool:
        """Whether nothing but the estimate differs, which moves as time passes."""
        return other is not None and self == msgspec.structs.replace(other, eta=self.eta)


class Update(msgspec.Struct, frozen=True):
    """What `watch()` tells: the state, the place of a job that waits, and what the body reported last."""

    state: JobState
    position: Position | None
    progress: Any

    def tells_nothing_new(self, last: Update | None) -> bool:
        """Whether `last` told the same."""
        if last is None or (self.state, self.progress) != (last.state, last.progress):
            return False
        return self.position is last.position or (self.position is not None and self.position.same_place(last.position))


class Cancellation(StrEnum):
    """The answer to `cancel`."""

    CANCELLED = "cancelled"
    """It will not run, or has ended as cancelled."""
    REQUESTED = "requested"
    """It runs and was asked to stop; if its body returns all the same, it will be completed."""
    COMPLETED = "completed"
    """Too late: it has ended."""
    FAILED = "failed"
    """Too late: it has ended."""


def cancellation(state: JobState) -> Cancellation:
    """What it means that a job is in `state` after it was cancelled."""
    return Cancellation.REQUESTED if state is JobState.RUNNING else Cancellation(state.value)


class Handle(Generic[R]):
    """A job that was sent. Its result is of the type that the task's function returns."""

    __slots__ = ("_connection", "_created", "_id", "_read_result")

    def __init__(self, connection: Connection, id: str, read_result: ReadResult[R], created: bool = True) -> None:
        self._connection = connection
        self._id = id
        self._read_result = read_result
        self._created = created

    @property
    def id(self) -> str:
        """The job's id."""
        return self._id

    @property
    def created(self) -> bool:
        """Whether the call that gave this handle made the job; False when it existed already."""
        return self._created

    async def job(self) -> Job:
        """The whole record, with its history."""
        return await find_job(await self._connection.store(), self._id)

    async def state(self) -> JobState:
        """Where the job is in its life."""
        return (await self.job()).state

    async def progress(self) -> Any:
        """What the body reported last; None while it has reported nothing."""
        return _progress(await self.job())

    async def result(self, timeout: float | timedelta | None = None) -> R:
        """Wait for the job to end, and return what its body returned.

        Raises `JobFailed` or `JobCancelled` when it ended otherwise, `TimeoutError` when it has not ended in time (it
        goes on), and `WouldDeadlock` inside a job or turn that itself holds the place the awaited job waits for.
        """
        if timeout is None:
            return await self._wait()
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if check_seconds("timeout", seconds) == 0:
            job = await self.job()
            if not job.state.final:
                raise TimeoutError(f"job {self._id} is {job.state.value}")
            return self._outcome(job)
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._wait()
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"job {self._id} has not ended within {seconds:g} s; it goes on") from None

    async def position(self) -> Position | None:
        """Where it is in line; None for whatever is not: before its due time, once started, and for unknown ids."""
        return position_of(await self._standing())

    async def eta(self) -> float | None:
        """Seconds until it starts, as far as can be told; None when it cannot be told, or when it does not wait."""
        standing = await self._standing()
        return None if standing is None else standing.eta()

    async def why(self) -> str:
        """What it waits for, in words; for a job that does not wait, what became of it."""
        job = await self.job()
        if job.state in WAITING_STATES:
            standing = await self._standing()
            if standing is not None:
                return standing.why()
            job = await self.job()
        return _told(job)

    async def watch(self) -> AsyncGenerator[Update, None]:
        """Updates as they come: state, place in line, progress. The first at once; the last tells the final state.

        Changes of the state and of the progress are pushed; places are looked at once a second.
        """
        last: Update | None = None
        async with Watch(self._connection, self._id, places=True) as watch:
            while last is None or not last.state.final:
                look = await watch.snapshot()
                job = look.job or _unknown(self._id)
                update = Update(job.state, position_of(look.position), _progress(job))
                if not update.tells_nothing_new(last):
                    last = update
                    yield update

    async def cancel(self) -> Cancellation:
        """Cancel it: a waiting job at once, a running one by asking its body to stop. The answer says which."""
        [state] = await (await self._connection.store()).cancel([self._id])
        return cancellation(state)

    async def retry(self) -> Handle[R]:
        """Run a job that has ended once more, as a new job whose `retry_of` names this one."""
        store = await self._connection.store()
        job = await find_job(store, self._id)
        if not job.state.final:
            raise InvalidInput("id", f"job {self._id} is {job.state.value}; only a job that has ended can be run again")
        [answer] = await store.enqueue([job.as_new(new_id())])
        return self.__class__(self._connection, answer.id, self._read_result, answer.created)

    async def _standing(self) -> JobPosition | None:
        [standing] = await (await self._connection.store()).positions([self._id])
        return standing

    async def _wait(self) -> R:
        async with Watch(self._connection, self._id) as watch:
            while True:
                job = (await watch.snapshot()).job or _unknown(self._id)
                if job.state.final:
                    return self._outcome(job)
                await refuse_deadlock(self._connection, job)

    def _outcome(self, job: Job) -> R:
        reason = "" if job.reason is None else job.reason.value
        if job.state is JobState.FAILED:
            raise JobFailed(job.id, reason, job.error)
        if job.state is JobState.CANCELLED:
            raise JobCancelled(job.id, reason)
        return self._read_result(job.result)

    if not TYPE_CHECKING:
        # Type checkers know no such attribute, so that they refuse it too.
        def __getattr__(self, name: str) -> Any:
            raise foreign_words.no_attribute(self, "a handle", name, foreign_words.HANDLE)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of job {self._id}>"


class BroadcastHandle(Handle[dict[str, JobState]], Generic[R]):
    """A broadcast: its result tells for each worker how its copy ended, once all of them have."""

    __slots__ = ("_read_copy",)

    def __init__(self, connection: Connection, id: str, read_copy: ReadResult[R], created: bool = True) -> None:
        super().__init__(connection, id, _read_report, created)
        self._read_copy = read_copy

    async def children(self) -> dict[str, Handle[R]]:
        """The copies there are now, by worker."""
        copies = await children(await self._connection.store(), self._id)
        return {copy.worker or copy.id: Handle(self._connection, copy.id, self._read_copy) for copy in copies}

    async def retry(self) -> BroadcastHandle[R]:
        """Send a broadcast that has ended once more, to the workers there are now."""
        again = await super().retry()
        return BroadcastHandle(self._connection, again.id, self._read_copy, again.created)


async def find_job(store: Store, id: str) -> Job:
    """The job of this id, which must exist."""
    [job] = await store.get([id])
    return job or _unknown(id)


async def children(store: Store, id: str) -> list[Job]:
    """The copies of a broadcast, in order of their workers; none for any other job.

    A copy's id is its parent's and the index of its worker, and every worker that has one was registered: so the
    sessions that are remembered, and the report once there is one, name them all.
    """
    parent = await find_job(store, id)
    if parent.kind is not JobKind.BROADCAST:
        return []
    indices = {s.index for s in await store.sessions() if s.pool == parent.pool and s.index is not None}
    if parent.state is JobState.COMPLETED:
        indices |= {int(worker.rpartition("/")[2]) for worker in _read_report(parent.result)}
    copies = await store.get([f"{id}/{index}" for index in sorted(indices)])
    return [copy for copy in copies if copy is not None]


async def refuse_deadlock(connection: Connection, job: Job) -> None:
    """Refuse to wait for a job that waits for a place which only the caller's own end can free."""
    held = places_held(job.queue, job.lane)
    if not held or job.state not in WAITING_STATES:
        return
    try:
        [standing] = await (await connection.store()).positions([job.id])
    except StoreUnavailable:
        return  # an outage is waited through; the next look asks again
    # A limit of 0 is a pause, which somebody else can end.
    if standing is not None and standing.lane_limit and held >= standing.lane_limit:
        raise WouldDeadlock(
            f"waiting here for job {job.id} could never end: it needs a place of lane {job.lane} in queue {job.queue}, "
            "and the code that waits holds all of them; wait outside, or use another lane"
        )


def position_of(standing: JobPosition | None) -> Position | None:
    """The place in line that a standing tells, None when it tells none."""
    if standing is None or standing.place is None:
        return None
    return Position(
        ahead=standing.place - 1,
        place=standing.place,
        of=standing.of,
        exact=standing.exact,
        eta=standing.eta(),
        queue_ahead=standing.queue_ahead,
        of_exact=standing.of_exact,
    )


def _unknown(id: str) -> Job:
    raise NotFound(f"there is no job {id!r}; it was never stored, or is older than the retention keeps")


_anything: codec.Reader[Any] = codec.Reader("progress", Any)


def _progress(job: Job) -> Any:
    return None if job.progress is None else _anything.read(job.progress)


def _read_report(raw: bytes | None) -> dict[str, JobState]:
    return codec.decode("result", raw or b"{}", dict[str, JobState])


def _told(job: Job) -> str:
    """What a job that does not wait is doing, or has come to."""
    if job.state is JobState.RUNNING:
        where = "" if job.worker is None else f" on {job.worker}"
        stop = ", asked to stop" if job.cancel_requested else ""
        return f"running{where} since {_instant(job.started_at)}, attempt {job.attempt}{stop}"
    if job.state is JobState.FAILED:
        last = (job.error or "").strip().rpartition("\n")[2]
        return f"failed ({job.reason}){': ' + last if last else ''}"
    if job.state is JobState.CANCELLED:
        return f"cancelled ({job.reason})"
    return job.state.value


def _instant(seconds: float | None) -> str:
    return "now" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
