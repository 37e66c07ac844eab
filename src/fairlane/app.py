"""The application object: where a user declares tasks, queues and lanes, and sends jobs from.

Making one does nothing but read the settings: the store is opened when it is first needed, so a module with an app can
be imported, forked and spawned freely. It owns no logic: tasks are in a registry, verbs are the client's.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, overload

import msgspec

from .blocking import BlockingClient
from .client import Client, OnSent
from .config import Settings, without_password
from .errors import FairlaneError, InvalidInput
from .events import Events, Tracer
from .handle import BroadcastHandle, Handle
from .hooks import AroundHook, Hooks, WorkerHook
from .model import foreign_words
from .model.binding import Release
from .model.declaration import QueueDeclaration, closed_set, reserved_of
from .model.job import Priority
from .model.names import check_name
from .model.schedule import Schedule, template_of
from .model.settings import SettingsChange
from .model.slots import Reserved, Slots
from .runtime.connection import Connection
from .runtime.discovery import check_module, import_named, task_modules
from .runtime.turn_session import TurnSessions
from .store import open_store
from .store.clock import Clock
from .store.instrumented import InstrumentedStore, on_data_loss
from .store.port import Store
from .task import AsyncTask, Call, PlainTask, PriorityWord, Registry, Seconds, Task, TaskSettings, seconds
from .turn import OnPosition, Turn

if TYPE_CHECKING:
    # Only a process that works needs it.
    from .worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=WorkerHook)
A = TypeVar("A", bound=AroundHook)


NO_TASKS = (
    "the application has no tasks, so a worker has nothing to run: import their modules by Fairlane(include=[…]) or "
    "app.autodiscover(package)"
)


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
    numbers what the code declares: an older deployment does not undo what a newer one has declared. `include` names
    the modules that hold tasks; workers, the command line and child processes import them, programs that only send
    jobs need not.
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
        include: Sequence[str] = (),
    ) -> None:
        found = Settings.from_env(os.environ) if settings is None else settings
        self.settings = found if url is None else msgspec.structs.replace(found, url=url)
        self.events = events or Events()
        self.tracer = tracer
        self.registry = Registry()
        self.hooks = Hooks()
        if isinstance(include, str):
            raise InvalidInput("include", f"must be a list of modules, such as [{include!r}]")
        self._include = [check_module("include", name) for name in include]
        self._packages: list[str] = []
        self._loaded = False
        self._clock = clock
        self._version = version
        self._queues: dict[str, QueueDeclaration] = {}
        self._sent = False
        self.creates_store = True
        """Off: a store that is not there is not made, and opening it raises `StoreMissing`."""
        self.declares_queues = True
        """Off: opening the store changes no settings there, for programs that only look."""
        self._schedules_declared = False
        self.connection = Connection(self.open_store, self._declare_queues, self.close)
        self.client = Client(self.connection, tracer=tracer, clock=clock, retention=self.settings.retention)
        self._turn_sessions = TurnSessions(
            self.connection, self.open_store, self.settings.intervals, self.settings.retention
        )
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

    def autodiscover(self, package: str) -> None:
        """Import every module of a package that is called ``tasks``, at any depth, when tasks are loaded.

        A package called ``tasks`` is imported with all its modules. Nothing is imported by this call itself, so it may
        stand below ``app = Fairlane()`` in a module that those modules import.
        """
        self._packages.append(check_module("autodiscover", package))
        self._loaded = False

    def load_tasks(self) -> None:
        """Import the modules of `include` and `autodiscover`. Workers, labs and the command line do so themselves."""
        if self._loaded:
            return
        for field, name in self._task_modules():
            import_named(field, name)
        self._loaded = True

    def _task_modules(self) -> list[tuple[str, str]]:
        found = [("include", name) for name in self._include]
        return found + [("autodiscover", name) for package in self._packages for name in task_modules(package)]

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
        declaration.declare(
            limit=limit, reserved=reserved_of(reserved), max_pending=max_pending, closed=closed_set(lanes)
        )
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

    def on_worker_start(self, hook: W) -> W:
        """Run `hook` with the worker before it begins, also in the child processes of isolated bodies.

            @app.on_worker_start
            async def connect(worker: RunningWorker) -> None:
                worker.state.pool = await asyncpg.create_pool(DSN)

        Bodies find it by ``current_worker().state.pool``. A hook that raises keeps the worker from starting.
        """
        self.hooks.add_start(hook)
        return hook

    def on_worker_stop(self, hook: W) -> W:
        """Run `hook` with the worker when its bodies have ended; all such hooks together have five seconds."""
        self.hooks.add_stop(hook)
        return hook

    def around_job(self, hook: A) -> A:
        """Let a generator, plain or async, stand around every body; the first that is declared is the outermost.

            @app.around_job
            def timed(job: RunningJob) -> Iterator[None]:
                began = time.monotonic()
                try:
                    yield  # the body runs here: this is its result, or raises what it raised
                finally:
                    log.info("%s took %.1f s", job.task, time.monotonic() - began)

        What a hook raises is how the run ends. What it catches goes on all the same.
        """
        self.hooks.add_around(hook)
        return hook

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
            self._turn_sessions,
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
        if there are four. With `burst` it stops when there is nothing left to do.
        """
        from .worker.settings import WorkerSettings
        from .worker.worker import Worker

        self.load_tasks()
        if not len(self.registry):
            raise FairlaneError(NO_TASKS)
        mine = self.settings
        served = queues or mine.queues or sorted(self.queue_names() | {"default"})
        settings = WorkerSettings(
            queues=dict(served) if isinstance(served, Mapping) else dict.fromkeys(served, 1),
            slots=mine.slots if slots is None else slots if isinstance(slots, Slots) else mine.slots_for(slots),
            pool=mine.pool if pool is None else pool,
            index=mine.index if index is None else index,
            grace=mine.grace if grace is None else seconds("grace", grace),
            burst=burst,
            manager=manager,
            intervals=mine.intervals,
            retention=mine.retention,
        )
        return Worker(
            self.connection.hold,
            self.open_store,
            self.registry,
            settings,
            release=self.connection.release,
            declare=self.declare,
            tracer=self.tracer,
            hooks=[self.hooks],
        )

    async def declare(self, store: Store) -> None:
        """Declare the queues, their limits and the schedules of the tasks to a store.

        A worker does so when it starts, every hour, and when the store has lost its data.
        """
        await self._configure(store)
        self._schedules_declared = True
        schedules = self.schedules()
        if schedules:
            await store.declare(schedules)

    # -- the store -----------------------------------------------------------------------------------------------

    async def open_store(self) -> Store:
        """Another store at the same place, for whoever needs one of his own; he closes it."""
        return InstrumentedStore(await self._opened(), self.events)

    async def _opened(self) -> Store:
        return await open_store(self.settings.url, clock=self._clock, create=self.creates_store)

    async def _declare_queues(self, store: Store) -> None:
        self._sent = True
        await self._configure(store)
        on_data_loss(store, partial(self._declare_again, store))

    async def _declare_again(self, store: Store) -> None:
        """The store has lost data: a worker's process declares everything, another one its queues."""
        await (self.declare(store) if self._schedules_declared else self._configure(store))

    async def _configure(self, store: Store) -> None:
        changes = [
            SettingsChange(queue=name, declared=queue.settings, version=self._version)
            for name, queue in self._queues.items()
        ]
        if changes and self.declares_queues:
            await store.configure(changes)

    async def close(self) -> None:
        """End what this process holds and close the store. The next call opens it again.

        While a worker of this application runs in the process, the store, the turns that are held and the thread of
        `blocking` stay: they are the worker's and its bodies' too, and end with the worker.
        """
        closed = True
        try:
            closed = await self._let_go()
        finally:
            if closed:
                # In a thread: what still runs there may need this loop to end.
                await asyncio.to_thread(self.blocking.stop)

    async def _let_go(self) -> bool:
        """Close the store. False: a worker holds it, and it is closed when that ends."""
        if not self.connection.give_up():
            return False
        try:
            await self._turn_sessions.close()
        finally:
            await self.connection.close()
            self._sent = False
        return True

    async def __aenter__(self) -> Fairlane:
        await self.connection.store()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    if not TYPE_CHECKING:
        # Type checkers know no such attribute, so that they refuse it too.
        def __getattr__(self, name: str) -> Any:
            raise foreign_words.no_attribute(self, "the application", name, foreign_words.APP)

    def __repr__(self) -> str:
        return f"<Fairlane at {without_password(self.settings.url)}, {len(self.registry)} tasks>"
