"""The application object: declares tasks, queues and lanes, and sends jobs.

Creating one only reads the settings: the store is opened when it is first needed, so a module with an app can be
imported, forked and spawned freely. It contains no logic: the registry holds the tasks, and the client the verbs.
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
    # Only worker processes import it.
    from .worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=WorkerHook)
A = TypeVar("A", bound=AroundHook)


NO_TASKS = (
    "the application has no tasks, so a worker has nothing to run; import the modules that define them with "
    "Fairlane(include=[…]) or app.autodiscover(package)"
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
    """An application: its tasks, its queues, and its store.

    The store is at `url`, or at the URL of `settings`, which are read from the environment unless they are given.
    `version` numbers the declarations: an older deployment does not undo what a newer one has declared. `include` lists
    the modules that define tasks; workers, the command line and child processes import them, programs that only send
    jobs do not need them.
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
        self.child_modules: list[Callable[[], Sequence[str]]] = []
        """Each returns the modules that a child process of a worker imports before any task; for integrations."""
        self._loaded = False
        self._clock = clock
        self._version = version
        self._queues: dict[str, QueueDeclaration] = {}
        self._sent = False
        self.creates_store = True
        """If False, a missing store is not created, and opening it raises `StoreMissing`."""
        self.declares_queues = True
        """If False, opening the store changes no settings; for programs that only read."""
        self._schedules_declared = False
        self.connection = Connection(self.open_store, self._declare_queues, self.close)
        self.client = Client(self.connection, tracer=tracer, clock=clock, retention=self.settings.retention)
        self._turn_sessions = TurnSessions(
            self.connection, self.open_store, self.settings.intervals, self.settings.retention
        )
        self.blocking = BlockingClient(self.client, self.turn, self._close_store)

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
            raise InvalidInput("task", f"must decorate a function, not a {type(function).__name__}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidInput(
                "task", f"{function.__name__} is a generator; a job has one result, so return it instead"
            )
        kind = AsyncTask if inspect.iscoroutinefunction(function) else PlainTask
        task: Task[..., Any] = kind(self, function, settings)
        self.registry.add(task)
        return task

    def autodiscover(self, package: str) -> None:
        """Import every module named ``tasks`` in a package, at any depth, when tasks are loaded.

        A package named ``tasks`` is imported with all its modules. This call itself imports nothing, so it may follow
        ``app = Fairlane()`` in a module that those modules import.
        """
        self._packages.append(check_module("autodiscover", package))
        self._loaded = False

    def load_tasks(self) -> None:
        """Import the modules of `include` and `autodiscover`. Workers, labs and the command line call this."""
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

        `lanes` is the closed set of its lanes; jobs for other lanes are rejected. Declaring a queue again adds to it.
        """
        check_name("queue", name)
        if self._sent:
            raise FairlaneError(
                f"queue {name!r} is declared after the store was opened; "
                "declare queues where the app is created, before the first call"
            )
        declaration = self._queues.get(name) or QueueDeclaration(name)
        declaration.declare(
            limit=limit, reserved=reserved_of(reserved), max_pending=max_pending, closed=closed_set(lanes)
        )
        self._queues[name] = declaration
        return declaration

    def queue_names(self) -> set[str]:
        """The queues that its tasks use or that it declares."""
        return self.registry.queues() | self._queues.keys()

    def schedules(self) -> list[Schedule]:
        """The schedules of its tasks that have a `cron` or `every`."""
        return [
            Schedule(name=task.name, timetable=task.timetable, job=template_of(task.call().job))
            for task in self.registry
            if task.timetable is not None
        ]

    def on_worker_start(self, hook: W) -> W:
        """Call `hook` with the worker before it starts, also in the child processes of isolated tasks.

            @app.on_worker_start
            async def connect(worker: RunningWorker) -> None:
                worker.state.pool = await asyncpg.create_pool(DSN)

        Task functions read it from ``current_worker().state.pool``. If a hook raises, the worker does not start.
        """
        self.hooks.add_start(hook)
        return hook

    def on_worker_stop(self, hook: W) -> W:
        """Call `hook` with the worker after its running jobs have ended; all stop hooks together have five seconds."""
        self.hooks.add_stop(hook)
        return hook

    def around_job(self, hook: A) -> A:
        """Wrap a generator, plain or async, around every run of a task function; the first declared is the outermost.

            @app.around_job
            def timed(job: RunningJob) -> Iterator[None]:
                began = time.monotonic()
                try:
                    yield  # the task function runs here: evaluates to its result, or raises its exception
                finally:
                    log.info("%s took %.1f s", job.task, time.monotonic() - began)

        An exception raised by a hook ends the run. An exception that a hook catches is raised again all the same.
        """
        self.hooks.add_around(hook)
        return hook

    # -- sending -------------------------------------------------------------------------------------------------

    def enqueue(self, call: Call[R]) -> Coroutine[Any, Any, Handle[R]]:
        """Store the job of a call, as `task.enqueue(…)` does."""
        return self.client.enqueue(call)

    async def enqueue_many(self, calls: Sequence[Call[R]], progress: OnSent | None = None) -> list[Handle[R]]:
        """Store any number of jobs, 1,000 at a time. After an error the same list may be sent again."""
        return await self.client.enqueue_many(calls, progress)

    async def enqueue_on(self, connection: object, *calls: Call[R]) -> list[Handle[R]]:
        """Store jobs in the transaction that is open on your own connection: they exist once you commit it."""
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

        `on_position` is called with the position in line whenever it changes. `timeout` bounds the wait in this process
        and raises `TimeoutError`; after `expires` seconds the store ends the wait, which raises `JobCancelled`.
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
        """The handle of a job that was sent before. With its task, the result is decoded into the task's type."""
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
        """A worker in this process and event loop: ``await app.worker(slots=4).run()`` runs until it is stopped.

        Defaults are those of ``fairlane worker``. If `slots` is a number of at least four, one slot is reserved for
        high priority. With `burst` it stops when there is nothing left to do.
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
            slots=slots if isinstance(slots, Slots) else mine.slots_for(slots),
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
            modules=[name for names in self.child_modules for name in names()],
            hooks=[self.hooks],
        )

    async def declare(self, store: Store) -> None:
        """Declare the queues, their limits and the schedules of the tasks to a store.

        A worker does this when it starts, every hour, and after the store has lost data.
        """
        await self._configure(store)
        self._schedules_declared = True
        schedules = self.schedules()
        if schedules:
            await store.declare(schedules)

    # -- the store -----------------------------------------------------------------------------------------------

    async def open_store(self) -> Store:
        """Open a separate store at the same URL. The caller closes it."""
        return InstrumentedStore(await self._opened(), self.events)

    async def _opened(self) -> Store:
        self.settings.check_store()
        return await open_store(self.settings.url, clock=self._clock, create=self.creates_store)

    async def _declare_queues(self, store: Store) -> None:
        self._sent = True
        await self._configure(store)
        on_data_loss(store, partial(self._declare_again, store))

    async def _declare_again(self, store: Store) -> None:
        """Declare again after data loss: a worker process everything, any other process only its queues."""
        await (self.declare(store) if self._schedules_declared else self._configure(store))

    async def _configure(self, store: Store) -> None:
        changes = [
            SettingsChange(queue=name, declared=queue.settings, version=self._version)
            for name, queue in self._queues.items()
        ]
        if changes and self.declares_queues:
            await store.configure(changes)

    async def close(self) -> None:
        """Release the turns of this process and close the store. The next call opens it again.

        While a worker of this application runs in the process, the store, the held turns and the thread of `blocking`
        stay open: the worker and its running jobs use them too, and they are closed with the worker.
        """
        closed = True
        try:
            closed = await self._close_store()
        finally:
            if closed:
                # In a thread: the calls that still run there may need this loop to finish.
                await asyncio.to_thread(self.blocking.stop)

    async def _close_store(self) -> bool:
        """Close the store. False if a worker uses it: then it is closed when the worker ends."""
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
        # Hidden from type checkers, so that they report unknown attributes.
        def __getattr__(self, name: str) -> Any:
            raise foreign_words.no_attribute(self, "the application", name, foreign_words.APP)

    def __repr__(self) -> str:
        return f"<Fairlane at {without_password(self.settings.url)}, {len(self.registry)} tasks>"
