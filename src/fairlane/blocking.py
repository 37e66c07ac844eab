"""The client for code without an event loop: the same methods, run in one event-loop thread.

Every method delegates to the async one. The thread is started at the first call, and again after a fork. Inside a
running event loop every call is rejected, because it would block that loop; other threads, and plain functions that a
worker runs, may call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from .bulk import Bulk, BulkOptions, PurgeOptions
from .client import Client, OnSent
from .handle import BroadcastHandle, Cancellation, Handle, Position, Update
from .model import foreign_words
from .model.binding import Binding, Release
from .model.job import Enqueued, Job, JobState, NewJob, Priority
from .model.listings import FailureGroup, LaneListing, LanePage
from .model.maintenance import Recount
from .model.reading import Page, QueueReading
from .model.schedule import StoredSchedule
from .model.session import Session, Term
from .model.tokens import AccessToken, Scope
from .runtime.loop_thread import LoopThread
from .runtime.running_job import HeldPlace
from .task import Call, PriorityWord, Seconds, Task
from .turn import Turn

R = TypeVar("R")
T = TypeVar("T")
Report = Callable[[Position], None]
Turns = Callable[..., Turn]
"""`Fairlane.turn`."""


class BlockingHandle(Generic[R]):
    """A job that was sent, for code without an event loop. It has the methods of `Handle`."""

    __slots__ = ("_handle", "_thread")

    def __init__(self, thread: LoopThread, handle: Handle[R]) -> None:
        self._thread = thread
        self._handle = handle

    @property
    def id(self) -> str:
        """The job's id."""
        return self._handle.id

    @property
    def created(self) -> bool:
        """Whether the call that returned this handle created the job."""
        return self._handle.created

    def job(self) -> Job:
        """The whole record, with its history."""
        return self._thread.run(self._handle.job)

    def state(self) -> JobState:
        """The state of the job."""
        return self._thread.run(self._handle.state)

    def progress(self) -> Any:
        """The last reported progress."""
        return self._thread.run(self._handle.progress)

    def result(self, timeout: float | timedelta | None = None) -> R:
        """Wait for the job to end and return its result."""
        return self._thread.run(lambda: self._handle.result(timeout))

    def position(self) -> Position | None:
        """Its position in line."""
        return self._thread.run(self._handle.position)

    def eta(self) -> float | None:
        """An estimate of the seconds until it starts."""
        return self._thread.run(self._handle.eta)

    def why(self) -> str:
        """Describe what the job waits for."""
        return self._thread.run(self._handle.why)

    def watch(self) -> Iterator[Update]:
        """Yield updates as they happen."""
        updates = self._handle.watch()
        try:
            while True:
                try:
                    yield self._thread.run(updates.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            self._thread.post(updates.aclose)

    def cancel(self) -> Cancellation:
        """Cancel it."""
        return self._thread.run(self._handle.cancel)

    def retry(self) -> BlockingHandle[R]:
        """Run a job that has ended again, as a new job."""
        return BlockingHandle(self._thread, self._thread.run(self._handle.retry))

    if not TYPE_CHECKING:
        # Hidden from type checkers, so that they report unknown attributes.
        def __getattr__(self, name: str) -> Any:
            raise foreign_words.no_attribute(self, "a handle", name, foreign_words.HANDLE, blocking=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of job {self.id}>"


class BlockingBroadcastHandle(BlockingHandle[dict[str, JobState]], Generic[R]):
    """A broadcast. See `BroadcastHandle` for the methods."""

    __slots__ = ("_broadcast",)

    def __init__(self, thread: LoopThread, handle: BroadcastHandle[R]) -> None:
        super().__init__(thread, handle)
        self._broadcast = handle

    def children(self) -> dict[str, BlockingHandle[R]]:
        """The copies that exist now, by worker."""
        copies = self._thread.run(self._broadcast.children)
        return {worker: BlockingHandle(self._thread, handle) for worker, handle in copies.items()}

    def retry(self) -> BlockingBroadcastHandle[R]:
        """Send a broadcast that has ended again."""
        return BlockingBroadcastHandle(self._thread, self._thread.run(self._broadcast.retry))


class BlockingTurn:
    """One place in a lane, for ``with``. The code inside cannot be cancelled: it must check `lost`."""

    def __init__(self, thread: LoopThread, turn: Turn) -> None:
        self._thread = thread
        self._turn = turn
        self._place = HeldPlace(turn.queue, turn.lane)

    def __enter__(self) -> Turn:
        try:
            self._thread.run(lambda: self._turn.begin(body=None))
            self._place.__enter__()
        except BaseException:
            # An interrupt may arrive after the place was granted; without this it would never be released.
            self._thread.post(self._turn.abandon)
            raise
        return self._turn

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._place.__exit__()
        self._thread.run(lambda: self._turn.end(exc))


class BlockingClient:
    """The operations of `Client` for code without an event loop, with the same methods: ``app.blocking``."""

    def __init__(self, client: Client, turns: Turns, close: Callable[[], Awaitable[bool]]) -> None:
        self._client = client
        self._turns = turns
        self._close = close
        self._thread = LoopThread()

    def close(self) -> None:
        """Close the application and stop the thread. The next call opens it again.

        While a worker of the application runs in the process both stay open: running jobs use them too.
        """
        if self._thread.run(self._close):
            self._thread.stop()

    def stop(self) -> None:
        """Stop only the thread."""
        self._thread.stop()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- sending -------------------------------------------------------------------------------------------------

    def enqueue(self, call: Call[R]) -> BlockingHandle[R]:
        """Store the job of a call."""
        return BlockingHandle(self._thread, self._thread.run(lambda: self._client.enqueue(call)))

    def send(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store requests."""
        return self._thread.run(lambda: self._client.send(jobs))

    def enqueue_many(self, calls: Sequence[Call[R]], progress: OnSent | None = None) -> list[BlockingHandle[R]]:
        """Store any number of jobs."""
        handles = self._thread.run(lambda: self._client.enqueue_many(calls, progress))
        return [BlockingHandle(self._thread, handle) for handle in handles]

    def enqueue_on(self, connection: object, *calls: Call[R]) -> list[BlockingHandle[R]]:
        """Store jobs in the transaction that is open on your own connection, which is used only in this thread.

        On PostgreSQL: a `Connection` of psycopg, a `Connection` or `Session` of SQLAlchemy, or a Django connection; on
        SQLite: a sqlite3 or Django connection.
        """
        if not calls:
            return []
        joining = self._thread.run(lambda: self._client._joining(calls))
        handles = self._client._handles_of(calls, joining.enqueue_here(connection))
        return [BlockingHandle(self._thread, handle) for handle in handles]

    def broadcast(self, call: Call[R], *, pool: str = "default", ttl: Seconds = 0.0) -> BlockingBroadcastHandle[R]:
        """Run a call once on every live worker of a pool."""
        handle = self._thread.run(lambda: self._client.broadcast(call, pool=pool, ttl=ttl))
        return BlockingBroadcastHandle(self._thread, handle)

    def release(self, key: str, *, cleanup: Call[Any] | None = None, pool: str = "default") -> Release:
        """Release a sticky key."""
        return self._thread.run(lambda: self._client.release(key, cleanup=cleanup, pool=pool))

    def turn(
        self,
        lane: str,
        *,
        queue: str = "default",
        on_position: Report | None = None,
        priority: PriorityWord | Priority = "normal",
        expires: Seconds | None = None,
        timeout: Seconds | None = None,
    ) -> BlockingTurn:
        """A place in a lane, for ``with``; `on_position` is called in another thread."""

        async def report(position: Position) -> None:
            if on_position is not None:
                await asyncio.to_thread(on_position, position)

        callback = None if on_position is None else report
        turn = self._turns(lane, queue=queue, on_position=callback, priority=priority, expires=expires, timeout=timeout)
        return BlockingTurn(self._thread, turn)

    # -- one job -------------------------------------------------------------------------------------------------

    @overload
    def handle(self, id: str) -> BlockingHandle[Any]: ...
    @overload
    def handle(self, id: str, task: Task[..., R]) -> BlockingHandle[R]: ...
    def handle(self, id: str, task: Task[..., Any] | None = None) -> BlockingHandle[Any]:
        """The handle of a job that was sent before."""
        return BlockingHandle(self._thread, self._client.handle(id) if task is None else self._client.handle(id, task))

    def job(self, id: str) -> Job:
        """A job with its history."""
        return self._thread.run(lambda: self._client.job(id))

    def children(self, id: str) -> list[Job]:
        """The copies of a broadcast."""
        return self._thread.run(lambda: self._client.children(id))

    def cancel(self, ids: Sequence[str]) -> list[Cancellation]:
        """Cancel jobs."""
        return self._thread.run(lambda: self._client.cancel(ids))

    def retry(self, id: str) -> BlockingHandle[Any]:
        """Run a job that has ended again."""
        return BlockingHandle(self._thread, self._thread.run(lambda: self._client.retry(id)))

    # -- many jobs -----------------------------------------------------------------------------------------------

    def retry_all(self, **options: Unpack[BulkOptions]) -> Bulk:
        """Run every selected job that has ended again; `progress` is called in another thread."""
        return self._thread.run(lambda: self._client.retry_all(**options))

    def cancel_all(self, **options: Unpack[BulkOptions]) -> Bulk:
        """Cancel every selected job that has not ended."""
        return self._thread.run(lambda: self._client.cancel_all(**options))

    def purge(self, **options: Unpack[PurgeOptions]) -> Bulk:
        """Delete every selected job that has ended."""
        return self._thread.run(lambda: self._client.purge(**options))

    # -- reading -------------------------------------------------------------------------------------------------

    def schedules(self) -> list[StoredSchedule]:
        """Every schedule that was declared."""
        return self._thread.run(self._client.schedules)

    def find(
        self,
        *,
        state: JobState | None = None,
        queue: str | None = None,
        lane: str | None = None,
        task: str | None = None,
        sticky: str | None = None,
        worker: str | None = None,
        error_group: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """A page of jobs, newest first."""
        return self._thread.run(
            lambda: self._client.find(
                state=state,
                queue=queue,
                lane=lane,
                task=task,
                sticky=sticky,
                worker=worker,
                error_group=error_group,
                limit=limit,
                cursor=cursor,
            )
        )

    def queues(self) -> list[QueueReading]:
        """Every queue, by name."""
        return self._thread.run(self._client.queues)

    def counters(self) -> dict[str, int]:
        """Counts that the store's servers keep, such as deadlocks."""
        return self._thread.run(self._client.counters)

    def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        """The lanes of a queue that have work."""
        return self._thread.run(lambda: self._client.lanes(queue, limit=limit, cursor=cursor))

    def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        """A page of a lane's jobs in the order in which they start."""
        return self._thread.run(lambda: self._client.lane_line(queue, lane, limit=limit, cursor=cursor))

    def failures(self, *, queue: str | None = None, task: str | None = None, limit: int = 50) -> list[FailureGroup]:
        """Failed jobs that are still kept, grouped by task and error group."""
        return self._thread.run(lambda: self._client.failures(queue=queue, task=task, limit=limit))

    def sessions(self) -> list[Session]:
        """Every session that retention still keeps."""
        return self._thread.run(self._client.sessions)

    def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        """Bindings, open ones first."""
        return self._thread.run(lambda: self._client.bindings(pool, key, limit=limit))

    def leader(self) -> Term | None:
        """The current term."""
        return self._thread.run(self._client.leader)

    # -- settings ------------------------------------------------------------------------------------------------

    def pause(self, queue: str, lane: str | None = None) -> None:
        """Start no more jobs of a queue, or of one of its lanes."""
        self._thread.run(lambda: self._client.pause(queue, lane))

    def resume(self, queue: str, lane: str | None = None) -> None:
        """Undo `pause`."""
        self._thread.run(lambda: self._client.resume(queue, lane))

    def set_limit(self, queue: str, limit: int | None, *, lane: str | None = None) -> None:
        """Override how many jobs of a queue, or of one of its lanes, run at once."""
        self._thread.run(lambda: self._client.set_limit(queue, limit, lane=lane))

    def clear_limit(self, queue: str, *, lane: str | None = None) -> None:
        """Undo `set_limit`."""
        self._thread.run(lambda: self._client.clear_limit(queue, lane=lane))

    def clear_override(self, queue: str) -> None:
        """Undo every `pause` and `set_limit` of the queue."""
        self._thread.run(lambda: self._client.clear_override(queue))

    # -- tokens of the HTTP service ------------------------------------------------------------------------------

    def make_token(
        self,
        name: str,
        scopes: Sequence[Scope | str],
        queues: Sequence[str] | None = None,
        lane_prefix: str | None = None,
        expires: Seconds | None = None,
    ) -> tuple[AccessToken, str]:
        """Create a token and return it with its secret."""
        return self._thread.run(lambda: self._client.make_token(name, scopes, queues, lane_prefix, expires))

    def tokens(self) -> list[AccessToken]:
        """Every token, the oldest first."""
        return self._thread.run(self._client.tokens)

    def revoke_token(self, id: str) -> bool:
        """Revoke a token permanently."""
        return self._thread.run(lambda: self._client.revoke_token(id))

    # -- the store itself ----------------------------------------------------------------------------------------

    def recount(self) -> Recount:
        """Recompute all derived data."""
        return self._thread.run(self._client.recount)

    def migrate(self) -> int:
        """Bring the schema up to date."""
        return self._thread.run(self._client.migrate)
