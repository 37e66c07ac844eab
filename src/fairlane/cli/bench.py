"""The command ``bench``: measures how many jobs per second this store accepts and finishes on this machine."""

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
from .context import CommandContext, StoreAccess
from .display import plain

if TYPE_CHECKING:
    from ..app import Fairlane
    from ..task import Call, Task
    from ..worker.worker import Worker

SINGLES = 200
"""Jobs that are sent one by one, each after the result of the one before."""
RESULT_TIMEOUT = 60.0


@click.command("bench", cls=Command)
@click.option("--jobs", type=click.IntRange(1, 10_000_000), default=20_000, show_default=True)
@click.option("--slots", "-c", type=click.IntRange(1, 10_000), default=100, show_default=True)
@url_option
@json_option
def bench_command(jobs: int, slots: int, url: str | None, as_json: bool) -> None:
    """Send and run jobs that do nothing, on a queue of their own. Uses a temporary file unless --url is given."""
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as directory:
        # The environment is ignored: only a store that is named explicitly is put under load.
        context = CommandContext(None, url or f"sqlite:///{Path(directory) / 'bench.db'}", StoreAccess.CREATE)
        found = run(_measure(context, jobs, slots))
    if as_json:
        display.show_json({"store": context.shown_url, **found})
        return
    display.show(
        display.fields(
            [
                ("store", plain(context.shown_url)),
                ("sent in batches", plain(f"{found['enqueue_per_second']:,.0f} jobs/s")),
                ("sent one by one", plain(f"{found['single_enqueue_per_second']:,.0f} jobs/s")),
                ("run", plain(f"{found['run_per_second']:,.0f} jobs/s, {slots} slots in one process")),
                ("round trip", plain(f"{found['round_trip_seconds'] * 1000:.1f} ms, median of {SINGLES}")),
            ]
        )
    )


async def _measure(context: CommandContext, jobs: int, slots: int) -> Record:
    from ..app import Fairlane

    # A queue name of its own keeps the jobs of a real store apart: no other worker serves it.
    queue = f"bench-{new_id()[-12:]}"
    app = Fairlane(settings=context.app.settings)

    @app.task(queue=queue, name="fairlane.bench", retries=0)
    async def no_op() -> None:
        """Do nothing."""

    def worker(burst: bool) -> Worker:
        return app.worker(queues=[queue], slots=Slots(total=slots), pool=queue, burst=burst, manager=False)

    async with app:
        sending = await _send(app, [no_op.call() for _ in range(jobs)])
        began = time.perf_counter()
        with display.error_console().status(f"running {jobs:,} jobs"):
            await worker(burst=True).run()
        running = time.perf_counter() - began
        singles = await _one_by_one(worker(burst=False), no_op)
    return {
        "jobs": jobs,
        "slots": slots,
        "enqueue_per_second": jobs / sending,
        "run_per_second": jobs / running,
        **singles,
    }


async def _send(app: Fairlane, calls: list[Call[None]]) -> float:
    """Send all calls and return the seconds it took."""
    stored = 0
    with display.progress("sending", len(calls)) as advance:

        def on_sent(count: int, _: int) -> None:
            nonlocal stored
            advance(count - stored)
            stored = count

        began = time.perf_counter()
        await app.enqueue_many(calls, progress=on_sent)
        return time.perf_counter() - began


async def _one_by_one(worker: Worker, no_op: Task[[], None]) -> Record:
    """Send jobs to an idle worker, each after the result of the one before."""
    running = asyncio.ensure_future(worker.run())
    await worker.ready.wait()
    sending, waits = 0.0, []
    for _ in range(SINGLES):
        began = time.perf_counter()
        handle = await no_op.enqueue()
        sending += time.perf_counter() - began
        await handle.result(RESULT_TIMEOUT)
        waits.append(time.perf_counter() - began)
    worker.stop()
    await running
    return {"single_enqueue_per_second": SINGLES / sending, "round_trip_seconds": median(waits)}
