"""The command ``bench``: how many jobs per second this store takes and finishes on this machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from ..documents import Record
from ..model.ids import new_id
from ..model.slots import Slots
from . import display
from .command import Command, json_option, run, url_option
from .context import Target, Use
from .display import plain

if TYPE_CHECKING:
    from ..app import Fairlane
    from ..task import Call, Task
    from ..worker.worker import Worker

SINGLES = 200
"""How many jobs are sent one by one, each waited for before the next."""
PATIENCE = 60.0


@click.command("bench", cls=Command)
@click.option("--jobs", type=click.IntRange(1, 10_000_000), default=20_000, show_default=True)
@click.option("--slots", "-c", type=click.IntRange(1, 10_000), default=100, show_default=True)
@url_option
@json_option
def bench_command(jobs: int, slots: int, url: str | None, as_json: bool) -> None:
    """Send jobs that do nothing and run them, on a queue of their own; on a temporary file unless --url is given."""
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as directory:
        # Only a store that is named here is put under load, not one that the environment happens to name.
        target = Target(None, url or f"sqlite:///{Path(directory) / 'bench.db'}", Use.MAKE)
        found = run(_measure(target, jobs, slots))
    if as_json:
        display.show_json({"store": target.shown_url, **found})
        return
    display.show(
        display.fields(
            [
                ("store", plain(target.shown_url)),
                ("sent in batches", plain(f"{found['enqueue_per_second']:,.0f} jobs/s")),
                ("sent one by one", plain(f"{found['single_enqueue_per_second']:,.0f} jobs/s")),
                ("run", plain(f"{found['run_per_second']:,.0f} jobs/s, {slots} slots in one process")),
                ("from sent to result", plain(f"{found['round_trip_seconds'] * 1000:.1f} ms, the median of {SINGLES}")),
            ]
        )
    )


async def _measure(target: Target, jobs: int, slots: int) -> Record:
    from ..app import Fairlane

    # Other work of a real store stays untouched: nobody else knows this queue, and these workers know no other.
    queue = f"bench-{new_id()[-12:]}"
    app = Fairlane(settings=target.app.settings)

    @app.task(queue=queue, name="fairlane.bench", retries=0)
    async def nothing() -> None:
        """What costs least."""

    def worker(burst: bool) -> Worker:
        return app.worker(queues=[queue], slots=Slots(total=slots), pool=queue, burst=burst, manager=False)

    async with app:
        sending = await _send(app, [nothing.call() for _ in range(jobs)])
        began = time.perf_counter()
        with display.error_console().status(f"running {jobs:,} jobs"):
            await worker(burst=True).run()
        running = time.perf_counter() - began
        singles = await _one_by_one(worker(burst=False), nothing)
    return {
        "jobs": jobs,
        "slots": slots,
        "enqueue_per_second": jobs / sending,
        "run_per_second": jobs / running,
        **singles,
    }


async def _send(app: Fairlane, calls: list[Call[None]]) -> float:
    """Send them all; answers the seconds it took."""
    stored = 0
    with display.progress("sending", len(calls)) as advance:

        def on_sent(count: int, _: int) -> None:
            nonlocal stored
            advance(count - stored)
            stored = count

        began = time.perf_counter()
        await app.enqueue_many(calls, progress=on_sent)
        return time.perf_counter() - began


async def _one_by_one(worker: Worker, nothing: Task[[], None]) -> Record:
    """Send one after the other to a worker that waits for them, each when the last one has ended."""
    served = asyncio.ensure_future(worker.run())
    await worker.ready.wait()
    sending, waits = 0.0, []
    for _ in range(SINGLES):
        began = time.perf_counter()
        handle = await nothing.enqueue()
        sending += time.perf_counter() - began
        await handle.result(PATIENCE)
        waits.append(time.perf_counter() - began)
    worker.stop()
    await served
    return {"single_enqueue_per_second": SINGLES / sending, "round_trip_seconds": median(waits)}
