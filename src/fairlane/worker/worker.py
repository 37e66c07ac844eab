"""The worker: fetcher → executor → completer around one loop, and a keeper in a thread of its own.

One round trip does everything: it writes the endings that are ready and claims for the slots they free. What ends
meanwhile is in the next one, so batches grow by themselves when the store is slow or the jobs are short.

Promises: never more bodies than slots; a body's ending is written once it is known, or the claim is handed back; a
stop waits for the bodies as long as it may, and gives back the rest uncharged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import uniform

from ..errors import SessionLost
from ..events import Tracer
from ..hooks import Hooks
from ..manager.manager import Manager
from ..model.job import Held
from ..model.names import ERROR_BYTES, PAYLOAD_BYTES
from ..model.session import Claim, Renewal, Session
from ..model.states import Transition
from ..runtime.connection import OpenStore
from ..runtime.lease_keeper import BackgroundTask, Holdings, LeaseKeeper
from ..store.port import Store
from ..store.wakeups import queue_topic, worker_topic
from ..task import Registry
from .completer import Completer, endings_by_call
from .executor import CrashMarks, Executor
from .fetcher import Fetcher
from .job_log import tell
from .lifetime import StoppedEarlyError, lifetime
from .loop_monitor import LoopMonitor
from .run import Run, Stop
from .settings import WorkerSettings
from .stray_tasks import guard_tasks
from .worker_session import WorkerSession

logger = logging.getLogger("fairlane.worker")
UNWIND_SECONDS = 3.0
"""How long bodies that were told to end at a stop may take to do so, before they are left behind."""
LARGEST_JOB = PAYLOAD_BYTES + ERROR_BYTES + 1024
"""What a claim can count of one job: payload, headers, and a little that a store keeps beside them."""
LAST_TRIES = 5.0
"""How long a worker that stops goes on telling a store that fails how its bodies ended."""


class Worker:
    """Runs the jobs of some queues until it is stopped. One per process and event loop is the usual thing."""

    def __init__(
        self,
        store: Callable[[], Awaitable[Store]],
        open_store: OpenStore,
        registry: Registry,
        settings: WorkerSettings,
        *,
        release: Callable[[], Awaitable[None]] | None = None,
        declare: Callable[[Store], Awaitable[None]] | None = None,
        marks: CrashMarks | None = None,
        tracer: Tracer | None = None,
        modules: Sequence[str] = (),
        registered: Callable[[Session], None] | None = None,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        self._get_store = store
        self._release_store = release
        self._open_store = open_store
        self._registry = registry
        self._settings = settings
        self._declare = declare
        self._marks = marks
        self._tracer = tracer
        self._modules = modules
        self._registered = registered
        self._hooks = hooks
        self._fetcher = Fetcher(settings.slots, settings.queues)
        self._runs: dict[Held, Run] = {}
        self._endings: list[tuple[Run, Transition | None]] = []
        self._news = asyncio.Event()
        self._hinted = True
        self._next_poll = 0.0
        self._stopping = asyncio.Event()
        self._grace_ends = self._hand_back_at = 0.0
        self._unwinding = False
        self._session_lost = False
        self._out_of_contact = False
        self.ready = asyncio.Event()
        """Set once it is registered and claims."""
        self.manager: Manager | None = None
        self.done = 0
        """How many jobs have ended here."""

    @property
    def session(self) -> Session:
        """How the store knows this worker."""
        session = self._membership.session
        assert session is not None, "the worker has not started"
        return session

    def stop(self, *, now: bool = False) -> None:
        """Claim nothing more and end: after the bodies have, or their grace is over, or at once."""
        if now or not self._stopping.is_set():
            self._grace_ends = self._hand_back_at = time.monotonic() + (0 if now else self._settings.grace)
        self._stopping.set()
        self._news.set()
        if self.ready.is_set():
            self._keeper.nudge()

    async def run(self) -> None:
        """Serve until stopped. Cancelling it stops at once."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        # Held before the hooks run and until they have: what they do with the application finds its store open.
        self._store = await self._get_store()
        try:
            async with lifetime(self._hooks, given_up=partial(self._grace_over, 0.0)):
                await self._work()
        except StoppedEarlyError:
            pass
        finally:
            if self._release_store is not None:
                await self._release_store()

    async def _work(self) -> None:
        self._completer = Completer(self._store, self._patient)
        self._executor = Executor(
            self._registry,
            self._settings.slots.total,
            self._ended,
            self._completer.report,
            store=self._store,
            marks=self._marks,
            tracer=self._tracer,
            torn_down=self._torn_down,
            modules=self._modules,
            unknown_task=self._settings.intervals.unknown_task,
        )
        self._membership = WorkerSession(
            *(self._store, self._settings, self._stopping, self._registry),
            declare=self._declare,
            marks=self._marks,
            registered=self._registered,
        )
        self._keeper = LeaseKeeper(
            self._open_store,
            self._settings.intervals,
            self,
            background_tasks=self._background_tasks(),
            owner=self._loop,
        )
        guard_tasks(self._loop)
        if self._declare is not None:
            await self._declare(self._store)
        if not await self._membership.join():
            return
        beside: list[asyncio.Future[None]] = []
        # From here on the store counts on this session, so whatever ends the worker also ends it.
        try:
            await self._keeper.start()
            serving = asyncio.ensure_future(self._serve())
            beside = [
                serving,
                asyncio.ensure_future(self._listen()),
                asyncio.ensure_future(self._completer.write_progress(lambda: self.session.id)),
                asyncio.ensure_future(self._membership.redeclare()),
                asyncio.ensure_future(self._give_up(serving)),
            ]
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.result()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self._leave()

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self.ready.set()
        while True:
            self._news.clear()
            if self._session_lost:
                await self._begin_anew()
            endings, self._endings = self._endings, []
            claim = self._claim(endings)
            if endings or claim is not None:
                if not await self._exchange(endings, claim):
                    return
                nothing_left = not self._runs and not self._endings and not self._session_lost
                nothing_left = nothing_left and not self._completer.claim_failed
                # A hint that came with the answer: what was claimed could not be read, and more may stand behind it.
                if self._settings.burst and nothing_left and claim is not None and not self._hinted:
                    return
            elif self._stopping.is_set() and not self._runs:
                return
            else:
                await self._wait()

    def _claim(self, endings: list[tuple[Run, Transition | None]]) -> Claim | None:
        """Claim with every write, and else when there was a hint or it is time to look."""
        now = time.monotonic()
        if self._stopping.is_set() or self._out_of_contact:
            return None
        if not (endings or self._hinted or now >= self._next_poll):
            return None
        claim = self._fetcher.next([run.claimed.priority for run, _ in endings], told=self._hinted)
        if claim is not None:
            self._hinted = False
            self._next_poll = now + self._settings.intervals.poll * uniform(0.9, 1.1)
        return claim

    async def _exchange(self, endings: list[tuple[Run, Transition | None]], claim: Claim | None) -> bool:
        """One round trip. False when the store stayed away while the worker wants to stop."""
        transitions = [transition for _, transition in endings if transition is not None]
        try:
            finished = await self._completer.exchange(self.session.id, transitions, claim)
        except SessionLost:
            self._session_lost = True
            self._endings += endings
            return True
        except asyncio.CancelledError:
            # Whether the store has heard of them or not: they are told once more before the session is left.
            self._endings += endings
            raise
        if finished is None:
            self._endings += endings
            return False
        for job in finished.claimed:
            # In the books before the number is: a renewal that names the number must name its jobs too.
            self._runs[job.held] = Run(job, self.session.id)
        self._fetcher.started(finished.claimed)
        if claim is not None:
            self._fetcher.answered = claim.number
            # An answer that is nearly full may have been cut by its bytes: there are slots left, and jobs for them.
            self._hinted |= sum(job.size for job in finished.claimed) > claim.most_bytes - LARGEST_JOB
        for run, transition in endings:
            self._forget(run)
            tell(run, transition)
        if stale := [verdict.id for verdict in finished.verdicts if not verdict.accepted]:
            logger.warning("%d endings came too late, others have the jobs now: %s", len(stale), ", ".join(stale[:5]))
        runs = [self._runs[job.held] for job in finished.claimed]
        if self._out_of_contact:
            self._end_limited(runs)
        self._executor.start_all([run for run in runs if not run.ended])
        return True

    def _forget(self, run: Run) -> None:
        self._runs.pop(run.claimed.held, None)
        self._fetcher.ended(run.claimed.priority)
        self.done += not run.declined
        if run.mark is not None and self._marks is not None:
            self._marks.end(run.mark)

    def _ended(self, run: Run, transition: Transition | None) -> None:
        if run.committed:
            # Written again all the same: it is answered as a repetition, and everybody is told as of any other.
            self._completer.forget(run.claimed.held)
        self._endings.append((run, transition))
        self._news.set()

    async def _wait(self) -> None:
        """Until something ended, was hinted or is due."""
        now = time.monotonic()
        until = self._next_poll
        if self._stopping.is_set():
            until = self._hand_back_at
            if now >= until:
                self._hand_back(now)
                until = self._hand_back_at
        elif self._out_of_contact or len(self._runs) >= self._settings.slots.total:
            # Only an ending can make room, or a renewal; it brings the next claim along.
            until = now + self._settings.intervals.poll
        elif not self._runs:
            self._fetcher.make_ready()
        timer = self._loop.call_later(max(0.0, until - now), self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()

    def _hand_back(self, now: float) -> None:
        """The grace is over: end what runs, and the second time leave it behind."""
        left = [run for run in self._runs.values() if not run.ended]
        if left:
            logger.warning("handing back what still runs: %d", len(left))
        for run in left:
            if self._unwinding:
                self._executor.abandon(run)
            else:
                self._executor.stop(run, Stop.HAND_BACK)
        self._unwinding = True
        self._hand_back_at = now + UNWIND_SECONDS

    async def _listen(self) -> None:
        topics = [queue_topic(queue) for queue in self._settings.queues]
        heard_for: str | None = None
        ear = self._store.wakeups.subscribe(topics, self._hear)
        try:
            while True:
                worker = self.session.worker
                if worker is not None and worker != heard_for:
                    heard_for = worker
                    ear.listen([*topics, worker_topic(worker)])
                await ear.wait(self._settings.intervals.heartbeat)
        finally:
            ear.close()

    def _hear(self) -> None:
        self._hinted = True
        self._news.set()

    # -- the session -----------------------------------------------------------------------------------------------

    async def _begin_anew(self) -> None:
        """The session was declared dead: what it held belongs to others."""
        runs = list(self._runs.values())
        logger.warning("session %s was declared dead; dropping %d jobs", self.session.id, len(runs))
        # What has ended by now is told all the same: it is refused, and the refusal goes into the job's history.
        await self._completer.exchange(self.session.id, [t for _, t in self._endings if t is not None], None)
        for run in runs:
            self._executor.stop(run, Stop.LOST)
        # New claims only when the old bodies are gone: slots are a promise about bodies, not about records.
        bodies = [run.body for run in runs if run.body is not None and not run.in_thread]
        if bodies:
            await asyncio.wait(bodies, timeout=UNWIND_SECONDS)
        # Bodies that do not end keep their slots; of the others nothing is left to write.
        self._endings = [(run, None) for run, _ in self._endings]
        self._fetcher.begin_anew()
        joined = await self._membership.join_anew()
        # Not before: while it registers, the keeper may tell of the same loss.
        self._session_lost = False
        if joined:
            self._hinted = True
            self._keeper.nudge()
        else:
            self.stop(now=True)

    async def _leave(self) -> None:
        """End what is left of the bodies, then the session: nobody may be given a job whose body still runs here."""
        left = [run for run in self._runs.values() if not run.ended]
        for run in left:
            self._executor.stop(run, Stop.HAND_BACK)
        bodies = [run.body for run in left if run.body is not None and not run.ended]
        if bodies:
            await asyncio.wait(bodies, timeout=UNWIND_SECONDS)
        for run in left:
            self._executor.abandon(run)
        transitions = [transition for _, transition in self._endings if transition is not None]
        if transitions:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(LAST_TRIES):
                    for part in endings_by_call(transitions):
                        await self._store.finish(self.session.id, part)
        await self._executor.close()
        await self._keeper.stop()
        await self._membership.leave()
        logger.info("worker %s has stopped after %d jobs", self.session.worker, self.done)

    async def _give_up(self, serving: asyncio.Future[None]) -> None:
        """A store that hangs does not keep a worker from ending."""
        await self._grace_over(UNWIND_SECONDS + LAST_TRIES + 1.0)
        logger.error("the store does not answer; leaving the rest to the rescuer")
        serving.cancel()

    async def _grace_over(self, more: float) -> None:
        await self._stopping.wait()
        while (left := self._grace_ends + more - time.monotonic()) > 0:  # noqa: ASYNC110 - see below
            # Looked at again and again: a second signal ends the grace sooner.
            await asyncio.sleep(min(left, 0.5))

    def _background_tasks(self) -> list[BackgroundTask]:
        watch = LoopMonitor(self._loop, threading.get_ident(), self._settings.intervals.loop_lag)
        background_tasks: list[BackgroundTask] = [watch.run]
        if self._settings.manager:
            background_tasks.append(self._manage)
        return background_tasks

    async def _manage(self, store: Store) -> None:
        session, intervals, retention = self.session.id, self._settings.intervals, self._settings.retention
        wakeups = self._store.wakeups
        self.manager = Manager(store, session=session, intervals=intervals, retention=retention, wakeups=wakeups)
        await self.manager.run()

    def _torn_down(self) -> bool:
        return self._task is not None and self._task.cancelling() > 0

    def _patient(self) -> bool:
        """Whether it is worth waiting for a store that fails: also at a stop a little, for what has ended."""
        return not self._stopping.is_set() or time.monotonic() < self._grace_ends + LAST_TRIES

    # -- called by the keeper, from its thread ------------------------------------------------------------------------

    def holdings(self) -> Holdings:
        # In this order: jobs are in the books before their number is, and numbers start anew before the session does.
        session, answered = self.session.id, self._fetcher.answered
        return Holdings(session, list(self._runs), answered, self._stopping.is_set())

    def renewed(self, renewal: Renewal) -> None:
        if self._marks is not None:
            self._marks.beat()
        self._on_the_loop(self._told, renewal)

    def session_lost(self, session: str) -> None:
        self._on_the_loop(self._lose_session, session)

    def contact_lost(self) -> None:
        self._on_the_loop(self._lose_contact)

    def _on_the_loop(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all bodies have ended
            self._loop.call_soon_threadsafe(call, *args)

    def _told(self, renewal: Renewal) -> None:
        if self._out_of_contact:
            self._out_of_contact = False
            self._hinted = True
            self._news.set()
        self._executor.end_lost(self._runs.values())
        for held in renewal.lost:
            if (run := self._runs.get(held)) is not None:
                self._executor.stop(run, Stop.LOST)
        wanted = set(renewal.cancel)
        for run in list(self._runs.values()):
            if run.claimed.id in wanted and run.stop is None:
                self._executor.stop(run, Stop.CANCEL)

    def _lose_session(self, session: str) -> None:
        # The loop may have heard of it first, and begun anew.
        if session == self.session.id:
            self._session_lost = True
            self._news.set()

    def _lose_contact(self) -> None:
        self._out_of_contact = True
        self._end_limited(list(self._runs.values()))

    def _end_limited(self, runs: list[Run]) -> None:
        """Somebody else may be given the lane soon, so its bodies end here first, and no others begin."""
        if limited := [run for run in runs if run.claimed.limited and not run.ended]:
            logger.warning("no contact with the store: ending %d jobs of limited lanes in time", len(limited))
        for run in limited:
            if run.in_thread and run.running is not None:
                # It cannot be stopped. Handing it back now would only let the next one begin sooner beside it.
                run.running.request_cancel()
            else:
                self._executor.stop(run, Stop.CONTACT)
