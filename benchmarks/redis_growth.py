"""Whether a call costs the same on Redis when many times as much is waiting, and what room a waiting job takes.

`growth`, with each store on a server of its own: what one of them has to remember slows none of the others down.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from fairlane.store import open_store

from .contest import Options
from .figures import Bound, Figure
from .growth import Lanes, filled
from .redis_contest import prepared
from .remote_growth import Remote, examine, figures, sizes
from .workload import PAYLOAD, Run

ROOM = Bound(limit=1_024.0, least=False)
"""The most bytes that a waiting job may take besides its payload."""


async def run(run: Run, options: Options) -> list[Figure]:
    """Build the stores, then examine them in turn."""
    many = min(options.waiting, 20_000) if run.quick else options.waiting
    patients: dict[str, Remote] = {}
    rooms: list[Figure] = []
    async with AsyncExitStack() as stack:
        for name, (jobs, lanes) in sizes(many).items():
            server = stack.enter_context(prepared(run, options))
            store = await open_store(await server.database(name))
            stack.push_async_callback(store.close)
            before = server.memory()
            worker = await filled(store, jobs, Lanes(lanes))
            rooms.append(
                Figure(
                    bench="redis-growth",
                    case=f"memory of a waiting job besides its payload: {name}",
                    value=(server.memory() - before) / jobs - len(PAYLOAD),
                    unit="bytes",
                    bound=ROOM,
                )
            )
            patients[name] = Remote(store, worker, Lanes(lanes), server=server)
        await examine(list(patients.values()), 40 if run.quick else 100)
    return [*figures("redis-growth", patients), *rooms]
