"""Runs job functions: coroutines on the loop, plain functions in threads, and those that must be killable in children.

Each step is total: whatever a function does, its run ends as one transition, or as none when the claim was lost. A
function that is stopped keeps its slot until it has really ended.
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
"""From this many jobs on, those of one claim are started in two iterations of the event loop."""
START_UP_SECONDS = 60.0
"""How long a child process may take to import an application."""
CLEAN_UP_SECONDS, CLEAN_UP_WITHOUT_CONTACT = 2.0, 0.3
MOST_NAMED = 1_000
"""How many unknown tasks are logged, once each."""
IGNORED_SECONDS = 5.0
"""When the log names a run that goes on although it was told to stop; a child process is killed before that."""
AGAIN_SECONDS = 5.0
"""When to try a job again for which no child process or thread could be started; uncharged: it never began."""


class RecordsCrashState(Protocol):
    """Records what the supervisor must know if the worker's process dies: see `fairlane.supervisor.crash_state`."""

    def session(self, id: str) -> None:
        """The worker is about to register this session."""

    def beat(self) -> None:
        """The session was renewed."""

    def leave(self) -> None:
        """The worker is about to end the session."""

    def begin(self, held: Held) -> int:
        """The function of a job begins. Returns the slot for `end`."""

    def end(self, slot: int) -> None:
        """The store has confirmed the end of a job."""


class RunsJobs(Protocol):
    """What a worker requires of its executor. All methods are called in the worker's event loop.

    Each run that was started ends with one call of `ended`, also in that loop, once its function has really ended.
    """

    def start_all(self, runs: list[Run]) -> None:
        """Start claimed jobs."""

    def stop(self, run: Run, why: Stop) -> None:
        """Stop a job; it ends when its function has."""

    def abandon(self, run: Run) -> None:
        """End a run now, whatever its function does."""

    def end_lost(self, runs: Iterable[Run]) -> None:
        """End runs that cannot report their end themselves."""

    async def close(self) -> None:
        """Free what the executor holds; no run is left."""


