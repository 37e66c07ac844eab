"""The lab: what a test sees of an application that runs in it, in an async and in a blocking form."""

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
from .drain import Drained, LabTasks, LabWorker, Rehearsal
from .relocation import relocated
from .test_thread import Caller

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
    """Let an application live in a lab of its own for the length of an ``async with``.

        async with testing.embedded(app) as lab:
            await render.enqueue("ann", "a cat")
            await lab.drain()

    `clock` says when the test plays, such as ``ManualClock(datetime(2026, 3, 1, tzinfo=UTC).timestamp())``. `workers`
    is how many workers there are, for sticky keys and broadcasts, or how many in each pool: ``{"default": 2, "gpu":
    1}``. Tasks with ``isolate=True`` run in this process, and plain functions are not held to their timeout; with
    ``isolate="real"`` such tasks get a child process, whose own jobs go where the application points without a lab.
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
    """An application's store, clock and workers for one test. Made by `embedded`; its verbs are awaited."""

    def __init__(self, app: Fairlane, clock: ManualClock, workers: Workers, isolate: Isolate) -> None:
        if isolate not in ("inline", "real"):
            raise InvalidInput("isolate", "must be 'inline' or 'real'")
        pools = workers if isinstance(workers, Mapping) else {"default": workers}
        for pool, count in pools.items():
            check_count(f"workers of pool {pool}", count, least=0, most=1_000)
        self.clock = clock
        """Time moves only by this: ``lab.clock.advance(60)``."""
        self.blocking = BlockingLab(self)
        """The same verbs without await, for tests without an event loop."""
        self._app = app
        self._apart = isolate == "real"
        self._workers = [LabWorker(new_id(), pool) for pool, count in pools.items() for _ in range(count)]
        self._term = 0
        self._draining = False
        self._closed = False

    async def drain(self, *, limit: int = MOST_RUNS, errors: Errors = "record") -> Drained:
        """Run everything that can run by the lab's clock, until nothing is left, and tell what became of it.

        That includes retries and scheduled jobs that are due, slots of cron schedules that are due, and what the bodies
        enqueue themselves. Bodies run one after another in the order in which one worker would start them; one that
        waits for another job gets it run beside it. With ``errors="raise"`` the first exception of a body is raised
        here, as it was raised there; else it is only in the job, as in real life. After `limit` runs it gives up.

            await render.enqueue("ann", "a cat")            # its body raises the first time
            assert (await lab.drain()).retried == 1
            lab.clock.advance(60)                           # the back-off is over
            assert (await lab.drain()).completed == 1

        Of the slots that a schedule missed by more than a minute only the latest fires: to see a nightly task run on
        every day of a week, advance and drain day by day.
        """
        return await self.drain_for(None, limit, errors)

    async def run(self, handle: Handle[R]) -> R:
        """Run the body of one job and return what it returned, or raise what it raised. No other body runs.

        assert await lab.run(await double.enqueue(4)) == 8

        The job ends as it would in real life. One that cannot start now, because it is not due or its lane is taken, is
        refused with the reason.
        """
        result: R = await self.run_for(None, handle.id)
        return result

    async def jobs(self, task: Task[..., Any] | str | None = None, state: JobState | str | None = None) -> list[Job]:
        """The jobs there are, in the order they were enqueued: all of them, or those of a task or in a state.

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

    # -- for the blocking form, which runs plain functions in the thread of its caller -----------------------------

    async def drain_for(self, caller: Caller | None, limit: int, errors: Errors) -> Drained:
        """`drain`, with plain functions run by `caller`."""
        check_count("limit", limit, least=1)
        if errors not in ("record", "raise"):
            raise InvalidInput("errors", "must be 'record' or 'raise'")
        async with self._rehearsal(caller) as rehearsal:
            return await rehearsal.drain(limit, errors)

    async def run_for(self, caller: Caller | None, id: str) -> Any:
        """`run`, with plain functions run by `caller`."""
        store = await self._store()
        job = await find_job(store, id)
        async with self._rehearsal(caller) as rehearsal:
            if not await rehearsal.run_one(job):
                raise FairlaneError(f"job {id} cannot run now: {await self._app.handle(id).why()}")
        task = self._app.registry.get(job.task)
        result = (await find_job(store, id)).result
        return None if task is None else task.read_result(result)

    @asynccontextmanager
    async def _rehearsal(self, caller: Caller | None) -> AsyncIterator[Rehearsal]:
        if self._draining:
            raise FairlaneError("the lab is running jobs already: a body cannot drain the lab that runs it")
        self.check_open()
        # A body that closes the application must not close the store that its run ends in.
        store = await self._app.connection.hold()
        try:
            async with self._drawn_up(store, caller) as rehearsal:
                yield rehearsal
        finally:
            await self._app.connection.release()

    @asynccontextmanager
    async def _drawn_up(self, store: Store, caller: Caller | None) -> AsyncIterator[Rehearsal]:
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
        tasks = LabTasks(self._app.registry, caller, apart=self._apart)
        self._draining = True
        rehearsal = Rehearsal(self._app.connection, context, list(self._workers), tasks, self._app.tracer)
        try:
            async with lifetime([self._app.hooks], tasks.threads):
                try:
                    yield rehearsal
                finally:
                    await rehearsal.stop()
        finally:
            self._draining = False

    # -- the store -------------------------------------------------------------------------------------------------

    async def prepare(self, store: Store) -> None:
        """Lead, and put the workers in place, before anybody else sees the store. Doing so again changes nothing."""
        # Managers that the code under test brings along stay on standby, so time is the lab's alone.
        term = await store.lead("fairlane.testing", lease=LONGEST_SECONDS)
        assert term is not None, "nobody else can lead in a store that is new"
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
        """Refuse a call after the end: the application is where it was before, and nothing there is a test's to run."""
        if self._closed:
            raise FairlaneError("this lab is closed: use it inside its `with` block, or make another one")

    def close(self) -> None:
        """Refuse every further call."""
        self._closed = True
        self.blocking.close()


class BlockingLab:
    """A lab for tests without an event loop. `Lab` says what the verbs do; plain functions run in the test's thread."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._caller = Caller()

    @property
    def clock(self) -> ManualClock:
        """Time moves only by this."""
        return self._lab.clock

    def drain(self, *, limit: int = MOST_RUNS, errors: Errors = "record") -> Drained:
        """Run everything that can run, until nothing is left."""
        return self._wait_for(lambda: self._lab.drain_for(self._caller, limit, errors))

    def run(self, handle: BlockingHandle[R]) -> R:
        """Run the body of one job and return what it returned, or raise what it raised."""
        result: R = self._wait_for(lambda: self._lab.run_for(self._caller, handle.id))
        return result

    def jobs(self, task: Task[..., Any] | str | None = None, state: JobState | str | None = None) -> list[Job]:
        """The jobs there are, in the order they were enqueued."""
        return self._wait_for(lambda: self._lab.jobs(task, state))

    def enqueued(self, task: Task[..., Any]) -> list[_Call]:
        """The arguments of every job of a task, as they were sent."""
        return self._wait_for(lambda: self._lab.enqueued(task))

    def close(self) -> None:
        """End its thread."""
        self._caller.close()

    def _wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        self._lab.check_open()
        return self._caller.wait_for(work)


def _state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        raise InvalidInput("state", f"{state!r} is none of {', '.join(JobState)}") from None
