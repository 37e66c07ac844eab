"""The lab: how a test runs and inspects the jobs of an application, in an async and in a blocking form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar
from unittest.mock import _Call, call

from ..app import Fairlane
from ..blocking import BlockingHandle
from ..errors import FairlaneError, InvalidInput
from ..handle import Handle, find_job
from ..manager.leader_context import COUNTED, Contact, LeaderContext, StoreClock
from ..model.ids import new_id
from ..model.job import Job, JobState
from ..model.names import LONGEST_SECONDS, check_count
from ..model.reading import MOST_PER_PAGE, Filter
from ..model.session import NewSession, SessionKind
from ..model.slots import MOST_SLOTS, Slots
from ..store.clock import ManualClock
from ..store.port import Store
from ..task import Task
from ..worker.lifetime import lifetime
from .drain import Drain, Drained, LabTasks, LabWorker
from .relocation import relocated
from .test_thread import TestThread

R = TypeVar("R")
T = TypeVar("T")
Errors = Literal["record", "raise"]
Isolate = Literal["inline", "real"]
Workers = int | Mapping[str, int]
MOST_RUNS = 10_000


@asynccontextmanager
async def embedded(
    app: Fairlane, *, clock: ManualClock | None = None, workers: Workers = 1, isolate: Isolate = "inline"
) -> AsyncIterator[Lab]:
    """Move an application to a lab of its own for the duration of an ``async with``.

        async with testing.embedded(app) as lab:
            await render.enqueue("ann", "a cat")
            await lab.drain()

    `clock` sets the time of the test, such as ``ManualClock(datetime(2026, 3, 1, tzinfo=UTC).timestamp())``. `workers`
    is the number of workers, for sticky keys and broadcasts, or the number in each pool: ``{"default": 2, "gpu": 1}``.
    Tasks with ``isolate=True`` run in this process, and the timeouts of plain functions are ignored; with
    ``isolate="real"`` such tasks get a child process, whose own jobs go to the application's store outside of the lab.
    """
    with laid_out(app, clock=clock, workers=workers, isolate=isolate) as lab:
        yield lab


@contextmanager
def embedded_blocking(
    app: Fairlane, *, clock: ManualClock | None = None, workers: Workers = 1, isolate: Isolate = "inline"
) -> Iterator[BlockingLab]:
    """`embedded` for tests without an event loop.

    with testing.embedded_blocking(app) as lab:
        render.blocking.enqueue("ann", "a cat")
        lab.drain()
    """
    with laid_out(app, clock=clock, workers=workers, isolate=isolate) as lab:
        yield lab.blocking


@contextmanager
def laid_out(
    app: Fairlane, *, clock: ManualClock | None = None, workers: Workers = 1, isolate: Isolate = "inline"
) -> Iterator[Lab]:
    """A lab for both kinds of tests, entered and left with or without a running event loop."""
    app.load_tasks()
    lab = Lab(app, clock or ManualClock(), workers, isolate)
    try:
        with relocated(app, lab.clock, lab.prepare):
            yield lab
    finally:
        lab.close()


class Lab:
    """An application's store, clock and workers for one test. Made by `embedded`."""

    def __init__(self, app: Fairlane, clock: ManualClock, workers: Workers, isolate: Isolate) -> None:
        if isolate not in ("inline", "real"):
            raise InvalidInput("isolate", "must be 'inline' or 'real'")
        pools = workers if isinstance(workers, Mapping) else {"default": workers}
        for pool, count in pools.items():
            check_count(f"workers of pool {pool}", count, least=0, most=1_000)
        self.clock = clock
        """Time moves only by this: ``lab.clock.advance(60)``."""
        self.blocking = BlockingLab(self)
        """The same methods without await, for tests without an event loop."""
        self._app = app
        self._apart = isolate == "real"
        self._workers = [LabWorker(new_id(), pool) for pool, count in pools.items() for _ in range(count)]
        self._term = 0
        self._busy = False
        self._closed = False

    async def drain(self, *, limit: int = MOST_RUNS, errors: Errors = "record") -> Drained:
        """Run everything that can run by the lab's clock, until nothing is left, and return the counts.

        That includes retries and scheduled jobs that are due, slots of cron schedules that are due, and jobs that other
        jobs enqueue. Jobs run one after another in the order in which one worker would start them; if a job waits for
        another one, that one runs beside it. With ``errors="raise"`` the first exception of a job is raised here;
        otherwise it is only recorded in the job, as in production. Raises an error after `limit` runs.

            await render.enqueue("ann", "a cat")            # raises the first time
            assert (await lab.drain()).retried == 1
            lab.clock.advance(60)                           # the back-off is over
            assert (await lab.drain()).completed == 1

        Of the slots that a schedule missed by more than a minute only the latest fires: to see a nightly task run on
        every day of a week, advance and drain day by day.
        """
        return await self.drain_for(None, limit, errors)

    async def run(self, handle: Handle[R]) -> R:
        """Run one job and return what its function returned, or raise what it raised. No other job runs.

        assert await lab.run(await double.enqueue(4)) == 8

        The job ends as it would in production. If it cannot start now, because it is not due or its lane is at its
        limit, an error gives the reason.
        """
        result: R = await self.run_for(None, handle.id)
        return result

    async def jobs(self, task: Task[..., Any] | str | None = None, state: JobState | str | None = None) -> list[Job]:
        """The jobs in the lab, in the order they were enqueued: all of them, or those of a task or in a state.

        assert [job.lane for job in await lab.jobs(render, "failed")] == ["user:ann"]
        """
        store = await self._store()
        name = task.name if isinstance(task, Task) else None if task is None else self._app.registry.find(task).name
        where = Filter(task=name, state=None if state is None else _state(state))
        found: list[Job] = []
        cursor: str | None = None
        while True:
            page = await store.find(where, limit=MOST_PER_PAGE, cursor=cursor)
            found += page.jobs
            cursor = page.cursor
            if cursor is None:
                return found[::-1]

    async def enqueued(self, task: Task[..., Any]) -> list[_Call]:
        """The arguments of every job of a task, finished or not, as they were sent, to compare with mock's `call`.

            from unittest.mock import call

            assert await lab.enqueued(send_mail) == [call("ann@x"), call("bob@x", copy=True)]

        A broadcast counts once, however many workers run a copy.
        """
        sent = [task.arguments.read(job.payload) for job in await self.jobs(task) if job.parent is None]
        return [call(*args, **kwargs) for args, kwargs in sent]

    # -- for the blocking form, which runs plain functions in the test's thread ------------------------------------

    async def drain_for(self, test_thread: TestThread | None, limit: int, errors: Errors) -> Drained:
        """`drain`, with plain functions run in `test_thread`."""
        check_count("limit", limit, least=1)
        if errors not in ("record", "raise"):
            raise InvalidInput("errors", "must be 'record' or 'raise'")
        async with self._draining(test_thread) as drain:
            return await drain.drain(limit, errors)

    async def run_for(self, test_thread: TestThread | None, id: str) -> Any:
        """`run`, with plain functions run in `test_thread`."""
        store = await self._store()
        job = await find_job(store, id)
        async with self._draining(test_thread) as drain:
            if not await drain.run_one(job):
                raise FairlaneError(f"job {id} cannot run now: {await self._app.handle(id).why()}")
        task = self._app.registry.get(job.task)
        result = (await find_job(store, id)).result
        return None if task is None else task.read_result(result)

    @asynccontextmanager
    async def _draining(self, test_thread: TestThread | None) -> AsyncIterator[Drain]:
        if self._busy:
            raise FairlaneError("the lab is already running jobs: a job cannot drain the lab that runs it")
        self.check_open()
        # A job that closes the application must not close the store that its result is written to.
        store = await self._app.connection.hold()
        try:
            async with self._prepared(store, test_thread) as drain:
                yield drain
        finally:
            await self._app.connection.release()

    @asynccontextmanager
    async def _prepared(self, store: Store, test_thread: TestThread | None) -> AsyncIterator[Drain]:
        await self._app.declare(store)
        monotonic = self.clock.monotonic
        context = LeaderContext(
            store=store,
            term=self._term,
            intervals=self._app.settings.intervals,
            contact=Contact(monotonic),
            clock=StoreClock(monotonic),
            counts=dict.fromkeys(COUNTED, 0),
        )
        tasks = LabTasks(self._app.registry, test_thread, apart=self._apart)
        self._busy = True
        drain = Drain(self._app.connection, context, list(self._workers), tasks, self._app.tracer)
        try:
            async with lifetime([self._app.hooks], tasks.threads):
                try:
                    yield drain
                finally:
                    await drain.stop()
        finally:
            self._busy = False

    # -- the store -------------------------------------------------------------------------------------------------

    async def prepare(self, store: Store) -> None:
        """Become leader and register the workers, before other code gets the store. Repeating it changes nothing."""
        # Managers of the code under test stay on standby, so that only the lab runs the services.
        term = await store.lead("fairlane.testing", lease=LONGEST_SECONDS)
        assert term is not None
        assert term.session == "fairlane.testing", "a new store has no other leader"
        self._term = term.number
        queues = tuple(sorted(self._app.queue_names() | {"default"}))
        for worker in self._workers:
            await store.register(
                NewSession(
                    id=worker.session,
                    kind=SessionKind.WORKER,
                    lease=LONGEST_SECONDS,
                    pool=worker.pool,
                    queues=queues,
                    slots=Slots(total=MOST_SLOTS),
                )
            )
        await self._app.declare(store)

    async def _store(self) -> Store:
        self.check_open()
        return await self._app.connection.store()

    def check_open(self) -> None:
        """Reject a call after the end: the application is back in its own store, whose jobs a test must not run."""
        if self._closed:
            raise FairlaneError("this lab is closed: use it inside its `with` block, or make another one")

    def close(self) -> None:
        """Reject every further call."""
        self._closed = True
        self.blocking.close()


