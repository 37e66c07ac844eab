"""Fairlane's side of the drain: ``python -m benchmarks.drain_fairlane PATH JOBS SLOTS``. Prints its pace as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from fairlane import Fairlane

from .workload import Stopwatch


async def main(path: str, jobs: int, slots: int) -> None:
    """Load, drain, tell."""
    app = Fairlane(f"sqlite:///{path}")

    @app.task
    async def noop() -> int:
        return 1

    await app.enqueue_many([noop.call() for _ in range(jobs)])
    worker = app.worker(slots=slots)
    running = asyncio.ensure_future(worker.run())
    await worker.ready.wait()
    watch = Stopwatch()
    while worker.done < jobs:  # noqa: ASYNC110 - a counter, so that the loop under test does nothing more
        await asyncio.sleep(0.005)
    pace = watch.pace(jobs)
    worker.stop()
    await running
    [queue] = await app.client.queues()
    await app.close()
    print(json.dumps({"rate": pace.rate, "processor": pace.processor, "done": queue.counts.completed}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
