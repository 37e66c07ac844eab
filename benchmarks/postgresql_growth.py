"""Whether a call costs the same on PostgreSQL when a thousand times as much is waiting: `growth`, on a server.

What is measured is processor time of the client and of the server together, and the time a caller waits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TypeVar

from fairlane.backends import open_store
from fairlane.settings import LaneRule
from fairlane.store import Store

from .figures import Figure, ratio
from .growth import BATCH, CALLS, FLAT, Lanes, Patient
from .postgresql import Options, started
from .postgresql_server import Server
from .workload import Run, Worker, configure, job, load

T = TypeVar("T")
WARM = 5
"""Cycles that fill caches and prepare statements, and do not count."""


@dataclass
class Remote(Patient):
    """A store on a server, and what its calls took."""

    server: Server = field(kw_only=True)
    waited: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})

    async def _timed(self, call: str, work: Awaitable[T]) -> T:
        # To look at the server takes a while, which is nobody's work: so it comes first, and last.
        server, client, before = self.server.processor(), time.process_time(), time.perf_counter()
        answer = await work
        after, spent = time.perf_counter(), time.process_time() - client
        self.waited[call].append(after - before)
        self.spent[call].append(spent + self.server.processor() - server)
        return answer


async def run(run: Run, options: Options) -> list[Figure]:
    """Build the stores, then examine them in turn."""
    repetitions = 40 if run.quick else 100
    many = 100_000 if run.quick else 1_000_000
    sizes = {"1,000 jobs": (1_000, 10), "1,000 jobs, 100 lanes a batch": (1_000, 2 * BATCH), "many": (many, 10_000)}
    with started(run, options) as server:
        async with AsyncExitStack() as stack:
            patients: dict[str, Remote] = {}
            for name, (jobs, lanes) in sizes.items():
                url = await server.database("growth")
                store = await open_store(url)
                stack.push_async_callback(store.close)
                patients[name] = await _filled(store, jobs, Lanes(lanes), server)
                await server.execute("VACUUM (ANALYZE)", url.rsplit("/", 1)[1])
            await server.execute("CHECKPOINT")
            for repetition in count():
                if repetition == WARM:
                    for patient in patients.values():
                        for spans in (*patient.spent.values(), *patient.waited.values()):
                            spans.clear()
                if repetition == WARM + repetitions:
                    break
                for patient in patients.values():
                    await patient.examine()
    return list(_figures(patients, f"{many:,} jobs"))


async def _filled(store: Store, jobs: int, lanes: Lanes, server: Server) -> Remote:
    """Fill an empty store: first the jobs that hold lanes for ever, then the rest, evenly."""
    await configure(
        store,
        LaneRule(pattern="held:*", limit=1),
        LaneRule(pattern="paused:*", limit=1, paused=True),
    )
    await load(store, (job(lane) for lane in lanes.held))
    holder = await Worker.start(store, max(2, len(lanes.held)))
    held = await holder.claim(len(lanes.held))
    if len(held) != len(lanes.held):
        raise AssertionError(f"{len(held)} of {len(lanes.held)} lanes are held")
    waiting = lanes.alternating()
    await load(store, (job(next(waiting)) for _ in range(jobs - len(held))))
    return Remote(store, await Worker.start(store, BATCH), lanes, server=server)


def _figures(patients: dict[str, Remote], title: str) -> Iterator[Figure]:
    small, spread, big = patients.values()
    for call in CALLS:
        for name, patient in (("1,000 jobs", small), ("1,000 jobs, 100 lanes a batch", spread)):
            yield _figure(f"{call}: {name}", patient.spent[call])
        yield Figure(
            bench="postgresql-growth",
            case=f"{call}: {title}",
            value=median(big.spent[call]) * 1e6,
            unit="µs of CPU",
            ratio=ratio(big.spent[call], small.spent[call]),
            against="1,000 jobs",
            bound=FLAT,
        )
        for against, patient, unit in (
            ("100 lanes a batch", spread, "µs of CPU"),
            ("1,000 jobs", small, "µs of waiting"),
        ):
            mine, theirs = (
                (big.spent[call], patient.spent[call]) if "CPU" in unit else (big.waited[call], patient.waited[call])
            )
            yield Figure(
                bench="postgresql-growth",
                case=f"{call}: {title}",
                value=median(mine) * 1e6,
                unit=unit,
                ratio=ratio(mine, theirs),
                against=against,
            )


def _figure(case: str, spans: list[float]) -> Figure:
    return Figure(bench="postgresql-growth", case=case, value=median(spans) * 1e6, unit="µs of CPU")
