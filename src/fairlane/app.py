"""The application object: where a user declares tasks, queues and lanes, and sends jobs from.

Making one does nothing but read the settings: the store is opened when it is first needed, so a module with an app can
be imported, forked and spawned freely. It owns no logic: tasks are in a registry, verbs are the client's.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, overload

import msgspec

from .backends import open_store
from .binding import Release
from .blocking import BlockingClient
from .client import Client, OnSent
from .clock import Clock
from .config import Settings, without_password
from .connection import Connection
from .errors import FairlaneError, InvalidInput
from .events import Events, Tracer
from .handle import BroadcastHandle, Handle
from .job import Priority
from .names import check_name, shown
from .observed import ObservedStore
from .schedule import Schedule, template_of
from .settings import LaneRule, QueueSettings, SettingsChange
from .slots import Reserved, Slots, usual_slots
from .store import Store
from .task import AsyncTask, Call, PlainTask, PriorityWord, Registry, Seconds, Task, TaskSettings, seconds
from .turn import OnPosition, Turn
from .waiter import Waiter

if TYPE_CHECKING:
    # Only a process that works needs it.
    from .worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class TaskDecorator(Protocol):
    """What `app.task(…)` with settings returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # the first that fits is meant
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> PlainTask[P, R]: ...


class Fairlane:
    """An application: its tasks, its queues, and the store they live in.

    The store is `url`, else that of `settings`, which come from the environment unless they are given. `version`
    numbers what the code declares: an older deployment does not undo what a newer one has declared.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        events: Events | None = None,
        tracer: Tracer | None = None,
        version: int = 0,
    ) -> None:
        found = Settings.from_env(os.environ) if settings is None else settings
        self.settings = found if url is None else msgspec.structs.replace(found, url=url)
        self.events = events or Events()
        self.tracer = tracer
        self.registry = Registry()
        self._clock = clock
        self._version = version
        self._queues: dict[str, QueueDeclaration] = {}
        self._sent = False
        self.connection = Connection(self.open_store, self._declare_queues)
        self.client = Client(self.connection, tracer=tracer)
        self._waiter = Waiter(self.connection, self.open_store, self.settings.intervals, self.settings.retention)
        self.blocking = BlockingClient(self.client, self.turn, self._let_go)

    # -- declaring -----------------------------------------------------------------------------------------------

    @overload
    def task(  # type: ignore[overload-overlap]  # the first that fits is meant
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> PlainTask[P, R]: ...
    @overload
    def task(self, /, **settings: Unpack[TaskSettings]) -> TaskDecorator: ...
    def task(self, function: Callable[..., Any] | None = None, /, **settings: Unpack[TaskSettings]) -> Any:
        """Register a function as a task: ``@app.task`` or ``@app.task(queue=…, lane="user:{user}", retries=3)``."""
        if function is not None:
            return self._register(function, settings)
        return lambda function: self._register(function, settings)

    def _register(self, function: Callable[..., Any], settings: TaskSettings) -> Task[..., Any]:
        if not inspect.isroutine(function):
            raise InvalidInput("task", f"decorates a function, not a {type(function).__name__}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput("task", f"{function.__name__} is a generator; a job has one result, so return it")
        kind = AsyncTask if inspect.iscoroutinefunction(function) else PlainTask
        task: Task[..., Any] = kind(self, function, settings)
        self.registry.add(task)
        return task

    def queue(
        self,
        name: str,
        *,
        limit: int | None = None,
        reserved: Reserved | Mapping[str, int] | None = None,
        max_pending: int | None = None,
        lanes: Sequence[str] | None = None,
    ) -> QueueDeclaration:
        """Declare a queue: how many of its jobs run at once in the whole fleet, and how many may wait.

        `lanes` is the closed set of its lanes; others are refused. Naming a declared queue again adds to it.
        """
        check_name("queue", name)
        if self._sent:
            raise FairlaneError(
                f"queue {name!r} is declared after the store was opened, which would not hear of it: "
                "declare queues where the app is made, before the first call"
            )
        declaration = self._queues.get(name) or QueueDeclaration(name)
        declaration.declare(limit=limit, reserved=_reserved(reserved), max_pending=max_pending, closed=_closed(lanes))
        self._queues[name] = declaration
        return declaration

    def queue_names(self) -> set[str]:
        """The queues that its tasks go to, or that it declares."""
        return self.registry.queues() | self._queues.keys()

    def schedules(self) -> list[Schedule]:
        """The schedules of its tasks that have a `cron` or `every`."""
        return [
            Schedule(name=task.name, timetable=task.timetable, job=template_of(task.call().job))
            for task in self.registry
            if task.timetable is not None
        ]

    # -- sending -------------------------------------------------------------------------------------------------

    def enqueue(self, call: Call[R]) -> Coroutine[Any, Any, Handle[R]]:
        """Store the job of a call; `task.enqueue(…)` does this for its own."""
        return self.client.enqueue(call)

    async def enqueue_many(self, calls: Sequence[Call[R]], progress: OnSent | None = None) -> list[Handle[R]]:
        """Store any number of jobs, 1,000 at a time; after an error the same list may be sent again."""
        return await self.client.enqueue_many(calls, progress)

    async def enqueue_on(self, connection: object, *calls: Call[R]) -> list[Handle[R]]:
        """Store jobs in the transaction that is open on a connection of yours: they exist when you commit it."""
        return await self.client.enqueue_on(connection, *calls)

    async def broadcast(self, call: Call[R], *, pool: str = "default", ttl: Seconds = 0.0) -> BroadcastHandle[R]:
        """Run a call once on every live worker of a pool, and on those that join it within `ttl`."""
        return await self.client.broadcast(call, pool=pool, ttl=ttl)

    async def release(self, key: str, *, cleanup: Call[Any] | None = None, pool: str = "default") -> Release:
        """Release a sticky key: its clean-up runs first and alone, on the worker the key is bound to."""
        return await self.client.release(key, cleanup=cleanup, pool=pool)

    def turn(
        self,
        lane: str,
        *,
        queue: str = "default",
        on_position: OnPosition | None = None,
        priority: PriorityWord | Priority = "normal",
        expires: Seconds | None = None,
        timeout: Seconds | None = None,
    ) -> Turn:
        """A place in a lane for the code inside ``async with``; the lane needs a limit.

        `on_position` is told the place in line as it changes. `timeout` bounds the wait here, with `TimeoutError`;
        `expires` has the store end it, with `JobCancelled`.
        """
        return Turn(
            self.connection,
            self._waiter,
            lane,
            queue=queue,
            on_position=on_position,
            priority=priority,
            expires=expires,
            timeout=timeout,
        )

    @overload
    def handle(self, id: str) -> Handle[Any]: ...
    @overload
    def handle(self, id: str, task: Task[..., R]) -> Handle[R]: ...
    def handle(self, id: str, task: Task[..., Any] | None = None) -> Handle[Any]:
        """The handle of a job that was sent before; with its task, the result is read as the task's type."""
        return self.client.handle(id) if task is None else self.client.handle(id, task)

    # -- working -------------------------------------------------------------------------------------------------

    def worker(
        self,
        *,
        queues: Mapping[str, int] | Sequence[str] | None = None,
        slots: int | Slots | None = None,
        pool: str | None = None,
        index: int | None = None,
        grace: Seconds | None = None,
        burst: bool = False,
        manager: bool = True,
    ) -> Worker:
        """A worker in this process and event loop: ``await app.worker(slots=4).run()`` serves until it is stopped.

        What is not given is as ``fairlane worker`` would have it. `slots` as a number reserves one for high priority,
        if there are two. With `burst` it stops when there is nothing left to do.
        """
        from .worker.settings import WorkerSettings
        from .worker.worker import Worker

        mine = self.settings
        served = queues or mine.queues or sorted(self.queue_names() | {"default"})
        settings = WorkerSettings(
            queues=dict(served) if isinstance(served, Mapping) else dict.fromkeys(served, 1),
            slots=mine.slots if slots is None else slots if isinstance(slots, Slots) else usual_slots(slots),
            pool=mine.pool if pool is None else pool,
            index=mine.index if index is None else index,
            grace=mine.grace if grace is None else seconds("grace", grace),
            burst=burst,
            manager=manager,
            intervals=mine.intervals,
            retention=mine.retention,
        )
        return Worker(
            self.connection.store, self.open_store, self.registry, settings, declare=self.declare, tracer=self.tracer
        )

    async def declare(self, store: Store) -> None:
        """Tell a store the schedules of the tasks. A worker does so when it starts, and every hour."""
        schedules = self.schedules()
        if schedules:
            await store.declare(schedules)

    # -- the store -----------------------------------------------------------------------------------------------

    async def open_store(self) -> Store:
        """Another store at the same place, for whoever needs one of his own; he closes it."""
        return ObservedStore(await open_store(self.settings.url, clock=self._clock), self.events)

    async def _declare_queues(self, store: Store) -> None:
        self._sent = True
        changes = [
            SettingsChange(queue=name, declared=queue.settings, version=self._version)
            for name, queue in self._queues.items()
        ]
        if changes:
            await store.configure(changes)

    async def close(self) -> None:
        """End what this process holds and close the store. The next call opens it again."""
        try:
            await self._let_go()
        finally:
            # In a thread: what still runs there may need this loop to end.
            await asyncio.to_thread(self.blocking.stop)

    async def _let_go(self) -> None:
        try:
            await self._waiter.close()
        finally:
            await self.connection.close()
            self._sent = False

    async def __aenter__(self) -> Fairlane:
        await self.connection.store()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Fairlane at {without_password(self.settings.url)}, {len(self.registry)} tasks>"


