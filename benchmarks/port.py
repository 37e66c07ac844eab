"""Claim 100 and finish 100 through the port of the store, beside the bare SQL loop in the same run.

A job here has a lane, a fair place in line, a fence, a history and an answer to "why"; the bare loop has a
row. The bounds say how much of the bare rate must be left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from statistics import median

from fairlane.model.settings import LaneRule

from . import bare
from .figures import Bound, Figure, ratio
from .workload import Pace, Run, Stopwatch, Worker, configure, job, load, opened

BATCH = 100
LANES = 1_000


async def run(run: Run) -> list[Figure]:
    """Interleave all cases, round by round."""
    jobs, rounds = (5_000, 3) if run.quick else (20_000, 5)
    cases: dict[str, tuple[Callable[[], Awaitable[Pace]], Bound | None]] = {
        "one lane": (lambda: _drain(run, jobs, lanes=1), Bound(limit=1 / 2)),
        "1,000 lanes": (lambda: _drain(run, jobs, lanes=LANES), Bound(limit=1 / 3)),
        "1,000 lanes, limit 1": (lambda: _drain(run, jobs, lanes=LANES, limit=1), Bound(limit=1 / 3)),
        "one lane, claim and finish apart": (lambda: _drain(run, jobs, lanes=1, together=False), None),
    }
    plain: list[Pace] = []
    paces: dict[str, list[Pace]] = {case: [] for case in cases}
    for _ in range(rounds):
        plain.append(bare.drain(run.file("bare"), jobs, BATCH))
        for case, (measure, _bound) in cases.items():
            paces[case].append(await measure())
    figures = list(_figures("bare SQL", plain, plain, None))
    for case, (_measure, bound) in cases.items():
        figures += _figures(case, paces[case], plain, bound)
    return figures


def _figures(case: str, paces: list[Pace], plain: list[Pace], bound: Bound | None) -> Iterator[Figure]:
    yield Figure(
        bench="port",
        case=case,
        value=median(pace.rate for pace in paces),
        unit="jobs/s",
        ratio=ratio([pace.rate for pace in paces], [pace.rate for pace in plain]),
        against="bare",
        bound=bound,
    )
    yield Figure(
        bench="port",
        case=f"{case}: processor",
        value=median(pace.processor for pace in paces) * 1e6,
        unit="µs/job",
        ratio=ratio([pace.processor for pace in plain], [pace.processor for pace in paces]),
        against="bare, inverse",
    )


async def _drain(run: Run, jobs: int, *, lanes: int, limit: int | None = None, together: bool = True) -> Pace:
    """Load a new store, then claim and finish everything; the pace of the latter."""
    async with opened(run.file("port")) as store:
        if limit is not None:
            await configure(store, LaneRule(pattern="*", limit=limit))
        await load(store, (job(f"user:{number % lanes}") for number in range(jobs)))
        worker = await Worker.start(store, BATCH)
        watch = Stopwatch()
        done = 0
        if together:
            done = await worker.drain(BATCH)
        else:
            while claimed := await worker.claim(BATCH):
                await worker.finish(claimed)
                done += len(claimed)
        pace = watch.pace(jobs)
    if done != jobs:
        raise AssertionError(f"{done} of {jobs} jobs were run")
    return pace