class BlockingLab:
    """A lab for tests without an event loop; see `Lab` for its methods. Plain functions run in the test's thread."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._test_thread = TestThread()

    @property
    def clock(self) -> ManualClock:
        """Time moves only by this."""
        return self._lab.clock

    def drain(self, *, limit: int = MOST_RUNS, errors: Errors = "record") -> Drained:
        """Run everything that can run, until nothing is left."""
        return self._wait_for(lambda: self._lab.drain_for(self._test_thread, limit, errors))

    def run(self, handle: BlockingHandle[R]) -> R:
        """Run one job and return what its function returned, or raise what it raised."""
        result: R = self._wait_for(lambda: self._lab.run_for(self._test_thread, handle.id))
        return result

    def jobs(self, task: Task[..., Any] | str | None = None, state: JobState | str | None = None) -> list[Job]:
        """The jobs in the lab, in the order they were enqueued."""
        return self._wait_for(lambda: self._lab.jobs(task, state))

    def enqueued(self, task: Task[..., Any]) -> list[_Call]:
        """The arguments of every job of a task, as they were sent."""
        return self._wait_for(lambda: self._lab.enqueued(task))

    def close(self) -> None:
        """End its thread."""
        self._test_thread.close()

    def _wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        self._lab.check_open()
        return self._test_thread.wait_for(work)


def _state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        raise InvalidInput("state", f"{state!r} is none of {', '.join(JobState)}") from None
