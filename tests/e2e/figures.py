"""Measured figures: printed, and kept as JSON lines in the file named by FAIRLANE_FIGURES, if it is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from tests.sizes import FULL, sized

Figure = float | int | str
LATE = sized(20.0, 1.0)
"""Seconds by which something may be late. Strict only in a full run, where no other tests run."""


def met(values: Sequence[float], limit: float) -> bool:
    """Whether measured values are within a limit: all of them in a full run, which is strict, else the best of them.

    Other tests run beside a usual run, and take the processors for a moment. What is slow by its nature, such as a
    job that starts by polling, is slow every time.
    """
    return (max if FULL else min)(values) <= limit


def record(name: str, **values: Figure) -> None:
    """Print and store one measurement."""
    line = msgspec.json.encode({"name": name, **values})
    sys.stdout.write(line.decode() + "\n")
    path = os.environ.get("FAIRLANE_FIGURES")
    if path:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line + b"\n")
        finally:
            os.close(file)


def median(values: list[float]) -> float:
    """The median."""
    return sorted(values)[len(values) // 2]


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
