"""A worker drains jobs that do nothing, beside huey on SQLite in the same run.

Each side runs in a process of its own, on a file of its own, with results kept. Fairlane also acknowledges, fences and
keeps fair order; huey forgets a task when it hands it out. Fairlane commits with ``synchronous=FULL``. Huey is measured
with FULL (its `fsync=True`), which bears the bound, and with OFF, its default, where a power cut may take the file.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from statistics import median

from .figures import Bound, Figure, ratio
from .workload import Pace, Run

SLOTS = 200
AGAINST = "huey, FULL"
CASES = {
    f"fairlane, FULL, {SLOTS} slots": ("benchmarks.drain_fairlane", str(SLOTS)),
    AGAINST: ("benchmarks.drain_huey", "full"),
    "huey, OFF": ("benchmarks.drain_huey", "off"),
}


async def run(run: Run) -> list[Figure]:
    """Interleave the sides, round by round."""
    jobs, rounds = (5_000, 3) if run.quick else (20_000, 3)
    paces: dict[str, list[Pace]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, (module, setting) in CASES.items():
            paces[case].append(await asyncio.to_thread(_measure, module, str(run.file("drain")), jobs, setting))
    ours = next(iter(CASES))
    figures = []
    for case, measured in paces.items():
        figures.append(
            Figure(bench="drain", case=case, value=median(pace.rate for pace in measured), unit="jobs/s")
            if case == ours
            else Figure(
                bench="drain",
                case=case,
                value=median(pace.rate for pace in measured),
                unit="jobs/s",
                ratio=ratio([pace.rate for pace in paces[ours]], [pace.rate for pace in measured]),
                against="fairlane is so many times as fast",
                bound=Bound(limit=4.0) if case == AGAINST else None,
            )
        )
        processor = median(pace.processor for pace in measured) * 1e6
        figures.append(Figure(bench="drain", case=f"{case}: processor", value=processor, unit="µs/job"))
    return figures


def _measure(module: str, path: str, jobs: int, setting: str) -> Pace:
    command = [sys.executable, "-m", module, path, str(jobs), setting]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if answer["done"] != jobs:
        raise AssertionError(f"{module} ran {answer['done']} of {jobs} jobs")
    return Pace(answer["rate"], answer["processor"])
