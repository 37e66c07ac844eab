"""A store, some tasks and workers in this process, with short intervals and short names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fairlane.model.intervals import Intervals
from fairlane.model.job import Job, JobState
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Reserved, Slots
from fairlane.store import open_store
from fairlane.store.port import Store
from fairlane.task import AsyncTask, PlainTask, Registry
from fairlane.worker.settings import WorkerSettings
from fairlane.worker.worker import Worker

PATIENCE = 45.0
QUICK = Intervals(
    heartbeat=0.2,
    lease=6.0,
    poll=0.1,
    rescue=0.1,
    promote=0.1,
    admit=0.1,
    schedule=0.1,
    prune=1.0,
    leader_lease=1.0,
    leader_renew=0.2,
    stand=0.1,
    caution=0.3,
    clock_slack=2.0,
    trust_margin=0.3,
    loop_lag=0.3,
)


class NoSender:
    """Stands where a task expects its client; nothing here enqueues through a task."""


class Yard:
    """What a test of the worker needs."""

    def __init__(self, store: Store, url: str) -> None:
        self.store = store
        self.url = url
        self.registry = Registry()

    def task(self, function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        """Register a function under its own name."""
        kind = AsyncTask if asyncio.iscoroutinefunction(function) else PlainTask
        settings.setdefault("name", function.__name__)
        self.registry.add(kind(NoSender(), function, settings))  # type: ignore[arg-type]  # it is run here, never enqueued
        return function

    async def enqueue(self, name: str, *args: Any, **fields: Any) -> str:
        """Enqueue one job by its task's name; `fields` are options."""
        task = self.registry.find(name)
        call = (task.options(**fields) if fields else task).call(*args)
        [answer] = await self.store.enqueue([call.job])
        return answer.id

    async def lanes(self, *rules: LaneRule, queue: str = "default", **fields: Any) -> None:
        """Declare settings of a queue."""
        declared = QueueSettings(lanes=rules, **fields)
        await self.store.configure([SettingsChange(queue=queue, declared=declared)])

    async def job(self, id: str) -> Job:
        """The job, which must exist."""
        [job] = await self.store.get([id])
        assert job is not None
        return job

    async def until(self, id: str, *states: JobState, patience: float = PATIENCE) -> Job:
        """The job, once it is in one of `states`, or in a final one when none is given."""
        async with asyncio.timeout(patience):
            while True:
                job = await self.job(id)
                if job.state in states or (not states and job.state.final):
                    return job
                await asyncio.sleep(0.01)

    async def _get_store(self) -> Store:
        return self.store

    def make(
        self, slots: int = 4, reserved: Reserved | None = None, store: Store | None = None, **fields: Any
    ) -> Worker:
        """A worker that has not started."""
        fields.setdefault("intervals", QUICK)
        settings = WorkerSettings(slots=Slots(total=slots, reserved=reserved or Reserved()), **fields)

        async def get() -> Store:
            return store or self.store

        return Worker(get, lambda: open_store(self.url), self.registry, settings)

    @asynccontextmanager
    async def worker(self, **fields: Any) -> AsyncIterator[Worker]:
        """A running worker, stopped at the end."""
        worker = self.make(**fields)
        running = asyncio.ensure_future(worker.run())
        ready = asyncio.ensure_future(worker.ready.wait())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        try:
            yield worker
        finally:
            worker.stop(now=True)
            await asyncio.wait_for(running, PATIENCE)


@asynccontextmanager
async def yard_at(url: str) -> AsyncIterator[Yard]:
    """A yard on an empty store."""
    store = await open_store(url)
    try:
        yield Yard(store, url)
    finally:
        await store.close()
