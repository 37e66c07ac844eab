"""What wake-ups cost senders: the same callers with a listener, without one, and without wake-ups.

``python -m benchmarks.postgresql_notify URL`` is the one who listens, a process of its own as a worker is.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

from fairlane.store import open_store
from fairlane.store.port import Store
from fairlane.store.wakeups import queue_topic

from .contest import Options
from .figures import Figure, ratio
from .postgresql import started
from .side import module_command
from .workload import QUEUE, Run, job

CALLERS = (1, 8, 64)
LANES = 1_000
SILENT = "no wake-ups"
"""With `listen=off` in the URL: nothing leaves the process."""


async def run(run: Run, options: Options) -> list[Figure]:
    """Interleave the cases, round by round."""
    jobs = 300 if run.quick else 2_000
    rates: dict[tuple[str, int], list[float]] = {}
    with started(run, options) as server:
        for _ in range(options.rounds):
            for kind in (SILENT, "no listener", "a listener"):
                url = await server.database("notify")
                async with AsyncExitStack() as stack:
                    store = await open_store(url + ("?listen=off" if kind == SILENT else ""))
                    stack.push_async_callback(store.close)
                    if kind == "a listener":
                        await stack.enter_async_context(_listener(url))
                    for callers in CALLERS:
                        rates.setdefault((kind, callers), []).append(await _sent(store, jobs, callers))
                await server.drop(url)
    return [
        Figure(
            bench="postgresql-notify",
            case=f"single jobs, {callers} caller{'s' * (callers > 1)}: {kind}",
            value=median(measured),
            unit="jobs/s",
            ratio=None if kind == SILENT else ratio(measured, rates[SILENT, callers]),
            against="" if kind == SILENT else SILENT,
        )
        for callers in CALLERS
        for (kind, of), measured in rates.items()
        if of == callers
    ]


@asynccontextmanager
async def _listener(url: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(*module_command(__name__, url), stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise AssertionError("nobody listens")
        yield
    finally:
        process.terminate()
        await process.wait()


async def listen(url: str) -> None:
    """Listen to every job, as a worker of the queue does, until this process is ended."""
    store = await open_store(url)
    listener = store.wakeups.subscribe([queue_topic(QUEUE)])
    print("listening", flush=True)
    while True:
        await listener.wait()


async def _sent(store: Store, jobs: int, callers: int) -> float:
    """Jobs per second; every caller waits for one before it sends the next."""

    async def call(count: int) -> None:
        for number in range(count):
            await store.enqueue([job(f"user:{number % LANES}")])

    await call(20)
    before = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(call(jobs // callers))
    return (jobs // callers) * callers / (time.perf_counter() - before)


if __name__ == "__main__":
    asyncio.run(listen(sys.argv[1]))
