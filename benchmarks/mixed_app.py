"""The application of the benchmark `mixed`: what a real one has beside a queue that is drained.

Four queues with limited lanes, one of them with a limit of its own; three priorities, sticky keys, a schedule, runs
that fail and are retried, jobs that fail for good. A run that ends well sleeps; a run that fails does so at once, so
that what the slots allow follows from the sleeps alone.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from fairlane import Backoff, Fairlane, current_job

QUEUES = ("mail", "images", "models", "reports")
LANES = 40
LANE_LIMIT = 2
SHORTEST, LONGEST = 0.25, 0.75
MEAN_SECONDS = (SHORTEST + LONGEST) / 2
AGAIN = Backoff(base=0.05, factor=1.0, jitter=False)

app = Fairlane()
TASKS: dict[str, Any] = {}
for name in QUEUES:
    app.queue(name, limit=200 if name == "images" else None).lane("m:*", limit=LANE_LIMIT)


async def _work(seconds: float, fail: str) -> None:
    if fail == "always" or (fail == "once" and current_job().attempt == 1):
        raise ValueError("a run of the benchmark that fails")
    await asyncio.sleep(seconds)


for name in QUEUES:

    @app.task(queue=name, name=f"{name}.work", lane="m:{key}", retries=2, backoff=AGAIN)
    async def work(key: int, seconds: float, fail: str = "") -> None:
        """One job of a lane."""
        await _work(seconds, fail)

    @app.task(queue=name, name=f"{name}.bound", lane="m:{key}", sticky="s:{key}", retries=2, backoff=AGAIN)
    async def bound(key: int, seconds: float, fail: str = "") -> None:
        """One job of a lane that runs where its key is bound."""
        await _work(seconds, fail)

    TASKS[work.name], TASKS[bound.name] = work, bound


@app.task(queue="control", name="control.tick", every=1.0)
async def tick() -> None:
    """What a schedule runs."""


@app.task(queue="control", name="control.refresh")
async def refresh() -> None:
    """What is broadcast."""


def calls(count: int, rng: Random) -> list[Any]:
    """So many jobs, spread over queues, lanes, priorities and ways to end."""
    made = []
    for number in range(count):
        queue = QUEUES[number % len(QUEUES)]
        key = rng.randrange(LANES)
        kind = "bound" if rng.random() < 0.15 else "work"
        draw = rng.random()
        fail = "always" if draw < 0.03 else "once" if draw < 0.15 else ""
        priority = rng.choices(("high", "normal", "low"), (1, 7, 2))[0]
        task = TASKS[f"{queue}.{kind}"].options(priority=priority)
        made.append(task.call(key, rng.uniform(SHORTEST, LONGEST), fail))
    return made
