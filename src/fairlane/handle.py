"""Handles: a job from the client's side. A handle is an id and a connection to the store; it caches nothing.

Methods raise `NotFound` for an unknown id, except `position` and `eta`, which return None for a job that does not wait.
Times are those of the store's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from .errors import InvalidInput, JobCancelled, JobFailed, NotFound, StoreUnavailable, WouldDeadlock
from .model import codec, foreign_words, listings
from .model.ids import new_id, retry_id
from .model.job import WAITING_STATES, Enqueued, Job, JobKind, JobState
from .model.names import check_seconds
from .model.reading import JobPosition
from .runtime.connection import Connection
from .runtime.job_watcher import Watch
from .runtime.running_job import places_held
from .store.port import Store

R = TypeVar("R")
ReadResult = Callable[[bytes | None], R]


class Position(msgspec.Struct, frozen=True):
    """The position of a waiting job in line."""

    ahead: int
    """Jobs of its lane that start before it."""
    place: int
    """1 for the next of its lane."""
    of: int
    """Waiting jobs of its lane; never less than `place`."""
    exact: bool
    """False where the jobs ahead of it were not all counted: `place` and `ahead` are lower bounds."""
    eta: float | None
    """An estimate of the seconds until it starts; None when there is no estimate."""
    queue_ahead: int
    """An estimate of the jobs of its whole queue that start before it."""
    of_exact: bool = True
    """False where the jobs of its lane were not all counted: `of` is a lower bound."""

    def same_place(self, other: Position | None) -> bool:
        """Whether the two are equal except for the estimate, which changes as time passes."""
        return other is not None and self == msgspec.structs.replace(other, eta=self.eta)


class Update(msgspec.Struct, frozen=True):
    """An update from `watch()`: the state, the position of a waiting job, and the last reported progress."""

    state: JobState
    position: Position | None
    progress: Any

    def repeats(self, last: Update | None) -> bool:
        """Whether it contains nothing new compared with `last`."""
        if last is None or (self.state, self.progress) != (last.state, last.progress):
            return False
        return self.position is last.position or (self.position is not None and self.position.same_place(last.position))


class Cancellation(StrEnum):
    """The result of `cancel`."""

    CANCELLED = "cancelled"
    """It will not run, or has ended as cancelled."""
    REQUESTED = "requested"
    """It is running, and a cancel was requested. If its function returns all the same, it will be completed."""
    COMPLETED = "completed"
    """Too late: it has ended."""
    FAILED = "failed"
    """Too late: it has ended."""


def cancellation(state: JobState) -> Cancellation:
    """The result of a cancel that leaves a job in `state`."""
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
        """Whether the call that returned this handle created the job; False if it existed already."""
        return self._created

    async def job(self) -> Job:
        """The whole record, with its history."""
        return await find_job(await self._connection.store(), self._id)

    async def state(self) -> JobState:
        """The state of the job."""
        return (await self.job()).state

    async def progress(self) -> Any:
        """The last reported progress; None if there is none yet."""
        return _progress(await self.job())

    async def result(self, timeout: float | timedelta | None = None) -> R:
        """Wait for the job to end and return its result.

        Raises `JobFailed` or `JobCancelled` if it ended otherwise, `TimeoutError` if it did not end in time (it
        continues), and `WouldDeadlock` inside a job or turn that itself holds the place the awaited job waits for.
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
            raise TimeoutError(f"job {self._id} did not end within {seconds:g} s; it continues") from None

    async def position(self) -> Position | None:
        """Its position in line. None if it is not in line: before its due time, once started, and for unknown ids."""
        return position_of(await self._position())

    async def eta(self) -> float | None:
        """An estimate of the seconds until it starts; None without an estimate, or if it does not wait."""
        position = await self._position()
        return None if position is None else position.eta()

    async def why(self) -> str:
        """Describe what the job waits for, or what it does if it does not wait, or how it ended."""
        job = await self.job()
        if job.state in WAITING_STATES:
            position = await self._position()
            if position is not None:
                return position.why()
            job = await self.job()
        return job_summary(job)

    async def watch(self) -> AsyncGenerator[Update, None]:
        """Yield updates as they happen: state, position in line, progress. The first immediately, the last final.

        Changes of state and progress are pushed; positions are read once a second.
        """
        last: Update | None = None
        async with Watch(self._connection, self._id, places=True) as watch:
            while last is None or not last.state.final:
                look = await watch.snapshot()
                job = look.job or _unknown(self._id)
                update = Update(job.state, position_of(look.position), _progress(job))
                if not update.repeats(last):
                    last = update
                    yield update

    async def cancel(self) -> Cancellation:
        """Cancel it: a waiting job immediately, a running one by a cancel request. The result says which."""
        [state] = await (await self._connection.store()).cancel([self._id])
        return cancellation(state)

    async def retry(self) -> Handle[R]:
        """Run a job that has ended again, as a new job whose `retry_of` names this one."""
        store = await self._connection.store()
        job = await find_job(store, self._id)
        if not job.state.final:
            raise InvalidInput("id", f"job {self._id} is {job.state.value}; only a job that has ended can be retried")
        answer = await _run_again(store, job)
        return self.__class__(self._connection, answer.id, self._read_result, answer.created)

    async def _position(self) -> JobPosition | None:
        [position] = await (await self._connection.store()).positions([self._id])
        return position

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
        # Hidden from type checkers, so that they report unknown attributes.
        def __getattr__(self, name: str) -> Any:
            raise foreign_words.no_attribute(self, "a handle", name, foreign_words.HANDLE)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of job {self._id}>"


