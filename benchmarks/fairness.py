"""Who waits how long: a newcomer behind bulk work, equal lanes with unequal backlogs, and lanes with weights.

Counted in starts, so the speed of the machine does not matter.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import median, quantiles

from fairlane.model.settings import LaneRule

from .figures import Bound, Figure
from .workload import Run, Worker, configure, job, load, opened

SLOTS = 10


async def run(run: Run) -> list[Figure]:
    """All three questions."""
    return [*await _newcomers(run), *await _equal_lanes(run), *await _weights(run)]


async def _newcomers(run: Run) -> list[Figure]:
    """Bulk lanes that never run dry; now and then a lane nobody has seen sends one job."""
    bulk, newcomers = (10, 50) if run.quick else (20, 200)
    rng = Random(1)
    waits: list[int] = []
    async with opened(run.file("newcomers")) as store:
        worker = await Worker.start(store, SLOTS)
        await load(store, (job(f"bulk:{rng.randrange(bulk)}") for _ in range(newcomers * 50)))
        arrived: dict[str, int] = {}
        started = 0
        running = await worker.claim(SLOTS)
        while len(waits) < newcomers:
            started += len(running)
            # Of those that started together, the ones before it count and the ones behind it do not.
            waits += [
                started - len(running) + place - arrived[each.id]
                for place, each in enumerate(running)
                if each.id in arrived
            ]
            if not running:
                raise AssertionError(f"nothing started, and {newcomers - len(waits)} newcomers never did")
            if not rng.randrange(3) and len(arrived) < newcomers:
                new = job(f"new:{len(arrived)}")
                await store.enqueue([new])
                arrived[new.id] = started
            running = await worker.finish_and_claim(running, SLOTS)
    # One turn of each active lane, and the slots that were already offered.
    bound = bulk + SLOTS
    case = f"a newcomer behind {bulk} bulk lanes, {SLOTS} slots"
    return [
        Figure(bench="fairness", case=f"{case}: median", value=median(waits), unit="starts"),
        Figure(bench="fairness", case=f"{case}: p99", value=quantiles(waits, n=100)[98], unit="starts"),
        Figure(
            bench="fairness",
            case=f"{case}: longest",
            value=max(waits),
            unit="starts",
            bound=Bound(limit=bound, least=False),
        ),
    ]


async def _equal_lanes(run: Run) -> list[Figure]:
    """Lanes whose backlogs differ a hundredfold; while all have work, all get the same."""
    lanes, turns = (20, 20) if run.quick else (50, 40)
    async with opened(run.file("equal")) as store:
        worker = await Worker.start(store, SLOTS)
        backlog = [f"user:{lane}" for lane in range(lanes) for _ in range(turns + 2 + (lane % 10) ** 2)]
        Random(2).shuffle(backlog)
        await load(store, map(job, backlog))
        starts = await _starts(worker, lanes * turns)
    index = sum(starts.values()) ** 2 / (lanes * sum(n * n for n in starts.values()))
    return [
        Figure(
            bench="fairness",
            case=f"Jain's index of {lanes} lanes",
            value=index,
            unit="",
            bound=Bound(limit=0.99),
        )
    ]


async def _weights(run: Run) -> list[Figure]:
    """Lanes of weight 1, 2 and 4; each should get its share while all have work."""
    turns = 100 if run.quick else 400
    weights = {"light": 1.0, "middle": 2.0, "heavy": 4.0}
    async with opened(run.file("weights")) as store:
        await configure(store, *(LaneRule(pattern=f"{name}:*", weight=weight) for name, weight in weights.items()))
        worker = await Worker.start(store, SLOTS)
        for name, weight in weights.items():
            await load(store, (job(f"{name}:1") for _ in range(int(weight * turns) + 20)))
        total = int(sum(weights.values()) * turns)
        starts = await _starts(worker, total)
    return [
        Figure(
            bench="fairness",
            case=f"share of a lane of weight {weight:g}",
            value=starts[f"{name}:1"] / total,
            unit="",
            ratio=starts[f"{name}:1"] / (weight * turns),
            against="its due",
        )
        for name, weight in weights.items()
    ]


async def _starts(worker: Worker, total: int) -> Counter[str]:
    """How often each lane starts among the next `total` jobs."""
    starts: Counter[str] = Counter()
    running = await worker.claim(min(SLOTS, total))
    while True:
        starts.update(each.lane or "" for each in running)
        left = total - starts.total()
        if not running or not left:
            return starts
        running = await worker.finish_and_claim(running, min(SLOTS, left))
