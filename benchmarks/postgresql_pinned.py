"""What a forgotten open transaction does to claims: no dead row can be removed as long as it is open.

500 jobs a second are sent, claimed and finished, before, while and after a transaction holds its snapshot. Then and at
the end of each time, a backlog is drained as fast as it goes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median, quantiles

from fairlane.store import open_store
from fairlane.store.port import Store

from .contest import Options
from .figures import Bound, Figure
from .postgresql import started
from .postgresql_server import Server, connected
from .workload import Run, Stopwatch, Worker, job, load

RATE = 500
BATCH = 100
LANES = 50
BACKLOG = 10_000
CALM = 20.0
"""Seconds at the rate before the transaction, and seconds at its end that are looked at."""
DEAD = "SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables"
RECOVERY = 30.0
"""Seconds after the transaction until everything must be as before."""


@dataclass
class Stretch:
    """What was measured over some time."""

    claims: list[float]
    """Seconds that each claim took."""
    rate: float
    """Jobs per second of the backlog at its end."""
    processor: float
    """Processor seconds per job of it, of client and server together."""

    @property
    def p99(self) -> float:
        return quantiles(self.claims, n=100)[98]


async def run(run: Run, options: Options) -> list[Figure]:
    """Before, while and after."""
    pin, calm = (15.0, 5.0) if run.quick else (options.pin, CALM)
    with started(run, options) as server:
        url = await server.database("pinned")
        store = await open_store(url)
        try:
            worker = await Worker.start(store, BATCH)
            await _paced(store, worker, 3.0)
            before = await _stretch(server, store, worker, calm, calm)
            async with connected(url) as holder, holder.transaction(isolation="repeatable_read", readonly=True):
                await holder.fetchval("SELECT count(*) FROM pg_class")
                pinned = await _stretch(server, store, worker, pin, calm)
                async with connected(url) as asking:
                    dead = int(await asking.fetchval(DEAD))
            after = await _stretch(server, store, worker, RECOVERY + calm, calm)
        finally:
            await store.close()
    return list(_figures(before, pinned, after, pin, dead))


async def _stretch(server: Server, store: Store, worker: Worker, seconds: float, looked_at: float) -> Stretch:
    claims = await _paced(store, worker, seconds)
    await load(store, (job(f"user:{number % LANES}") for number in range(BACKLOG)))
    before, watch = server.processor(), Stopwatch()
    done = await worker.drain(BATCH)
    pace = watch.pace(BACKLOG)
    spent = pace.processor + (server.processor() - before) / BACKLOG
    if done != BACKLOG:
        raise AssertionError(f"{done} of {BACKLOG} jobs were run")
    return Stretch([took for moment, took in claims if moment >= seconds - looked_at], pace.rate, spent)


async def _paced(store: Store, worker: Worker, seconds: float) -> list[tuple[float, float]]:
    """Send, claim and finish at the rate; for each claim when it began and how long it took."""
    claims: list[tuple[float, float]] = []
    begun = time.perf_counter()
    every = 0.1
    sent = 0
    for tick in range(int(seconds / every)):
        await asyncio.sleep(max(0.0, begun + tick * every - time.perf_counter()))
        batch = [job(f"user:{(sent + number) % LANES}") for number in range(int(RATE * every))]
        sent += len(batch)
        await store.enqueue(batch)
        done = 0
        while done < len(batch):
            # In parts, as free slots come up.
            moment = time.perf_counter()
            claimed = await worker.claim(BATCH // 10)
            claims.append((moment - begun, time.perf_counter() - moment))
            if not claimed:
                raise AssertionError(f"{len(batch) - done} jobs were not to be had")
            await worker.finish(claimed)
            done += len(claimed)
    return claims


def _figures(before: Stretch, pinned: Stretch, after: Stretch, seconds: float, dead: int) -> Iterator[Figure]:
    stretches = {
        "before": before,
        f"pinned for {seconds:.0f} s": pinned,
        f"{RECOVERY:.0f} s after": after,
    }
    bounds = {"before": None, f"{RECOVERY:.0f} s after": Bound(limit=2.0, least=False)}
    for name, stretch in stretches.items():
        first = name == "before"
        yield Figure(
            bench="postgresql-pinned",
            case=f"claim, {name}: median",
            value=median(stretch.claims) * 1e3,
            unit="ms",
            ratio=None if first else median(stretch.claims) / median(before.claims),
            against="" if first else "before",
            bound=bounds.get(name),
        )
        yield Figure(
            bench="postgresql-pinned",
            case=f"claim, {name}: p99",
            value=stretch.p99 * 1e3,
            unit="ms",
            bound=Bound(limit=50.0, least=False),
        )
        yield Figure(
            bench="postgresql-pinned",
            case=f"backlog, {name}",
            value=stretch.rate,
            unit="jobs/s",
            ratio=None if first else stretch.rate / before.rate,
            against="" if first else "before",
            bound=None if first else Bound(limit=0.8),
        )
        yield Figure(
            bench="postgresql-pinned",
            case=f"backlog, {name}: processor",
            value=stretch.processor * 1e6,
            unit="µs/job",
            ratio=None if first else stretch.processor / before.processor,
            against="" if first else "before",
            bound=None if first else Bound(limit=1.25, least=False),
        )
    yield Figure(bench="postgresql-pinned", case="dead rows at the end of it", value=dead, unit="rows")
