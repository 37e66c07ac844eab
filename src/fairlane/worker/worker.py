"""The worker: fetcher → executor → completer around one event loop, and a lease keeper in a thread of its own.

One round trip does everything: it writes the results that are ready and claims jobs for the slots they free. Results
that become ready meanwhile go into the next one, so batches grow when the store is slow or jobs are short.

Guarantees: never more running jobs than slots; the result of a job is written once it is known, or the claim is handed
back; a stop waits for running jobs until its grace period is over, and hands back the rest uncharged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

from ..errors import SessionLost
from ..events import Tracer
from ..hooks import Hooks
from ..manager.catch_up import catch_up
from ..manager.manager import Manager
from ..model.job import Held
from ..model.names import plural
from ..model.session import Claim, Renewal, Session
from ..model.states import Transition
from ..runtime.connection import OpenStore
from ..runtime.lease_keeper import BackgroundTask, Holdings, LeaseKeeper
from ..runtime.running_job import Report
from ..store.port import Store
from ..store.wakeups import Work
from ..task import Registry
from . import shutdown
from .completer import Completer, endings_by_call
from .executor import Ended, Executor, RecordsCrashState, RunsJobs
from .fetcher import Fetcher
from .job_log import log_runs
from .lifetime import StoppedEarlyError, lifetime
from .loop_monitor import LoopMonitor
from .run import Run, Stop
from .settings import WorkerSettings
from .shutdown import Phase, Shutdown
from .stray_tasks import guard_tasks
from .worker_session import WorkerSession

logger = logging.getLogger("fairlane.worker")
Ending = tuple[Run, Transition | None]
MakeExecutor = Callable[[Ended, Report], RunsJobs]
"""Makes the executor of a worker, from what it calls with the end of a run and with the progress of a job."""


class Worker:
    """Runs the jobs of some queues until it is stopped. Usually there is one per process and event loop."""

    def __init__(
        self,
        store: Callable[[], Awaitable[Store]],
        open_store: OpenStore,
        registry: Registry,
        settings: WorkerSettings,
        *,
        release: Callable[[], Awaitable[None]] | None = None,
        declare: Callable[[Store], Awaitable[None]] | None = None,
        crash_state: RecordsCrashState | None = None,
        tracer: Tracer | None = None,
        modules: Sequence[str] = (),
        registered: Callable[[Session], None] | None = None,
        hooks: Sequence[Hooks] = (),
        executor: MakeExecutor | None = None,
        tasks: Sequence[str] | None = None,
    ) -> None:
        self._get_store = store
        self._release_store = release
        self._open_store = open_store
        self._registry = registry
        self._settings = settings
        self._declare = declare
        self._crash_state = crash_state
        self._tracer = tracer
        self._modules = modules
        self._registered = registered
        self._hooks = hooks
        self._make_executor = executor or self._native_executor
        self._tasks = tasks
        """The names of the tasks it can run; None for those of the registry."""
        self._fetcher = Fetcher(settings.slots, settings.queues, settings.intervals.poll)
        self._shutdown = Shutdown(settings.grace)
        self._runs: dict[Held, Run] = {}
        self._endings: list[Ending] = []
        self._news = asyncio.Event()
        self._session_lost = False
        self._out_of_contact = False
        self._paused = False
        self.ready = asyncio.Event()
        """Set once it is registered and claims."""
        self.manager: Manager | None = None
        self.done = 0
        """How many jobs have ended here."""

    @property
    def session(self) -> Session:
        """The worker's session in the store."""
        session = self._worker_session.session
        assert session is not None, "the worker has not started"
        return session

    @property
    def phase(self) -> Phase:
        """What it is doing now. May be read from any thread."""
        if self._shutdown.requested.is_set():
            return Phase.STOPPING
        if not self.ready.is_set():
            return Phase.STARTING
        if self._session_lost:
            return Phase.SESSION_LOST
        return Phase.OUT_OF_CONTACT if self._out_of_contact else Phase.SERVING

    def stop(self, *, now: bool = False) -> None:
        """Claim nothing more, and end: when the running jobs have ended, when their grace is over, or at once."""
        self._shutdown.request(now=now)
        self._news.set()
        if self.ready.is_set():
            self._keeper.nudge()

    def pause(self, paused: bool) -> None:
        """Claim nothing until this is undone, because the executor cannot start jobs now; running jobs continue."""
        self._paused = paused
        self._hint()

    async def run(self) -> None:
        """Serve until stopped. Cancelling it stops at once."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        # Held while the hooks run too: code in them that uses the application finds its store open.
        self._store = await self._get_store()
        try:
            async with lifetime(self._hooks, given_up=self._shutdown.grace_over):
                await self._work()
        except StoppedEarlyError:
            pass
        finally:
            if self._release_store is not None:
                await self._release_store()

    async def _work(self) -> None:
        self._completer = Completer(self._store, self._shutdown.may_retry)
        self._executor = self._make_executor(self._ended, self._completer.report)
        self._worker_session = WorkerSession(
            *(self._store, self._settings, self._shutdown.requested, self._task_names),
            declare=self._declare,
            crash_state=self._crash_state,
            registered=self._registered,
        )
        self._keeper = LeaseKeeper(
            *(self._open_store, self._settings.intervals, self),
            background_tasks=self._background_tasks(),
            owner_loop=self._loop,
        )
        guard_tasks(self._loop)
        if self._declare is not None:
            await self._declare(self._store)
        if not await self._worker_session.join():
            return
        self._announced: Work = self._store.wakeups.work(self._settings.queues, self._hint)
        tasks: list[asyncio.Future[None]] = []
        # The session is registered: from here on it is ended however the worker ends.
        try:
            await self._keeper.start()
            serving = asyncio.ensure_future(self._serve())
            tasks = [
                serving,
                asyncio.ensure_future(self._listen()),
                asyncio.ensure_future(self._completer.write_progress(lambda: self.session.id)),
                asyncio.ensure_future(self._worker_session.redeclare()),
                asyncio.ensure_future(self._give_up(serving)),
            ]
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._announced.close()
            await self._leave()

    def _task_names(self) -> tuple[str, ...]:
        return tuple(sorted((task.name for task in self._registry) if self._tasks is None else self._tasks))

    def _native_executor(self, ended: Ended, report: Report) -> RunsJobs:
        return Executor(
            self._registry,
            self._settings.slots.total,
            ended,
            report,
            store=self._store,
            crash_state=self._crash_state,
            tracer=self._tracer,
            torn_down=self._torn_down,
            modules=self._modules,
            unknown_task=self._settings.intervals.unknown_task,
        )

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self.ready.set()
        caught_up = False  # whether all that can start is pending, and nothing has run since
        while True:
            self._news.clear()
            if self._session_lost:
                await self._replace_session()
            endings, self._endings = self._endings, []
            claim = self._claim(endings)
            if endings or claim is not None:
                if not await self._exchange(endings, claim):
                    return
                busy = self._runs or self._endings or self._session_lost or self._completer.claim_failed
                caught_up = caught_up and not busy
                # A hint set by the answer itself: some of what was claimed did not fit, and there may be more.
                if self._settings.burst and not busy and claim is not None and not self._fetcher.hinted:
                    if caught_up:
                        return
                    await catch_up(self._store)
                    caught_up = self._fetcher.hinted = True
            elif self._shutdown.requested.is_set() and not self._runs:
                return
            else:
                await self._wait()

    def _claim(self, endings: list[Ending]) -> Claim | None:
        """Claim with every write, and otherwise after a hint or when the next poll is due."""
        if self._shutdown.requested.is_set() or self._out_of_contact or self._paused:
            return None
        self._fetcher.patience = self._announced.patience
        if not endings and not self._fetcher.is_due(time.monotonic()):
            return None
        return self._fetcher.next([run.claimed.priority for run, _ in endings])

    async def _exchange(self, endings: list[Ending], claim: Claim | None) -> bool:
        """One round trip. False when the store failed until a stopping worker gave up."""
        transitions = [transition for _, transition in endings if transition is not None]
        self._announced.claiming()
        try:
            finished = await self._completer.exchange(self.session.id, transitions, claim)
        except SessionLost:
            self._session_lost = True
            self._endings += endings
            return True
        except asyncio.CancelledError:
            # The store may or may not have them: they are written once more before the session ends.
            self._endings += endings
            raise
        if finished is None:
            self._endings += endings
            return False
        for job in finished.claimed:
            # Before `answered` is set: a renewal that names a claim's number must name its jobs too.
            self._runs[job.held] = Run(job, self.session.id)
        self._fetcher.started(finished.claimed)
        if claim is not None:
            self._fetcher.answered = claim.number
            if not self._completer.claim_failed:
                self._announced.claimed(claim, finished.claimed)
            if claim.may_be_cut(finished.claimed):
                # There may be jobs for the slots left.
                self._fetcher.hinted = True
        for run, _ in endings:
            self._forget(run)
        log_runs(endings, finished.verdicts)
        runs = [self._runs[job.held] for job in finished.claimed]
        if self._out_of_contact:
            self._end_limited(runs)
        self._executor.start_all([run for run in runs if not run.ended])
        return True

    def _forget(self, run: Run) -> None:
        self._runs.pop(run.claimed.held, None)
        self._fetcher.ended(run.claimed.priority)
        self.done += not run.declined
        if run.crash_slot is not None and self._crash_state is not None:
            self._crash_state.end(run.crash_slot)

    def _ended(self, run: Run, transition: Transition | None) -> None:
        if run.committed:
            # The completion is written again all the same: the store accepts it as a repetition and notifies watchers.
            self._completer.forget(run.claimed.held)
        self._endings.append((run, transition))
        self._news.set()

    async def _wait(self) -> None:
        """Wait until a job has ended, a hint came or something is due."""
        now = time.monotonic()
        until = self._fetcher.next_poll
        if self._shutdown.requested.is_set():
            if now >= self._shutdown.next_step_at:
                self._shutdown.hand_back(self._executor, self._runs.values(), now)
            until = self._shutdown.next_step_at
        elif self._out_of_contact or self._paused or len(self._runs) >= self._settings.slots.total:
            # A claim has to wait for a result or a renewal, which wakes this up by itself.
            until = now + self._settings.intervals.poll
        elif not self._runs:
            self._fetcher.make_ready()
        closed = self._out_of_contact or self._paused or self._shutdown.requested.is_set()
        self._announced.offer(frozenset() if closed else self._fetcher.room())
        timer = self._loop.call_later(max(0.0, until - now), self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()

    async def _listen(self) -> None:
        subscribed: str | None = None
        while True:
            worker = self.session.worker
            if worker is not None and worker != subscribed:
                subscribed = worker
                self._announced.listen(worker)
            await self._announced.wait(self._settings.intervals.heartbeat)

    def _hint(self) -> None:
        self._fetcher.hinted = True
        self._news.set()

    # -- the session -----------------------------------------------------------------------------------------------

    async def _replace_session(self) -> None:
        """Register again after the session was declared dead: other workers own its jobs now."""
        runs = list(self._runs.values())
        logger.warning("session %s was declared dead; dropping %s", self.session.id, plural(len(runs), "job"))
        # Write results that are ready all the same: the store rejects them and records that in the job's history.
        await self._completer.exchange(self.session.id, [t for _, t in self._endings if t is not None], None)
        for run in runs:
            self._executor.stop(run, Stop.LOST)
        # Claim again only when the old job functions have ended: they still use the worker's slots.
        tasks = [run.body for run in runs if run.body is not None and not run.in_thread]
        if tasks:
            await asyncio.wait(tasks, timeout=shutdown.UNWIND_SECONDS)
        # Those that do not end keep their slots. For the others there is nothing left to write.
        self._endings = [(run, None) for run, _ in self._endings]
        self._fetcher.begin_session()
        joined = await self._worker_session.join_again()
        # Only now: during the registration the keeper may report the same loss once more.
        self._session_lost = False
        if joined:
            self._fetcher.hinted = True
            self._keeper.nudge()
        else:
            self.stop(now=True)

    async def _leave(self) -> None:
        """End the running jobs first, then the session: no other worker may get a job that still runs here."""
        await self._shutdown.end_all(self._executor, self._runs.values())
        transitions = [transition for _, transition in self._endings if transition is not None]
        if transitions:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(shutdown.LAST_TRIES):
                    for part in endings_by_call(transitions):
                        await self._store.finish(self.session.id, part)
        await self._executor.close()
        await self._keeper.stop()
        await self._worker_session.leave()
        logger.info("worker %s has stopped after %s", self.session.worker, plural(self.done, "job"))

    async def _give_up(self, serving: asyncio.Future[None]) -> None:
        """End the worker although a call to the store hangs."""
        await self._shutdown.overdue()
        logger.error("the store does not answer; the rescuer will recover the remaining jobs")
        serving.cancel()

    def _background_tasks(self) -> list[BackgroundTask]:
        monitor = LoopMonitor(self._loop, threading.get_ident(), self._settings.intervals.loop_lag)
        tasks: list[BackgroundTask] = [monitor.run]
        if self._settings.manager:
            tasks.append(self._manage)
        return tasks

    async def _manage(self, store: Store) -> None:
        session, intervals, retention = self.session.id, self._settings.intervals, self._settings.retention
        wakeups = self._store.wakeups
        self.manager = Manager(store, session=session, intervals=intervals, retention=retention, wakeups=wakeups)
        await self.manager.run()

    def _torn_down(self) -> bool:
        return self._task is not None and self._task.cancelling() > 0

    # -- called by the keeper, from its thread ------------------------------------------------------------------------

    def holdings(self) -> Holdings:
        # In this order: `answered` is set after `_runs`, and reset before the session changes.
        session, answered = self.session.id, self._fetcher.answered
        return Holdings(session, list(self._runs), answered, self._shutdown.requested.is_set())

    def renewed(self, renewal: Renewal) -> None:
        if self._crash_state is not None:
            self._crash_state.beat()
        self._on_the_loop(self._apply, renewal)

    def session_lost(self, session: str) -> None:
        self._on_the_loop(self._lose_session, session)

    def contact_lost(self) -> None:
        self._on_the_loop(self._lose_contact)

    def _on_the_loop(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all job functions have ended
            self._loop.call_soon_threadsafe(call, *args)

    def _apply(self, renewal: Renewal) -> None:
        if self._out_of_contact:
            self._out_of_contact = False
            self._hint()
        self._executor.end_lost(self._runs.values())
        for held in renewal.lost:
            if (run := self._runs.get(held)) is not None:
                self._executor.stop(run, Stop.LOST)
        cancelled = set(renewal.cancel)
        for run in list(self._runs.values()):
            if run.claimed.id in cancelled and run.stop is None:
                self._executor.stop(run, Stop.CANCEL)

    def _lose_session(self, session: str) -> None:
        # The worker may have found out first, and have replaced the session already.
        if session == self.session.id:
            self._session_lost = True
            self._news.set()

    def _lose_contact(self) -> None:
        self._out_of_contact = True
        self._end_limited(list(self._runs.values()))

    def _end_limited(self, runs: list[Run]) -> None:
        """End jobs of limited lanes, and start no others: the store may soon give their places to other workers."""
        if limited := [run for run in runs if run.claimed.limited and not run.ended]:
            logger.warning(
                "no contact with the store: ending %s of limited lanes before the lease ends",
                plural(len(limited), "job"),
            )
        for run in limited:
            if run.in_thread and run.running is not None:
                # A thread cannot be stopped. Handing the job back now would only start the next one beside it sooner.
                run.running.request_cancel()
            else:
                self._executor.stop(run, Stop.CONTACT)
