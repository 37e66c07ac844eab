"""Handles of jobs behind an HTTP service: `Handle` implemented by requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import NotFound, StoreError, StoreUnavailable
from ..handle import Cancellation, Handle, Position, ReadResult, Update
from ..model.job import Attempt, Job, JobKind, JobState, Priority, Reason
from ..model.names import check_seconds
from ..model.retry import Backoff
from .transport import ServerEvent, Transport, event_error, path_of

R = TypeVar("R")
T = TypeVar("T")
LONG_POLL = 20.0
"""Seconds that one request waits for a result. Proxies close connections that are silent for 30 s or more."""
RECONNECT = 0.5
LONGEST_RECONNECT = 5.0


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the service returns it. Missing fields have their defaults."""

    id: str
    state: JobState
    task: str = "unknown"
    queue: str = "default"
    kind: JobKind = JobKind.JOB
    reason: Reason | None = None
    lane: str | None = None
    priority: str = "normal"
    cost: float = 1.0
    payload: msgspec.Raw = msgspec.Raw(b"[[],{}]")
    retries: int = 0
    backoff: Backoff = Backoff()
    timeout: float | None = None
    unique: str | None = None
    pool: str = "default"
    sticky: str | None = None
    direct: int | None = None
    worker: str | None = None
    session: str | None = None
    attempt: int = 0
    fence: int = 0
    arrival: int | None = None
    retry_of: str | None = None
    parent: str | None = None
    enqueued_at: float = 0.0
    due_at: float | None = None
    expires_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    cancel_requested: bool = False
    suspect: bool = False
    progress: msgspec.Raw = msgspec.Raw(b"null")
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    error_group: str | None = None
    attempts: tuple[Attempt, ...] = ()
    position: Position | None = None
    why: str | None = None
    eta: float | None = None

    def job(self) -> Job:
        """Convert it to a `Job`."""
        same = {name: getattr(self, name) for name in Job.__struct_fields__ if hasattr(self, name)}
        ended = self.state is JobState.COMPLETED
        return Job(
            **same
            | {
                "priority": Priority.parse(self.priority),
                "payload": bytes(self.payload),
                "headers": None,
                "progress": None if bytes(self.progress) == b"null" else bytes(self.progress),
                "result": bytes(self.result) if ended else None,
            }
        )


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a job that was sent."""

    id: str
    created: bool = True


class _Cancelled(msgspec.Struct, frozen=True):
    answer: Cancellation


class RemoteHandle(Handle[R], Generic[R]):
    """A job behind an HTTP service. The methods are documented in `Handle`."""

    __slots__ = ("_transport",)

    def __init__(self, transport: Transport, id: str, read_result: ReadResult[R], created: bool = True) -> None:
        self._transport = transport
        self._id = id
        self._read_result = read_result
        self._created = created

    async def job(self) -> Job:
        return (await self._view()).job()

    async def state(self) -> JobState:
        return (await self._view()).state

    async def progress(self) -> Any:
        return msgspec.json.decode((await self._view()).progress)

    async def position(self) -> Position | None:
        try:
            return (await self._view()).position
        except NotFound:
            return None

    async def eta(self) -> float | None:
        try:
            return (await self._view()).eta
        except NotFound:
            return None

    async def why(self) -> str:
        view = await self._view()
        return view.why or view.state.value

    async def result(self, timeout: float | timedelta | None = None) -> R:
        # The first request does not wait and raises at once during an outage; later ones wait until the outage is over.
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None:
            check_seconds("timeout", seconds)
        view = await self._ended(0.0)
        if view.state.final:
            return self._outcome(view.job())
        if seconds == 0:
            raise TimeoutError(f"job {self._id} is {view.state.value}")
        failures: list[StoreUnavailable] = []
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._poll(failures)
        except TimeoutError:
            if not limit.expired():
                raise
            if failures:
                unknown = f"whether job {self._id} has ended within {seconds:g} s is unknown"
                raise TimeoutError(f"{unknown}: {failures[-1]}") from failures[-1]
            raise TimeoutError(f"job {self._id} has not ended within {seconds:g} s; it goes on") from None

    async def _poll(self, failures: list[StoreUnavailable]) -> R:
        """The result, through outages of the service. `failures`: gets those of the current outage."""
        pause = RECONNECT
        while True:
            try:
                view = await self._ended(LONG_POLL)
            except StoreUnavailable as exc:
                failures[:] = [exc]
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RECONNECT)
                continue
            failures.clear()
            pause = RECONNECT
            if view.state.final:
                return self._outcome(view.job())
            # A service that is stopping ends long polls at once.
            await asyncio.sleep(0.05)

    async def _ended(self, wait: float) -> JobView:
        """The job once it has ended, or its state after `wait` seconds."""
        return read((await self._transport.get(path_of("jobs", self._id, "result"), wait=wait)).content, JobView)

    async def watch(self) -> AsyncGenerator[Update, None]:
        last: Update | None = None
        seen: str | None = None
        pause = RECONNECT
        while last is None or not last.state.final:
            try:
                async with self._transport.events(path_of("jobs", self._id, "events"), seen) as events:
                    async for event in events:
                        seen = seen if event.id is None else event.id
                        pause = RECONNECT if event.retry is None else event.retry
                        if event.event == "gone":
                            raise NotFound(f"job {self._id!r} no longer exists; its retention is over")
                        if event.event == "problem":
                            raise event_error(event)
                        update = merged(last, event)
                        if update is not None and not update.repeats(last):
                            last = update
                            yield update
                        if last is not None and last.state.final:
                            return
            except StoreUnavailable:
                if last is None:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RECONNECT)

    async def cancel(self) -> Cancellation:
        response = await self._transport.post(path_of("jobs", self._id, "cancel"))
        return read(response.content, _Cancelled).answer

    async def retry(self) -> RemoteHandle[R]:
        # Each retry creates a new job, so the request is not repeated after a lost response.
        response = await self._transport.post(path_of("jobs", self._id, "retry"), repeat=False)
        answer = read(response.content, Submitted)
        return RemoteHandle(self._transport, answer.id, self._read_result, answer.created)

    async def _view(self) -> JobView:
        return read((await self._transport.get(path_of("jobs", self._id))).content, JobView)


class _Change(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one event. Missing ones are unchanged."""

    state: JobState | msgspec.UnsetType = msgspec.UNSET
    position: Position | msgspec.UnsetType | None = msgspec.UNSET
    progress: Any = msgspec.UNSET


def merged(last: Update | None, event: ServerEvent) -> Update | None:
    """Merge an event into the last update; None while the state is unknown."""
    change = read(event.data.encode(), _Change)
    state = last.state if change.state is msgspec.UNSET and last is not None else change.state
    if state is msgspec.UNSET:
        return None
    position = change.position
    if position is msgspec.UNSET:
        # A job that no longer waits has no position, even if the event omits it.
        position = last.position if last is not None and last.state is state else None
    progress = change.progress
    if progress is msgspec.UNSET:
        progress = None if last is None else last.progress
    return Update(state, position, progress)


def read(raw: bytes, type_: type[T]) -> T:
    """Decode a response of the service. Raises StoreError if it is malformed."""
    try:
        return msgspec.json.decode(raw, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise StoreError(f"the service sent a malformed response: {exc}") from None
