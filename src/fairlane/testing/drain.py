"""One drain: claims jobs for the lab's workers one by one, runs them, and writes their results.

It assumes that nothing else claims for these workers. A job runs alone, unless it waits for another job or a turn, or
takes very long: then the next job is started beside it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Literal

import msgspec

from ..errors import FairlaneError, JobFailed, Retry
from ..events import Tracer
from ..manager.admitter import Admitter
from ..manager.leader_context import LeaderContext
from ..manager.promoter import Promoter
from ..manager.scheduler import Scheduler
from ..manager.service import Service
from ..model import states
from ..model.job import Claimed, Held, Job, Priority
from ..model.session import Claim
from ..model.slots import FLOOR, MOST_SLOTS, Ask, Floor
from ..model.states import Move, Transition
from ..runtime.connection import Connection
from ..runtime.job_watcher import watched_jobs
from ..runtime.running_job import current_job
from ..task import Registry, Task
from ..worker.executor import Executor
from ..worker.run import Run, Stop
from ..worker.threads import RunsFunctions, Threads
from .test_thread import TestThread

MOMENT = 0.05
"""Seconds between two checks whether a job waits for another one."""
PATIENCE = 2.0
"""Seconds by the machine's clock after which a job is assumed to wait for something that another job provides."""
UNWIND_SECONDS = 3.0
"""How long running jobs may take to end when a drain is interrupted, before they are left behind."""
_threads = Threads(MOST_SLOTS)
"""Shared by all drains of the process: otherwise each would leave a thread behind that is idle for half a minute."""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What one `drain` did: how many runs there were, and how their jobs ended."""

    completed: int = 0
    failed: int = 0
    """Jobs that failed and are not retried."""
    cancelled: int = 0
    """Jobs that were cancelled, including those that expired."""
    retried: int = 0
    """Runs that failed and whose job is to be retried."""
    runs: int = 0


class LabWorker:
    """One worker of the lab: its session, and the jobs it has started in this drain."""

    def __init__(self, session: str, pool: str) -> None:
        self.session = session
        self.pool = pool
        self.number = 0
        self.floor = Floor()


class LabTasks(Registry):
    """The tasks of an application as the lab runs them: in this process, with the exceptions they raise kept."""

    def __init__(self, tasks: Registry, test_thread: TestThread | None, *, apart: bool) -> None:
        super().__init__()
        self._theirs = tasks
        self._apart = apart
        self.threads: RunsFunctions = _threads if test_thread is None else test_thread.threads(_threads)
        """Where plain functions and hooks run."""
        self.raised: dict[Held, BaseException] = {}

    def get(self, name: str) -> Task[..., Any] | None:
        task = self._theirs.get(name)
        if task is None or self._is_apart(task):
            return task
        here = copy.copy(task)
        here.isolate = False
        here.function = self._kept(task.function) if task.is_async else self._kept_plain(task.function)
        return here

    def suited(self, job: Claimed) -> Claimed:
        """The claim as the executor is to see it, so that it runs a plain function with a timeout in this process."""
        job = msgspec.structs.replace(job, backoff=msgspec.structs.replace(job.backoff, jitter=False))
        task = self._theirs.get(job.task)
        if task is None or self._is_apart(task):
            return job
        return msgspec.structs.replace(job, suspect=False, timeout=job.timeout if task.is_async else None)

    def _is_apart(self, task: Task[..., Any]) -> bool:
        return self._apart and task.isolate

    def _kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        async def body(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except BaseException as exc:
                self._keep(exc)
                raise

        return body

    def _kept_plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def body(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as exc:
                self._keep(exc)
                raise

        return body

    def _keep(self, exc: BaseException) -> None:
        # CancelledError is how a job is stopped. Raised in the test, it would cancel the test.
        if not isinstance(exc, asyncio.CancelledError):
            job = current_job()
            self.raised[Held(job.id, job.fence)] = exc


class Drain:
    """Runs jobs of the lab. Belongs to one event loop; `stop` must be called at the end."""

    def __init__(
        self,
        connection: Connection,
        context: LeaderContext,
        workers: list[LabWorker],
        tasks: LabTasks,
        tracer: Tracer | None,
    ) -> None:
        self._connection = connection
        self._watched_before = watched_jobs(connection)
        self._context = context
        self._store = context.store
        self._workers = workers
        self._tasks = tasks
        self._executor = Executor(
            tasks,
            MOST_SLOTS,
            self._ended,
            self._report,
            store=self._store,
            tracer=tracer,
            threads=tasks.threads,
            # There are no other workers to wait for.
            unknown_task=0.0,
        )
        self._services: list[Service] = [Promoter(context), Admitter(context), Scheduler(context)]
        self._sources: list[str | None] = [None]
        self._runs: dict[Run, LabWorker] = {}
        self._endings: list[tuple[Run, Transition | None]] = []
        self._progress: dict[Held, bytes] = {}
        self._news = asyncio.Event()
        self._counts = dict.fromkeys(Drained.__struct_fields__, 0)
        for worker in workers:
            worker.floor = Floor()

    async def drain(self, limit: int, errors: Literal["record", "raise"]) -> Drained:
        """Run everything that can run, until nothing is left."""
        await self.run_services()
        stuck = 0
        while True:
            if await self._start_next(limit):
                error = await self._next_results()
            elif await self.run_services():
                continue
            elif self._runs:
                running = len(self._runs)
                error = await self._next_results()
                stuck = stuck + 1 if len(self._runs) == running and self._waits() >= running else 0
                # Only the second time: the notification of a job that ended may be late.
                if stuck == 2:
                    raise FairlaneError(
                        "every running job waits for another job, and none can start by the lab's clock: await "
                        'lab.jobs(state="scheduled") lists those that are not due, and job.why() gives the reason'
                    )
            else:
                return Drained(**self._counts)
            if error is not None and errors == "raise":
                raise error

    async def run_one(self, job: Job) -> bool:
        """Run one job. False when it cannot start now; raises what its function raised."""
        await self.run_services()
        for worker in self._workers:
            asks = [Ask(source, job.priority, MOST_SLOTS) for source in (None, job.queue)]
            claimed = await self._claim(worker, asks, MOST_SLOTS)
            others = [states.take_back(other.held) for other in claimed if other.id != job.id]
            if others:
                await self._store.finish(worker.session, others)
            if len(others) < len(claimed):
                [mine] = [each for each in claimed if each.id == job.id]
                self._start(worker, mine)
                while self._runs:
                    error = await self._next_results()
                    if error is not None:
                        raise error
                if (exc := self._tasks.raised.get(mine.held)) is not None:
                    raise exc
                return True
        return False

    async def run_services(self) -> bool:
        """Run the services of a leader until nothing is due. True when anything changed."""
        context = self._context
        before = dict(context.counts)
        seen = await self._store.rescue(declare=False, term=context.term)
        context.counts["rescued"] += seen.retried + seen.failed + seen.cancelled + seen.drained
        for service in self._services:
            while await service.run_once() == 0.0:
                pass
        self._counts["cancelled"] += context.counts["expired"] - before["expired"]
        new = {queue.name for queue in await self._store.queues()} - set(self._sources)
        self._sources += sorted(new)
        return bool(new) or context.counts != before

    async def stop(self) -> None:
        """Stop running jobs, and hand them back."""
        for run in list(self._runs):
            self._executor.stop(run, Stop.HAND_BACK)
        with suppress(TimeoutError):
            async with asyncio.timeout(UNWIND_SECONDS):
                while self._runs:
                    await self._next_results()
        await self._executor.close()

    # -- starting ------------------------------------------------------------------------------------------------

    async def _start_next(self, limit: int) -> bool:
        for worker in self._workers:
            claimed = await self._claim(worker, self._asks(worker), 1)
            if claimed:
                break
        else:
            return False
        [job] = claimed
        if self._counts["runs"] >= limit:
            await self._store.finish(worker.session, [states.take_back(job.held)])
            raise FairlaneError(
                f"drain() has run {limit} jobs and there are more, next one of {job.task}: if a task enqueues itself "
                "again without a delay, give it one; if there really are so many, raise limit="
            )
        # The worker and the queue that were served last come last, so that all are served in rotation.
        self._workers.sort(key=lambda each: each is worker)
        source = job.queue if job.sticky is None else None
        self._sources.sort(key=lambda name: name == source)
        worker.floor.started(job.priority)
        self._start(worker, job)
        return True

    def _asks(self, worker: LabWorker) -> list[Ask]:
        due = [(priority, MOST_SLOTS // FLOOR) for priority in worker.floor.due()]
        wishes: list[tuple[Priority, int | None]] = [*due, *((priority, None) for priority in Priority)]
        return [Ask(source, priority, 1, below) for priority, below in wishes for source in self._sources]

    async def _claim(self, worker: LabWorker, asks: list[Ask], total: int) -> list[Claimed]:
        claim = Claim(number=worker.number + 1, asks=tuple(asks), total=total)
        claimed = await self._store.claim(worker.session, claim)
        if claimed:
            worker.number = claim.number
        return claimed

    def _start(self, worker: LabWorker, job: Claimed) -> None:
        run = Run(self._tasks.suited(job), worker.session)
        self._runs[run] = worker
        self._counts["runs"] += 1
        self._executor.start(run)

    # -- ending --------------------------------------------------------------------------------------------------

    def _ended(self, run: Run, transition: Transition | None) -> None:
        if run.committed:
            self._progress.pop(run.claimed.held, None)
        self._endings.append((run, transition))
        self._news.set()

    def _report(self, held: Held, value: bytes) -> None:
        self._progress[held] = value

    async def _next_results(self) -> BaseException | None:
        """Wait until a job ends or the next one is to start, and write the results. Returns the first error."""
        waits = self._waits()
        clock = asyncio.get_running_loop().time
        until = clock() + PATIENCE
        while not self._endings and self._waits() <= waits and clock() < until:
            with suppress(TimeoutError):
                async with asyncio.timeout(MOMENT):
                    await self._news.wait()
            self._news.clear()
            if not self._endings:
                await self._stop_cancelled()
        endings, self._endings = self._endings, []
        errors = [await self._write(run, transition) for run, transition in endings]
        return next((error for error in errors if error is not None), None)

    def _waits(self) -> int:
        """How many jobs and turns are waited for now, beyond those of before the drain."""
        return watched_jobs(self._connection) - self._watched_before

    async def _stop_cancelled(self) -> None:
        """Stop running jobs that were cancelled. As in a worker, a renewal names them."""
        for worker in self._workers:
            runs = [run for run, its in self._runs.items() if its is worker]
            if runs:
                await self._write_progress(worker)
                held = [run.claimed.held for run in runs]
                renewal = await self._store.renew(worker.session, held, claim=worker.number)
                for run in runs:
                    if run.claimed.id in renewal.cancel and run.stop is None:
                        self._executor.stop(run, Stop.CANCEL)

    async def _write_progress(self, worker: LabWorker) -> None:
        mine = {run.claimed.held for run, its in self._runs.items() if its is worker}
        reports = [(held, self._progress.pop(held)) for held in list(self._progress) if held in mine]
        if reports:
            await self._store.progress(worker.session, reports)

    async def _write(self, run: Run, transition: Transition | None) -> BaseException | None:
        """Write the result of a run. Returns its error, if it failed."""
        worker = self._runs[run]
        if run.error is not None:
            # Raised by the task's function, or by a hook around it.
            self._tasks.raised[run.claimed.held] = run.error
        await self._write_progress(worker)
        del self._runs[run]
        if transition is None:
            return None
        [verdict] = (await self._store.finish(worker.session, [transition])).verdicts
        if verdict.state is not None and verdict.state.final:
            self._counts[verdict.state.value] += 1
        elif transition.move is Move.RETRY:
            self._counts["retried"] += 1
        return self._error_of(run.claimed, transition)

    def _error_of(self, job: Claimed, transition: Transition) -> BaseException | None:
        if transition.move not in (Move.RETRY, Move.FAIL, Move.DECLINE):
            return None
        exc = self._tasks.raised.get(job.held)
        if exc is None:
            # Not an exception of the function: a bad payload, an unknown task, the timeout.
            return JobFailed(job.id, str(transition.reason), transition.error)
        if isinstance(exc, Retry):
            return None
        exc.add_note(f"in job {job.id} of task {job.task}, attempt {job.attempt}")
        return exc
