"""The executor of a Celery worker: hands claimed jobs to the worker's own consumer, and stops them through its pool.

It belongs to the event loop of the agent. Celery's consumer and pool belong to the worker's main thread, where calls
are made through `in_main`. Celery reports from there or from threads of its pool, and the reports return to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from ...errors import InvalidInput
from ...model import states
from ...model.job import Claimed, Reason
from ...model.states import Move, Transition
from ...worker.executor import Ended, UnknownTasks
from ...worker.run import Run, Stop
from .messages import JOB, KEY, LANE, QUEUE, LocalMessage

logger = logging.getLogger("fairlane.celery")
GONE_EVERY, GONE_SECONDS = 0.02, 10.0
"""How often, and for how long, to look whether a process that Celery kills is gone."""
BEGUN_ANEW = {"retries": 0, "eta": None, "expires": None}
"""The headers that a job which an operator retries begins with: it has the last message of the job that has ended."""
STOPPED = "the worker was stopped while the task ran; without acks_late it must not run twice"
DIED = "the worker died while the task ran; without acks_late it must not run twice"


class Delivery:
    """One claimed job on its way through Celery, until its end is reported."""

    def __init__(self, run: Run, executor: CeleryExecutor) -> None:
        self.run = run
        self.executor = executor
        self.request: Any = None
        """The request that Celery has made of it."""
        self.ended: asyncio.Event | None = None
        """Set at its end, if it was asked to stop."""
        self.ending: Transition | None = None
        """How it ended, while the process that ran it is not gone yet."""

    @property
    def repeatable(self) -> bool:
        """Whether the task may run again after it began."""
        return bool(self.request is not None and self.request.task.acks_late)

    def accepted(self) -> None:
        """A process or thread of the pool begins to run it."""
        self.run.entered = True
        self.run.began_at = time.monotonic()

    def refused(self, why: str) -> None:
        """Celery has refused its message. After a request was made, that decides nothing."""
        if self.request is None:
            self.end(states.fail(self.run.claimed.held, Reason.BAD_PAYLOAD, why))

    def end(self, transition: Transition) -> None:
        """Report the end of the run, from any thread. The first report counts."""
        self.executor.report(self, transition)

    def end_without(self, pid: int | None, transition: Transition) -> None:
        """The same, once the process that runs it is gone: until then its slot is not free."""
        self.executor.report_without(pid, self, transition)

    def given_back(self) -> Transition:
        """The transition of a job that is returned without having ended."""
        held = self.run.claimed.held
        if not self.run.entered:
            return states.take_back(held)
        return states.hand_back(held) if self.repeatable else states.fail(held, Reason.CRASHED, STOPPED)


class HostsJobs(Protocol):
    """What the executor requires of the Celery worker around it."""

    @property
    def pool(self) -> Any:
        """Celery's pool."""

    connection_lost: bool
    """Whether Celery is dealing with the loss of its connection to the broker."""

    def knows(self, task: str) -> bool:
        """Whether the worker has a task of this name."""

    def repeats(self, task: str) -> bool:
        """Whether a task that it has may run again after a process that ran it has died."""

    def queue_of(self, job: Claimed) -> str:
        """The name of a job's queue in Celery."""

    def deliver(self, delivery: Delivery) -> None:
        """Hand a job to Celery's consumer, in the main thread."""

    def in_main(self, call: Callable[[], None]) -> None:
        """Make a call in the main thread."""

    def stop_claiming(self) -> None:
        """Celery stops: claim nothing more. May be called from any thread."""


