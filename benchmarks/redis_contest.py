"""Fairlane and other queues for Python on Valkey or Redis, beside the bare loop in the same run.

What must hold stands at the end of the table. Each measurement has a new server, which writes nothing to the disk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from .contest import Options, Samples, hold
from .figures import Bound, Figure
from .redis_server import FORGETFUL, Server, program
from .workload import Run

ONE, TWO = "drain, 1 worker", "drain, 2 workers"
SINGLY = "enqueue one by one"
BULK = ("enqueue in bulk, 1,000 a call", "enqueue in bulk, all in one call")
IDLE = "idle, enqueue to start: median"
US = "fairlane"


@contextmanager
def prepared(run: Run, options: Options, settings: tuple[str, ...] = FORGETFUL) -> Iterator[Server]:
    """Servers of the benchmark's own, one at a time."""
    server = Server(program(options.server), run.directory, options=settings)
    kept = "nothing is written to the disk" if settings is FORGETFUL else "every write is flushed to the disk"
    print(f"{server.version}; {kept}", file=sys.stderr, flush=True)
    try:
        yield server
    finally:
        server.kill()


async def run(run: Run, options: Options) -> list[Figure]:
    """The contest on Redis, and what must hold."""
    with prepared(run, options) as server:
        samples = await hold("redis", server, options, quick=run.quick)
    return [*samples.figures(), *_demands(samples)]


def _demands(samples: Samples) -> Iterator[Figure]:
    peers = set(samples.peers)
    acknowledging = {who for who, side in samples.peers.items() if side.acknowledges}
    keeping = {who for who, side in samples.peers.items() if side.keeps}
    yield from samples.demand(ONE, US, (ONE, samples.best(ONE, peers)), Bound(limit=5.0))
    yield from samples.demand(ONE, US, (ONE, "bare"), Bound(limit=1 / 4))
    yield from samples.demand(TWO, US, (ONE, US), Bound(limit=1.6))
    for lanes in ("1,000 lanes", "1,000 lanes, limit 1"):
        yield from samples.demand(ONE, f"{US}, {lanes}", (ONE, US), Bound(limit=1 / 2))
    both = f"{ONE}: CPU of both"
    yield from samples.demand(both, US, (both, samples.best(both, peers)), Bound(limit=1 / 4, least=False))
    yield from samples.demand(SINGLY, US, (SINGLY, "bare"), Bound(limit=3 / 4))
    yield from samples.demand(SINGLY, US, (SINGLY, samples.best(SINGLY, keeping)), Bound(limit=1.0))
    for case in BULK:
        if values := samples.values(case, US):
            yield Figure(
                bench="redis",
                case=f"must hold: {case}: {US}",
                value=median(values),
                unit="jobs/s",
                bound=Bound(limit=60_000),
            )
    yield from samples.demand(IDLE, US, (IDLE, samples.best(IDLE, acknowledging)), Bound(limit=1.0, least=False))