class QueueDeclaration:
    """What an application says about one queue; checked at once, told to the store when it is opened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = QueueSettings()

    def declare(self, **fields: Any) -> None:
        """Lay these fields over what is declared; None leaves a field alone."""
        given = {field: value for field, value in fields.items() if value is not None}
        for field, value in given.items():
            known = getattr(self.settings, field)
            if known not in (value, getattr(QueueSettings(), field)):
                raise InvalidInput(field, f"queue {self.name!r} is declared with two of them; leave one out")
        self.settings = msgspec.structs.replace(self.settings, **given)

    def lane(
        self,
        pattern: str,
        *,
        limit: int | None = None,
        weight: float = 1.0,
        ordered: bool | None = None,
        max_pending: int | None = None,
    ) -> QueueDeclaration:
        """Declare the lanes that match `pattern`: a key, or the beginning of keys followed by ``*``.

        `limit` is how many jobs of one such lane run at once, `weight` its share, `ordered` strict order of arrival.
        """
        rule = LaneRule(pattern=pattern, limit=limit, weight=weight, ordered=ordered, max_pending=max_pending)
        self.settings = msgspec.structs.replace(self.settings, lanes=(*self.settings.lanes, rule))
        return self

    def __repr__(self) -> str:
        return f"<QueueDeclaration of {self.name}>"


def _reserved(reserved: Reserved | Mapping[str, int] | None) -> Reserved | None:
    if reserved is None or isinstance(reserved, Reserved):
        return reserved
    unknown = sorted(set(reserved) - set(Reserved.__struct_fields__))
    if unknown:
        raise InvalidInput("reserved", f"{shown(unknown[0])} is none of 'high', 'normal'")
    return Reserved(**reserved)


def _closed(lanes: Sequence[str] | None) -> tuple[str, ...] | None:
    if lanes is None:
        return None
    if isinstance(lanes, str):
        raise InvalidInput("lanes", f"must be a list of lanes, such as [{lanes!r}]")
    return tuple(lanes)
