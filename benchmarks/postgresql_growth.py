"""Whether a call costs the same on PostgreSQL when a thousand times as much is waiting: `growth`, on a server."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fairlane.store import open_store

from .contest import Options
from .figures import Figure
from .growth import Lanes, filled
from .postgresql import started
from .remote_growth import Remote, examine, figures, sizes
from .workload import Run


async def run(run: Run, options: Options) -> list[Figure]:
    """Build the stores, then examine them in turn."""
    with started(run, options) as server:
        async with AsyncExitStack() as stack:
            patients: dict[str, Remote] = {}
            for name, (jobs, lanes) in sizes(100_000 if run.quick else 1_000_000).items():
                url = await server.database("growth")
                store = await open_store(url)
                stack.push_async_callback(store.close)
                worker = await filled(store, jobs, Lanes(lanes))
                patients[name] = Remote(store, worker, Lanes(lanes), server=server)
                await server.settle(url)
            await examine(list(patients.values()), 40 if run.quick else 100)
    return list(figures("postgresql-growth", patients))
