"""Runs bodies: coroutines on the loop, plain functions in threads, and what must be killable in child processes.

Each step is total: whatever a body does, it ends as one transition, or as none when the claim was lost. A body that is
stopped keeps its slot until it has really ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import random
from typing import Any, Protocol

import msgspec

from ..events import Tracer
from ..hooks import steps_on
from ..model import states
from ..model.job import Claimed, Held, Reason
from ..model.retry import may_retry
from ..model.states import Transition
from ..runtime import running_job
from ..runtime.running_job import RunningJob
from ..store.port import Store
from ..store.transactions import RunTransaction
from ..task import Registry, Task
from . import body
from .isolation import Crashed, Isolation, importable
from .run import Run, Stop
from .threads import RunsFunctions, Threads

logger = logging.getLogger("fairlane.worker")
Ended = Callable[[Run, Transition | None], None]
MANY = 20
"""Jobs of a claim that do not all begin in the same turn of the loop."""
START_UP_SECONDS = 60.0
"""What a child process may take to import an application."""
CLEAN_UP_SECONDS, CLEAN_UP_WITHOUT_CONTACT = 2.0, 0.3
MOST_NAMED = 1_000
"""Unknown tasks that are logged, once each."""
AGAIN_SECONDS = 5.0
"""After this a job is tried again that no child process could be started for: uncharged, for it never began."""


class CrashMarks(Protocol):
    """Where a worker under a supervisor writes down what must survive it."""

    def session(self, id: str) -> None:
        """It is about to register this session."""

    def beat(self) -> None:
        """The session was renewed."""

    def begin(self, held: Held) -> int:
        """A body begins."""

    def end(self, slot: int) -> None:
        """The store knows how it ended."""


class Executor:
    """Starts bodies and tells `ended` how each one ended."""

    def __init__(
        self,
        registry: Registry,
        slots: int,
        ended: Ended,
        report: running_job.Report,
        *,
        store: Store | None = None,
        marks: CrashMarks | None = None,
        tracer: Tracer | None = None,
        threads: RunsFunctions | None = None,
        torn_down: Callable[[], bool] = lambda: False,
        modules: Sequence[str] = (),
        unknown_task: float = states.UNKNOWN_TASK_SECONDS,
    ) -> None:
        self._registry = registry
        self._ended = ended
        self._report = report
        self._store = store
        self._marks = marks
        self._tracer = tracer
        self._torn_down = torn_down
        """Whether somebody cancels the worker itself, such as `asyncio.run` when the program around it ends."""
        self._threads = threads or Threads(slots)
        self._isolation = Isolation(most=slots, modules=modules)
        self._suspects = asyncio.Lock()
        self._timed: set[Run] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._unknown_task = unknown_task
        self._declined: set[str] = set()

    def start(self, run: Run) -> None:
        """Begin the body of a claimed job. One whose task is not known here is declined, and nothing of it begins."""
        if self._registry.get(run.claimed.task) is None:
            run.declined = True
            self._end(run, self._decline(run.claimed))
            return
        run.body = asyncio.get_running_loop().create_task(self._run(run))

    def start_all(self, runs: list[Run]) -> None:
        """Begin the bodies; of many, half in the next turn of the loop.

        Short bodies of the first half have ended by then, so that the store writes their endings while those of the
        second half run, instead of one waiting for the other.
        """
        half = len(runs) // 2 if len(runs) >= MANY else len(runs)
        for run in runs[:half]:
            self.start(run)
        if runs[half:]:
            asyncio.get_running_loop().call_soon(self._start_rest, runs[half:])

    def _start_rest(self, runs: list[Run]) -> None:
        for run in runs:
            if not run.ended:  # stopped meanwhile
                self.start(run)

    def stop(self, run: Run, why: Stop) -> None:
        """End a body. The first reason counts, except that a lost claim leaves nothing else to say."""
        if run.ended:
            return
        first = run.stop is None
        if first or why is Stop.LOST:
            run.stop = why
        if why not in (Stop.HAND_BACK, Stop.CONTACT) and run.running is not None:
            run.running.request_cancel()
        if run.in_thread:
            # It cannot be stopped, so it keeps its slot until it ends; only a stop of the worker leaves it behind.
            if why is Stop.HAND_BACK:
                self.abandon(run)
            return
        if first and run.body is not None:
            # Once only: a body that cleans up must not be interrupted in that too.
            run.body.cancel()
        if not run.begun:
            # A task that is cancelled before its first step never gets to say how it ended.
            self._end(run, self._stopped(run))

    def abandon(self, run: Run) -> None:
        """Let go of a body that does not end; whatever it does later is not written."""
        if not run.ended:
            run.stop = run.stop or Stop.HAND_BACK
            self._end(run, self._stopped(run))
            if run.body is not None:
                run.body.cancel()

    def end_lost(self, runs: Iterable[Run]) -> None:
        """Give back what somebody else has cancelled before its first step: nothing of it will tell that it is over."""
        for run in [run for run in runs if run.body is not None and run.body.done() and not run.ended]:
            self.abandon(run)

    async def close(self) -> None:
        """End the child processes."""
        if self._sweep is not None:
            self._sweep.cancel()
        await self._isolation.close()

    # -- one body ----------------------------------------------------------------------------------------------------

    async def _run(self, run: Run) -> None:
        run.begun = True
        run.began_at = time.monotonic()
        transition: Transition | None = None
        try:
            transition = await self._traced(run)
        except Exception as exc:
            # Nothing a body or a tracer does may leave a job without an ending.
            logger.exception("the run of job %s ended unusually", run.claimed.id)
            failed = body.Raised(reason=Reason.ERROR, error=f"{type(exc).__name__} in the worker", group="worker")
            transition = body.transition_of(failed, run.claimed)
        except GeneratorExit as exc:
            if not _is_stepping(run):
                # The event loop is gone, and nobody is left to be told anything.
                raise
            # A body has raised it, or has awaited what did: that closes the frames between, which cannot answer.
            transition = self._raised(run.claimed, exc) if run.stop is None else self._stopped(run)
        finally:
            if not run.ended:
                self._end(run, transition)

    async def _traced(self, run: Run) -> Transition | None:
        if self._tracer is None:
            return await self._transition(run)
        transition: Transition | None = None
        decided = False
        try:
            with self._tracer.run(run.claimed) as tell:
                transition = await self._transition(run)
                decided = True
                if transition is not None:
                    tell(transition)
        except Exception:
            logger.exception("the tracer failed around job %s", run.claimed.id)
            if not decided:
                return await self._transition(run)
        return transition

    async def _transition(self, run: Run) -> Transition | None:
        job = run.claimed
        try:
            ending = await self._ending(run, job)
        except asyncio.CancelledError as exc:
            if run.stop is None and _is_cancelled(run):
                # By somebody else, who may have cancelled every task of the loop: not for this body to pay for.
                run.stop = Stop.HAND_BACK
            # A body may raise it by itself; that is an error like any other.
            return self._stopped(run) if run.stop is not None else self._raised(job, exc)
        except GeneratorExit:
            # See `_run`: which of two things it means is known there alone.
            raise
        except BaseException as exc:
            self._notice_tear_down(run)
            # Also SystemExit: a body does not end the worker.
            return self._stopped(run) if run.stop is not None else self._raised(job, exc)
        transition = _crashed(job, ending) if isinstance(ending, Crashed) else body.transition_of(ending, job)
        run.committed = isinstance(ending, body.Returned) and ending.committed
        self._notice_tear_down(run)
        if run.stop is not None and transition.move is not states.Move.COMPLETE:
            return self._stopped(run)
        return transition

    def _raised(self, job: Claimed, exc: BaseException) -> Transition:
        return body.transition_of(body.raised(exc, self._registry.get(job.task)), job)

    def _notice_tear_down(self, run: Run) -> None:
        """A body that was cancelled together with its worker is handed back: nobody here has asked it to end.

        An event loop that is torn down cancels all its tasks in one sweep, before any of them goes on. So the worker's
        task is marked by the time a body has ended of that.
        """
        if run.stop is None and _is_cancelled(run) and self._torn_down():
            run.stop = Stop.HAND_BACK

    async def _ending(self, run: Run, job: Claimed) -> body.Ending | Crashed:
        task = self._registry.get(job.task)
        assert task is not None, "a task that is not known is declined before its body begins"
        if job.suspect or task.isolate or (not task.is_async and job.timeout is not None):
            return await self._apart(run, task, job)
        return await self._here(run, task, job)

    async def _here(self, run: Run, task: Task[..., Any], job: Claimed) -> body.Ending:
        self._mark(run)
        run.entered = True
        self._time(run)
        transact = partial(self._transact, run) if task.is_async and self._store is not None else None
        run.running = RunningJob(job, self._report, run.deadline, transact)
        run.running.enter()
        if not task.is_async:
            run.in_thread = True
            step = steps_on(asyncio.get_running_loop())
            return await self._threads.run(body.run_plain, task, job, run.running, step)
        return await body.run_coroutine(task, job, run.running)

    def _transact(self, run: Run) -> RunTransaction:
        return RunTransaction(self._get_store, run.session, run.claimed.held)

    async def _get_store(self) -> Store:
        assert self._store is not None
        return self._store

    async def _apart(self, run: Run, task: Task[..., Any], job: Claimed) -> body.Ending | Crashed:
        if not importable(task):
            # A child process cannot find it. One at a time: of several suspects, the others have then not begun when
            # one kills its process.
            async with self._suspects:
                return await self._here(run, task, job)
        self._mark(run)
        if job.timeout is not None:
            # The time of a body begins when the child has imported it; that itself must end some day too.
            self._watch(run, time.monotonic() + job.timeout + START_UP_SECONDS)
        ending = await self._isolation.run(
            task,
            job,
            session=run.session,
            report=self._report,
            begun=lambda: setattr(run, "entered", True),
            started=lambda: self._time(run),
            patience=lambda: _patience(run),
        )
        rule = task.retry_rule
        if (
            isinstance(ending, body.Raised)
            and ending.kinds
            and rule is not None
            and not rule.allows_named(ending.kinds)
        ):
            return msgspec.structs.replace(ending, final=True)
        return ending

    def _decline(self, job: Claimed) -> Transition:
        if job.task not in self._declined and len(self._declined) < MOST_NAMED:
            self._declined.add(job.task)
            logger.warning(
                "task %s is not known here: its jobs (first %s) are left to workers that know it", job.task, job.id
            )
        error = f"no worker that claimed it had a task {job.task!r}; deploy one that has, or rename the task back"
        return states.decline(job.held, error, patience=self._unknown_task)

    def _mark(self, run: Run) -> None:
        if self._marks is not None:
            run.mark = self._marks.begin(run.claimed.held)

    def _stopped(self, run: Run) -> Transition | None:
        job = run.claimed
        if run.stop is Stop.LOST:
            return None
        if run.stop is Stop.CANCEL:
            return states.cancel(job.held)
        if run.stop is Stop.TIMEOUT:
            error = f"the run took longer than its timeout of {job.timeout:g} s"
            return body.transition_of(body.Raised(reason=Reason.TIMEOUT, error=error, group="timeout"), job)
        return states.hand_back(job.held) if run.entered else states.take_back(job.held)

    def _end(self, run: Run, transition: Transition | None) -> None:
        run.ended = True
        if run.began_at is not None:
            run.seconds = time.monotonic() - run.began_at
        self._timed.discard(run)
        if run.running is not None:
            run.running.leave()
            run.error = run.running.take_error()
        self._ended(run, transition)

    # -- timeouts ----------------------------------------------------------------------------------------------------

    def _time(self, run: Run) -> None:
        """The body begins now, and with it its time."""
        if run.claimed.timeout is not None:
            self._watch(run, time.monotonic() + run.claimed.timeout)

    def _watch(self, run: Run, deadline: float) -> None:
        """One timer for all: a timeout per job would cost more than a job that does nothing."""
        run.deadline = deadline
        self._timed.add(run)
        loop = asyncio.get_running_loop()
        if self._sweep is None or self._sweep.when() > deadline:
            if self._sweep is not None:
                self._sweep.cancel()
            self._sweep = loop.call_at(deadline, self._end_overdue)

    def _end_overdue(self) -> None:
        self._sweep = None
        now = time.monotonic()
        for run in [r for r in self._timed if r.deadline is not None and r.deadline <= now]:
            self._timed.discard(run)
            self.stop(run, Stop.TIMEOUT)
        left = [run.deadline for run in self._timed if run.deadline is not None]
        if left:
            self._sweep = asyncio.get_running_loop().call_at(min(left), self._end_overdue)


def _is_cancelled(run: Run) -> bool:
    """Whether the task of a run was cancelled, and did not merely raise what a cancelled one raises."""
    return run.body is not None and run.body.cancelling() > 0


def _is_stepping(run: Run) -> bool:
    """Whether the loop runs the task of a run just now; a task that is thrown away is closed from somewhere else."""
    try:
        return asyncio.current_task() is run.body
    except RuntimeError:
        return False


def _crashed(job: Claimed, crash: Crashed) -> Transition:
    """The child process of a body died: charged, tried again at once the first time, later with back-off."""
    if not crash.begun:
        logger.error("job %s could not begin in a child process: %s", job.id, crash.error)
        return states.take_back(job.held, AGAIN_SECONDS)
    if not may_retry(job.attempt, job.retries):
        return states.fail(job.held, Reason.CRASHED, crash.error, group="crashed")
    delay = job.backoff.delay(job.attempt, random()) if job.suspect else 0.0
    return states.retry(job.held, delay, Reason.CRASHED, crash.error, group="crashed")


def _patience(run: Run) -> float:
    """How long a child may take to clean up. Without contact there is less time: the lease is about to end."""
    return CLEAN_UP_WITHOUT_CONTACT if run.stop is Stop.CONTACT else CLEAN_UP_SECONDS