class CeleryExecutor:
    """Runs jobs in the pool of a Celery worker."""

    def __init__(self, ended: Ended, host: HostsJobs, unknown_task: float) -> None:
        self._ended = ended
        self.host = host
        self._loop = asyncio.get_running_loop()
        self._deliveries: dict[Run, Delivery] = {}
        self._unknown_tasks = UnknownTasks(unknown_task)

    def deliveries(self) -> list[Delivery]:
        """The jobs that have not ended. May be called from any thread."""
        return list(self._deliveries.values())

    # -- called by the worker ----------------------------------------------------------------------------------------

    def start_all(self, runs: list[Run]) -> None:
        """Hand jobs to Celery. A job whose task is unknown here is declined, and one that must not run twice fails."""
        for run in runs:
            if not self.host.knows(run.claimed.task):
                run.ended = True
                self._ended(run, self._unknown_tasks.decline(run))
                continue
            if run.claimed.suspect and not self.host.repeats(run.claimed.task):
                # Its sender did not have the task and left it a budget for crashes, which the task does not allow.
                run.ended = True
                self._ended(run, states.fail(run.claimed.held, Reason.CRASHED, DIED))
                continue
            run.begun = True
            delivery = self._deliveries[run] = Delivery(run, self)
            self.host.deliver(delivery)

    def stop(self, run: Run, why: Stop) -> None:
        """Stop a job where the pool can; a thread runs on, and keeps its slot until it ends."""
        delivery = self._deliveries.get(run)
        if run.ended or delivery is None:
            return
        first = run.stop is None
        if first or why is Stop.LOST:
            run.stop = why
        if first:
            self.host.in_main(partial(self._terminate, delivery, why))
            # A worker that leaves waits for the runs that have one.
            delivery.ended = asyncio.Event()
            run.body = self._loop.create_task(_wait_for(delivery.ended))

    def abandon(self, run: Run) -> None:
        """End a run now: its pool is gone, or does not end it."""
        delivery = self._deliveries.get(run)
        if delivery is None:
            return
        if delivery.ending is not None:
            # Celery has stored its result: it must not run again.
            self._end(delivery, delivery.ending)
        else:
            run.stop = run.stop or Stop.HAND_BACK
            self._end(delivery, delivery.given_back())

    def end_lost(self, runs: Iterable[Run]) -> None:
        """Do nothing: Celery reports every end."""

    async def close(self) -> None:
        """Do nothing: the pool belongs to Celery."""

    # -- called in the worker's main thread --------------------------------------------------------------------------

    def message(self, delivery: Delivery, accept: Any) -> LocalMessage | None:
        """The message of a job; None if there is none, and then the job has failed."""
        job = delivery.run.claimed
        added = {JOB: job.id, QUEUE: self.host.queue_of(job), LANE: job.lane}
        if job.sticky is not None:
            added[KEY] = job.sticky
        try:
            message = LocalMessage(job.payload, delivery, added=added, accept=accept, again=job.suspect)
        except (InvalidInput, ValueError) as exc:
            delivery.end(states.fail(job.held, Reason.BAD_PAYLOAD, str(exc)))
            return None
        if job.attempt == 1 and not _is_id_of(job.id, str(message.headers.get("id"))):
            message.headers.update(BEGUN_ANEW)
        return message

    def _terminate(self, delivery: Delivery, why: Stop) -> None:
        if delivery.request is not None and not delivery.run.ended:
            delivery.request.stop(revoke=why is Stop.CANCEL)

    # -- called by Celery, from any thread ---------------------------------------------------------------------------

    def report(self, delivery: Delivery, transition: Transition) -> None:
        """Celery has ended a run."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has left, and handed the job back
            self._loop.call_soon_threadsafe(self._end, delivery, transition)

    def report_without(self, pid: int | None, delivery: Delivery, transition: Transition) -> None:
        """Celery has ended a run, and is about to kill its process."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_without, pid, delivery, transition, time.monotonic())

    def _end_without(self, pid: int | None, delivery: Delivery, transition: Transition, since: float) -> None:
        delivery.ending = delivery.ending or transition
        if pid is not None and _runs(pid) and time.monotonic() < since + GONE_SECONDS:
            self._loop.call_later(GONE_EVERY, self._end_without, pid, delivery, transition, since)
        else:
            self._end(delivery, transition)

    def _end(self, delivery: Delivery, transition: Transition) -> None:
        run = delivery.run
        if run.ended:
            return
        run.ended = True
        del self._deliveries[run]
        if delivery.ended is not None:
            delivery.ended.set()
        if run.began_at is not None:
            run.seconds = time.monotonic() - run.began_at
        self._ended(run, self._final(delivery, transition))

    def _final(self, delivery: Delivery, transition: Transition) -> Transition | None:
        """What is written: a run that was stopped ends as its stop requires, unless it has completed."""
        run = delivery.run
        if run.stop is Stop.LOST:
            return None
        if run.stop is None or transition.move is Move.COMPLETE:
            return transition
        return states.cancel(run.claimed.held) if run.stop is Stop.CANCEL else delivery.given_back()


def _is_id_of(job: str, id: str) -> bool:
    """Whether a job got its id from its message: that, one of a replacement, or one of a copy of a broadcast."""
    return job == id or job.startswith((f"{id}.", f"{id}/"))


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
