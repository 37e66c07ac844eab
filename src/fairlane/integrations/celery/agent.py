"""The agent: a native Fairlane worker in a thread of a Celery worker's main process.

It claims exactly as many jobs as Celery's pool has free places, and hands them to Celery's consumer through a pipe that
the consumer's event loop reads. If it ends by itself, the Celery worker stops: it would never get another job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from celery.platforms import EX_FAILURE
from celery.worker import state as celery_state
from kombu.serialization import prepare_accept_content

from ...model import states
from ...model.job import Claimed, Reason
from ...model.names import LONGEST_SECONDS, NAME_PATTERN
from ...model.session import Session
from ...model.slots import Slots
from ...runtime.running_job import Report
from ...task import Registry
from ...worker.executor import Ended, RunsJobs
from ...worker.settings import WorkerSettings
from ...worker.worker import Worker
from .executor import CeleryExecutor, Delivery
from .result_recorder import ResultRecorder

if TYPE_CHECKING:
    from .fair import Fair
    from .sticky_workers import Membership

logger = logging.getLogger("fairlane.celery")
LEAVE_SECONDS = 30.0
"""How long a Celery worker that stops waits until the ends of its jobs are written."""


class Agent:
    """Claims jobs for one Celery worker. Its methods are called in the main thread unless they say otherwise."""

    def __init__(self, fair: Fair, controller: Any, membership: Membership | None = None) -> None:
        self._fair = fair
        self._controller = controller
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._executor: CeleryExecutor | None = None
        self._deliveries: deque[Delivery] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._handler: Callable[[Any], None] | None = None
        self._accept = prepare_accept_content(fair.app.conf.accept_content)
        self._stopping = False
        self._attached = False
        self.connection_lost = False
        """Whether Celery is dealing with the loss of its connection to the broker."""
        self.membership = membership
        """Its place in the pool of a router."""

    @property
    def pool(self) -> Any:
        """Celery's pool."""
        return self._controller.pool

    # -- its life ----------------------------------------------------------------------------------------------------

    def attach(self, handler: Callable[[Any], None]) -> None:
        """Hand jobs to Celery through `handler` from now on; starts the thread the first time."""
        self._handler = handler
        self._attached = True
        if self._thread is None:
            # After the pool has started: its processes are forks, and must not contain a thread in the middle of work.
            self._thread = threading.Thread(target=self._run, name="fairlane-agent", daemon=True)
            self._thread.start()
        self._on_the_loop(self._pause)

    def detach(self) -> None:
        """Claim and hold nothing while Celery has no connection to the broker: its event loop stands still."""
        self._attached = False
        self._on_the_loop(self._pause)
        self._return_undelivered()

    def register(self, hub: Any) -> None:
        """Read the pipe in the event loop of Celery's consumer, which forgets it when the connection is lost."""
        hub.add_reader(self._reader, self._wake)

    def stop_claiming(self) -> None:
        """Claim nothing more, and return what Celery has not been given yet. May be called in a signal handler."""
        self._stopping = True
        self._on_the_loop(self._stop)
        self._return_undelivered()

    def _return_undelivered(self) -> None:
        """Return the jobs that Celery has not been given yet. May be called in any thread."""
        with contextlib.suppress(IndexError):
            while True:
                delivery = self._deliveries.popleft()
                delivery.end(delivery.given_back())

    def leave(self) -> None:
        """Celery's pool has stopped: return what is left, and end the session."""
        self.stop_claiming()
        self._wait_for_threads()
        self._on_the_loop(self._give_up)
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)
            if self._thread.is_alive():
                logger.error("the store does not answer; the rescuer will recover the remaining jobs")

    def _wait_for_threads(self) -> None:
        """Wait for tasks in threads: the process cannot end before they do, and no other worker may run their jobs."""
        found = [] if self._executor is None else [each.request for each in self._executor.deliveries()]
        futures = [request.future for request in found if request is not None and request.future is not None]
        for future in futures:
            future.cancel()  # has no effect on those that have begun
        wait(futures)

    def flushed(self, flush: Callable[[], None] | None) -> None:
        """Let Celery's pool forget what the broker would deliver again, except for jobs, which it would not.

        Jobs that a process has been sent are kept. Those that it has not are returned, because they never began.
        """
        sent = []
        for delivery in [] if self._executor is None else self._executor.deliveries():
            request = delivery.request
            if request is None or request.future is not None:
                continue  # threads begin what they were given
            result = None if request._apply_result is None else request._apply_result()
            if result is not None and result._write_to is not None:
                sent.append(result)
            elif not delivery.run.entered:
                delivery.end(delivery.given_back())
        for result in sent:
            result._accepted = True  # flush() drops what is not accepted
        busy: set[int] = getattr(self.pool._pool, "_busy_workers", set())
        busy_before = set(busy)
        try:
            if flush is not None:
                flush()
        finally:
            for result in sent:
                # Unless a process has really accepted it meanwhile.
                result._accepted = result._worker_pid is not None
                if not result.ready():
                    # Celery 5.4 forgets these too: no result would be read any more, and their process would seem free.
                    result._cache[result._job] = result
                    busy |= busy_before & {result._write_to.inqW_fd}

    # -- called by the executor, in the agent's thread ---------------------------------------------------------------

    def knows(self, task: str) -> bool:
        """Whether Celery has a task of this name."""
        return task in self._fair.app.tasks

    def repeats(self, task: str) -> bool:
        """Whether a task may run again after a process that ran it has died."""
        found = self._fair.app.tasks[task]
        # Celery has the second since 5.7.
        return bool(found.acks_late or getattr(found, "retry_on_worker_lost", False))

    def queue_of(self, job: Claimed) -> str:
        """The name of a job's queue in Celery."""
        return job.queue if self.membership is None else self.membership.queue_of(job)

    def deliver(self, delivery: Delivery) -> None:
        """Hand a job to Celery's consumer."""
        self._deliveries.append(delivery)
        # Looked at afterwards: the main thread returns what it finds after it has said that it stops or is detached.
        if self._stopping or not self._attached:
            self._return_undelivered()
        else:
            self._poke()

    def in_main(self, call: Callable[[], None]) -> None:
        """Make a call in the main thread."""
        self._calls.append(call)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it will be read
            os.write(self._writer, b"\0")

    # -- the consumer's event loop -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:
                logger.exception("Celery could not stop a job")
        while self._deliveries and not self._stopping:
            self._hand_over(self._deliveries.popleft())

    def _hand_over(self, delivery: Delivery) -> None:
        if delivery.run.ended or self._executor is None or self._handler is None:
            return
        if delivery.run.stop is not None:
            delivery.end(delivery.given_back())
            return
        message = self._executor.message(delivery, self._accept)
        if message is None:
            return
        try:
            self._handler(message)
        except Exception as exc:
            logger.exception("Celery did not take job %s", delivery.run.claimed.id)
            error = f"Celery did not take it: {type(exc).__name__}: {exc}"
            delivery.end(states.fail(delivery.run.claimed.held, Reason.ERROR, error))

    # -- the agent's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            # Not uvloop: the process forks.
            asyncio.run(self._serve())
        except BaseException as exc:
            error = exc
        if not self._stopping:
            logger.critical("the Fairlane agent has ended: this Celery worker stops", exc_info=error)
            self._controller.exitcode = EX_FAILURE
            celery_state.should_terminate = EX_FAILURE
            self._poke()

    async def _serve(self) -> None:
        fairlane = self._fair.fairlane
        self._loop = asyncio.get_running_loop()
        settings = self._settings()
        if self.membership is not None:
            settings = await self.membership.settings(settings)
        self._worker = Worker(
            fairlane.connection.hold,
            fairlane.open_store,
            Registry(),
            settings,
            release=fairlane.connection.release,
            declare=fairlane.declare,
            registered=self._registered,
            executor=self._make_executor,
            tasks=[name for name in self._fair.app.tasks if NAME_PATTERN.fullmatch(name)],
        )
        self._pause()
        if self._stopping:
            return
        recording = asyncio.create_task(ResultRecorder(self._fair, self._leads).run())
        try:
            await self._worker.run()
        finally:
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)

    def _leads(self) -> bool:
        """Whether this worker hosts the leader of all managers."""
        manager = None if self._worker is None else self._worker.manager
        return manager is not None and manager.leads

    def _settings(self) -> WorkerSettings:
        settings = self._fair.fairlane.settings
        # Not the controller's concurrency: the solo pool has one place whatever that says.
        places = self.pool.num_processes
        return WorkerSettings(
            queues=dict.fromkeys(self._fair.served(), 1),
            slots=Slots(total=places + self._fair.ahead, reserved=settings.slots_for(places).reserved),
            pool=settings.pool,
            host=self._controller.hostname,
            # Celery decides how long it waits for running tasks.
            grace=LONGEST_SECONDS,
            intervals=settings.intervals,
            retention=settings.retention,
        )

    def _make_executor(self, ended: Ended, report: Report) -> RunsJobs:
        self._executor = CeleryExecutor(ended, self, self._fair.fairlane.settings.intervals.unknown_task)
        return self._executor

    def _registered(self, session: Session) -> None:
        if self.membership is not None:
            self.membership.index = session.index
        logger.info("Celery worker %s is Fairlane worker %s", self._controller.hostname, session.worker)

    def _on_the_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    def _pause(self) -> None:
        if self._worker is not None:
            self._worker.pause(not self._attached)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _give_up(self) -> None:
        if self._worker is None:
            return
        if self._executor is not None:
            for delivery in self._executor.deliveries():
                self._executor.abandon(delivery.run)
        self._worker.stop(now=True)
