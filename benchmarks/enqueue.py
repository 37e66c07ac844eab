"""How many jobs a process can send: one by one, from many callers at once, and in bulk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

from fairlane.model.job import NewJob
from fairlane.store.port import Store

from . import bare
from .figures import Figure, ratio
from .workload import Run, job, opened

CALLERS = 64
LANES = 1_000


async def run(run: Run) -> list[Figure]:
    """Interleave all cases, round by round."""
    singles, batches, rounds = (300, 3, 3) if run.quick else (1_000, 10, 5)
    cases: dict[str, tuple[int, Callable[[Store, list[NewJob]], Awaitable[None]]]] = {
        "one by one": (singles, _one_by_one),
        f"{CALLERS} callers": (5 * singles, _callers),
        "batches of 1,000": (1_000 * batches, _batches),
    }
    rates: dict[str, list[float]] = {case: [] for case in cases}
    plain: dict[str, list[float]] = {"one by one": [], "batches of 1,000": []}
    for _ in range(rounds):
        one, bulk = bare.insert_rates(run.file("bare"), singles, batches)
        plain["one by one"].append(one)
        plain["batches of 1,000"].append(bulk)
        async with opened(run.file("enqueue")) as store:
            for case, (count, send) in cases.items():
                jobs = [job(f"user:{number % LANES}") for number in range(count)]
                before = time.perf_counter()
                await send(store, jobs)
                rates[case].append(count / (time.perf_counter() - before))
    figures = [
        Figure(bench="enqueue", case=f"bare SQL, {case}", value=median(measured), unit="jobs/s")
        for case, measured in plain.items()
    ]
    for case, measured in rates.items():
        beside = plain.get(case)
        figures.append(
            Figure(
                bench="enqueue",
                case=case,
                value=median(measured),
                unit="jobs/s",
                ratio=ratio(measured, beside) if beside else None,
                against="bare" if beside else "",
            )
        )
    return figures


async def _one_by_one(store: Store, jobs: list[NewJob]) -> None:
    for each in jobs:
        await store.enqueue([each])


async def _callers(store: Store, jobs: list[NewJob]) -> None:
    async with asyncio.TaskGroup() as group:
        for caller in range(CALLERS):
            group.create_task(_one_by_one(store, jobs[caller::CALLERS]))


async def _batches(store: Store, jobs: list[NewJob]) -> None:
    for start in range(0, len(jobs), 1_000):
        await store.enqueue(jobs[start : start + 1_000])