class UnknownTasks:
    """Declines jobs whose task a worker does not know, and logs each such task once."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._named: set[str] = set()

    def decline(self, run: Run) -> Transition:
        """The transition of a run that does not begin."""
        job = run.claimed
        run.declined = True
        if job.task not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(job.task)
            logger.warning(
                "task %s is unknown to this worker: its jobs (first %s) are left to workers that know it",
                job.task,
                job.id,
            )
        error = f"no worker that claimed it had a task {job.task!r}; deploy one that has, or rename the task back"
        return states.decline(job.held, error, patience=self._patience)


class Executor:
    """Starts job functions, and calls `ended` with the transition of each."""

    def __init__(
        self,
        registry: Registry,
        slots: int,
        ended: Ended,
        report: running_job.Report,
        *,
        store: Store | None = None,
        crash_state: RecordsCrashState | None = None,
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
        self._crash_state = crash_state
        self._tracer = tracer
        self._torn_down = torn_down
        """Whether the worker's own task is being cancelled, for example by `asyncio.run` when the program ends."""
        self._threads = threads or Threads(slots)
        self._isolation = Isolation(most=slots, modules=modules)
        self._suspects = asyncio.Lock()
        self._timed: set[Run] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._unknown_tasks = UnknownTasks(unknown_task)

    def start(self, run: Run) -> None:
        """Start the function of a claimed job. A job whose task is unknown here is declined instead."""
        if self._registry.get(run.claimed.task) is None:
            self._end(run, self._unknown_tasks.decline(run))
            return
        run.body = asyncio.get_running_loop().create_task(self._run(run))

    def start_all(self, runs: list[Run]) -> None:
        """Start jobs; of many, the second half in the next iteration of the event loop.

        Short jobs of the first half have ended by then, so the store writes their results while the second half runs.
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
        """Stop a job function. The first reason counts, except that a lost claim replaces every other reason."""
        if run.ended:
            return
        first = run.stop is None
        if first or why is Stop.LOST:
            run.stop = why
        if why not in (Stop.HAND_BACK, Stop.CONTACT) and run.running is not None:
            run.running.request_cancel()
        if first and why is not Stop.HAND_BACK:
            asyncio.get_running_loop().call_later(IGNORED_SECONDS, self._warn_if_running, run)
        if run.in_thread:
            # A thread cannot be stopped: it keeps its slot until it ends, and only a stopping worker leaves it behind.
            if why is Stop.HAND_BACK:
                self.abandon(run)
            return
        if first and run.body is not None:
            # Only once: the function's own clean-up must not be cancelled too.
            run.body.cancel()
        if not run.begun:
            # An asyncio task that is cancelled before its first step never runs, so its end is recorded here.
            self._end(run, self._stopped(run))

    @staticmethod
    def _warn_if_running(run: Run) -> None:
        if run.ended or run.stop is None:
            return
        job = run.claimed
        timed_out = run.stop is Stop.TIMEOUT
        logger.warning(
            "task %s (job %s) %s: it still runs %g s later, and keeps its slot until it ends. %s",
            job.task,
            job.id,
            f"ignores its timeout of {job.timeout:g} s" if timed_out else f"does not stop although {run.stop.value}",
            IGNORED_SECONDS,
            "A thread must check current_job().cancel_requested"
            if run.in_thread
            else "A function that catches CancelledError must raise it again",
            extra={"job": job.id, "task": job.task},
        )

    def abandon(self, run: Run) -> None:
        """Leave a job function behind that does not end. Whatever it does later is not written."""
        if not run.ended:
            run.stop = run.stop or Stop.HAND_BACK
            self._end(run, self._stopped(run))
            if run.body is not None:
                run.body.cancel()

    def end_lost(self, runs: Iterable[Run]) -> None:
        """Hand back runs that other code cancelled before their first step: they cannot report their end."""
        for run in [run for run in runs if run.body is not None and run.body.done() and not run.ended]:
            self.abandon(run)

    async def close(self) -> None:
        """End the child processes."""
        if self._sweep is not None:
            self._sweep.cancel()
        await self._isolation.close()

    # -- one run -----------------------------------------------------------------------------------------------------

    async def _run(self, run: Run) -> None:
        run.begun = True
        run.began_at = time.monotonic()
        transition: Transition | None = None
        try:
            transition = await self._traced(run)
        except Exception as exc:
            # No exception of a job function or a tracer may leave a job without a result.
            logger.exception("the run of job %s ended with an unexpected error", run.claimed.id)
            failed = body.Raised(reason=Reason.ERROR, error=f"{type(exc).__name__} in the worker", group="worker")
            transition = body.transition_of(failed, run.claimed)
        except GeneratorExit as exc:
            if not _is_stepping(run):
                # The event loop is gone, and with it the worker.
                raise
            # The function, or a coroutine that it awaited, has raised it, which closes the frames in between.
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
            with self._tracer.run(run.claimed) as record:
                transition = await self._transition(run)
                decided = True
                if transition is not None:
                    record(transition)
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
                # Other code has cancelled it, perhaps with every other task of the loop: it is not charged for that.
                run.stop = Stop.HAND_BACK
            # A function may raise CancelledError by itself; that is an error like any other.
            return self._stopped(run) if run.stop is not None else self._raised(job, exc)
        except GeneratorExit:
            # Handled in `_run`, which can tell its two causes apart.
            raise
        except BaseException as exc:
            self._notice_tear_down(run)
            # Including SystemExit: a job function must not end the worker.
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
        """Hand a run back that was cancelled together with its worker: the worker did not ask it to stop.

        An event loop that is torn down cancels all its tasks before any of them continues. So the worker's own task is
        already marked as cancelled when a run ends because of that.
        """
        if run.stop is None and _is_cancelled(run) and self._torn_down():
            run.stop = Stop.HAND_BACK

    async def _ending(self, run: Run, job: Claimed) -> body.Ending | Crashed:
        task = self._registry.get(job.task)
        assert task is not None, "an unknown task is declined before its function begins"
        if job.suspect or task.isolate or (not task.is_async and job.timeout is not None):
            return await self._apart(run, task, job)
        return await self._here(run, task, job)

    async def _here(self, run: Run, task: Task[..., Any], job: Claimed) -> body.Ending | Crashed:
        self._record_begin(run)
        run.entered = True
        self._time(run)
        transact = partial(self._transact, run) if task.is_async and self._store is not None else None
        run.running = RunningJob(job, self._report, run.deadline, transact)
        run.running.enter()
        if not task.is_async:
            run.in_thread = True
            step = steps_on(asyncio.get_running_loop())
            try:
                called = self._threads.run(body.run_plain, task, job, run.running, step)
            except RuntimeError as exc:
                return Crashed(f"no thread could be started ({exc})", begun=False)
            return await called
        return await body.run_coroutine(task, job, run.running)

    def _transact(self, run: Run) -> RunTransaction:
        return RunTransaction(self._get_store, run.session, run.claimed.held)

    async def _get_store(self) -> Store:
        assert self._store is not None
        return self._store

    async def _apart(self, run: Run, task: Task[..., Any], job: Claimed) -> body.Ending | Crashed:
        if not importable(task):
            # A child process cannot find the task. Run such suspects one at a time: if one kills this process, the
            # others have not begun.
            async with self._suspects:
                return await self._here(run, task, job)
        self._record_begin(run)
        if job.timeout is not None:
            # The timeout counts from when the child has imported the task; the import itself is limited too.
            self._watch(run, time.monotonic() + job.timeout + START_UP_SECONDS)
        ending = await self._isolation.run(
            task,
            job,
            session=run.session,
            report=self._report,
            begun=lambda: setattr(run, "entered", True),
            started=lambda: self._time(run),
            patience=lambda: _clean_up_seconds(run),
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

    def _record_begin(self, run: Run) -> None:
        if self._crash_state is not None:
            run.crash_slot = self._crash_state.begin(run.claimed.held)

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
        """Start the timeout of a run: its function begins now."""
        if run.claimed.timeout is not None:
            self._watch(run, time.monotonic() + run.claimed.timeout)

    def _watch(self, run: Run, deadline: float) -> None:
        """Use one timer for all runs: a timer for each would cost more than a job that does nothing."""
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
    """Whether the asyncio task of a run was cancelled, and did not merely raise CancelledError."""
    return run.body is not None and run.body.cancelling() > 0


def _is_stepping(run: Run) -> bool:
    """Whether the event loop is running the task of a run now; a task that is garbage collected is closed elsewhere."""
    try:
        return asyncio.current_task() is run.body
    except RuntimeError:
        return False


def _crashed(job: Claimed, crash: Crashed) -> Transition:
    """The child process of a job died: charged, and retried at once the first time, later with back-off.

    A job that has not begun is not charged.
    """
    if not crash.begun:
        logger.error("job %s could not begin: %s", job.id, crash.error)
        return states.take_back(job.held, AGAIN_SECONDS)
    if not may_retry(job.attempt, job.retries):
        return states.fail(job.held, Reason.CRASHED, crash.error, group="crashed")
    delay = job.backoff.delay(job.attempt, random()) if job.suspect else 0.0
    return states.retry(job.held, delay, Reason.CRASHED, crash.error, group="crashed")


def _clean_up_seconds(run: Run) -> float:
    """How long a child may take to clean up. Without contact that is less, because the lease is about to end."""
    return CLEAN_UP_WITHOUT_CONTACT if run.stop is Stop.CONTACT else CLEAN_UP_SECONDS
