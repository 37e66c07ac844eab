"""The cost of waiting, and how soon it ends."""

from __future__ import annotations

import asyncio
import time

from fairlane.model.intervals import Intervals
from tests.sizes import sized, strict

from . import figures, tasks
from .ledger import BEGIN, now
from .world import Stage

WATCHED = sized(6.0, 10.0)
PRUNING = Intervals(prune=2.0)
"""The defaults, except for a pruner that runs more often, so that the test need not wait long."""
MOST_MILLISECONDS = sized(250.0, 5.0)
"""Less than polling would take, also on a busy machine; in a full run the figure."""
JOBS = sized(30, 100)


async def test_an_idle_worker_uses_no_processor_and_writes_nothing(stages: dict[str, Stage]) -> None:
    """Only its heartbeat and, because it leads, its term are written."""
    async with asyncio.TaskGroup() as at_once:
        for kind, stage in stages.items():
            at_once.create_task(idles(kind, stage))


async def idles(kind: str, stage: Stage) -> None:
    """Watch an idle worker on one kind of store."""
    async with stage.world(intervals=PRUNING) as world:
        worker = world.fleet.worker()
        await world.ready(worker)
        await world.final((await world.send(tasks.noop.call())).id)

        async def leads() -> bool:
            return await world.client.leader() is not None

        await world.until(leads, "it leads")
        # The effects of starting and of the last job are over once the pruner has run.
        await asyncio.sleep(PRUNING.prune + 1.0)
        before, used, begun = world.deployment.contents(), worker.cpu_seconds(), time.monotonic()
        await asyncio.sleep(WATCHED)
        share = (worker.cpu_seconds() - used) / (time.monotonic() - begun)
        figures.record(f"an idle worker, {kind}", percent_of_a_core=round(100 * share, 2))
        assert world.deployment.contents() == before
        assert share < sized(0.05, 0.01)


@strict
async def test_a_job_starts_within_milliseconds_on_an_idle_worker(stage: Stage) -> None:
    async with stage.world(intervals=Intervals()) as world:
        await world.ready(world.fleet.worker())
        times = []
        for _ in range(JOBS):
            before = now()
            handle = await world.send(tasks.noop.call())
            await handle.result(timeout=30)
            times.append((world.ledger.of(handle.id, BEGIN)[0].at - before) / 1e6)
        median, most = figures.median(times), figures.percentile(times, 0.99)
        figures.record("enqueue to start on an idle worker", median_ms=round(median, 2), p99_ms=round(most, 2))
        assert sized(min(times), median) <= MOST_MILLISECONDS