class BroadcastHandle(Handle[dict[str, JobState]], Generic[R]):
    """A broadcast. Its result is the final state of each worker's copy, once all copies have ended."""

    __slots__ = ("_read_copy",)

    def __init__(self, connection: Connection, id: str, read_copy: ReadResult[R], created: bool = True) -> None:
        super().__init__(connection, id, _read_report, created)
        self._read_copy = read_copy

    async def children(self) -> dict[str, Handle[R]]:
        """The copies that exist now, by worker."""
        copies = await children(await self._connection.store(), self._id)
        return {copy.worker or copy.id: Handle(self._connection, copy.id, self._read_copy) for copy in copies}

    async def retry(self) -> BroadcastHandle[R]:
        """Send a broadcast that has ended again, to the workers that are live now."""
        again = await super().retry()
        return BroadcastHandle(self._connection, again.id, self._read_copy, again.created)


async def find_job(store: Store, id: str) -> Job:
    """Return the job of this id. Raises `NotFound` if it does not exist."""
    [job] = await store.get([id])
    return job or _unknown(id)


def unknown_job(id: str) -> NotFound:
    """The error for an id under which no job is stored."""
    return NotFound(f"job {id!r} does not exist: it was never stored, or its retention is over")


async def _run_again(store: Store, job: Job) -> Enqueued:
    """Store another retry of a job. The first has the id of a bulk retry, so that bulk retries see it."""
    first = retry_id(job.id)
    if await store.get([first]) == [None]:
        [answer] = await store.enqueue([job.as_new(first)])
        # Not created: it was stored meanwhile, perhaps by this call, whose answer was lost; or it was deleted, and only
        # its id is still taken.
        if answer.created or answer.id != first or await store.get([first]) != [None]:
            return answer
    [answer] = await store.enqueue([job.as_new(new_id())])
    return answer


async def children(store: Store, id: str) -> list[Job]:
    """Return the copies of a broadcast, ordered by worker; an empty list for any other job.

    A copy's id consists of its parent's id and the index of its worker, and every worker with a copy was registered:
    the sessions that are still kept, and the report once it exists, therefore name them all.
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
    """Raise `WouldDeadlock` if the job waits for a place that only the end of the calling code can free."""
    held = places_held(job.queue, job.lane)
    if not held or job.state not in WAITING_STATES:
        return
    try:
        [position] = await (await connection.store()).positions([job.id])
    except StoreUnavailable:
        return  # the caller waits through an outage and checks again
    # A limit of 0 is a pause, which an operator can end.
    if position is not None and position.lane_limit and held >= position.lane_limit:
        raise WouldDeadlock(
            f"waiting for job {job.id} would never end: it needs a place in lane {job.lane} of queue {job.queue}, "
            "and the waiting code holds all of them; wait outside the job or turn, or use another lane"
        )


def position_of(position: JobPosition | None) -> Position | None:
    """The public form of a position; None for a job that is not in line."""
    if position is None or position.place is None:
        return None
    return Position(
        ahead=position.place - 1,
        place=position.place,
        of=position.of,
        exact=position.exact,
        eta=position.eta(),
        queue_ahead=position.queue_ahead,
        of_exact=position.of_exact,
    )


def _unknown(id: str) -> Job:
    raise unknown_job(id)


_anything: codec.Reader[Any] = codec.Reader("progress", Any)


def _progress(job: Job) -> Any:
    return None if job.progress is None else _anything.read(job.progress)


def _read_report(raw: bytes | None) -> dict[str, JobState]:
    return codec.decode("result", raw or b"{}", dict[str, JobState])


def job_summary(job: Job) -> str:
    """Describe a job that does not wait: where it runs, or how it ended."""
    if job.state is JobState.RUNNING:
        where = "" if job.worker is None else f" on {job.worker}"
        stop = ", cancel requested" if job.cancel_requested else ""
        return f"running{where} since {_instant(job.started_at)}, attempt {job.attempt}{stop}"
    if job.state is JobState.FAILED:
        line = listings.error_line(job.error)
        return f"failed ({job.reason}){': ' + line if line else ''}"
    if job.state is JobState.CANCELLED:
        return f"cancelled ({job.reason})"
    return job.state.value


def _instant(seconds: float | None) -> str:
    return "now" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
