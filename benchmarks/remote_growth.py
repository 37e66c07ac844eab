"""Whether a call costs the same on a server when a thousand times as much is waiting: `growth`, for any server.

What is measured is processor time of the client and of the server together, that of the server alone, and the time a
caller waits.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from .cases import Server
from .figures import Figure, ratio
from .growth import BATCH, CALLS, FLAT, Patient

T = TypeVar("T")
WARM = 5
"""Cycles that fill caches and prepare statements, and do not count."""
SMALL, SPREAD = "1,000 jobs", "1,000 jobs, 100 lanes a batch"


def sizes(many: int) -> dict[str, tuple[int, int]]:
    """Jobs and lanes of the three stores."""
    return {SMALL: (1_000, 10), SPREAD: (1_000, 2 * BATCH), f"{many:,} jobs": (many, 10_000)}


@dataclass
class Remote(Patient):
    """A store on a server, and what its calls took."""

    server: Server = field(kw_only=True)
    served: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})
    waited: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})

    async def _timed(self, call: str, work: Awaitable[T]) -> T:
        # To look at the server takes a while, which is nobody's work: so it comes first, and last.
        server, client, before = self.server.processor(), time.process_time(), time.perf_counter()
        answer = await work
        after, spent = time.perf_counter(), time.process_time() - client
        served = self.server.processor() - server
        self.waited[call].append(after - before)
        self.served[call].append(served)
        self.spent[call].append(spent + served)
        return answer


async def examine(patients: Sequence[Remote], repetitions: int) -> None:
    """All calls on the stores in turn, some cycles to warm up and `repetitions` that count."""
    for repetition in range(WARM + repetitions):
        if repetition == WARM:
            for patient in patients:
                for spans in (*patient.spent.values(), *patient.served.values(), *patient.waited.values()):
                    spans.clear()
        for patient in patients:
            await patient.examine()


def figures(bench: str, patients: dict[str, Remote]) -> Iterator[Figure]:
    """What the calls took on the three stores of `sizes`."""
    small, spread, big = patients.values()
    title = list(patients)[-1]
    for call in CALLS:
        for name, patient in ((SMALL, small), (SPREAD, spread)):
            yield Figure(bench=bench, case=f"{call}: {name}", value=median(patient.spent[call]) * 1e6, unit="µs of CPU")
        for mine, theirs, unit, against, bound in (
            (big.spent, small.spent, "µs of CPU", SMALL, FLAT),
            (big.spent, spread.spent, "µs of CPU", "100 lanes a batch", None),
            (big.served, small.served, "µs of CPU of the server", SMALL, None),
            (big.waited, small.waited, "µs of waiting", SMALL, None),
        ):
            yield Figure(
                bench=bench,
                case=f"{call}: {title}",
                value=median(mine[call]) * 1e6,
                unit=unit,
                # A call can be too short for the clock of a process.
                ratio=ratio(mine[call], theirs[call]) if all(theirs[call]) else None,
                against=against,
                bound=bound if all(theirs[call]) else None,
            )
