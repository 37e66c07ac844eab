"""Measured figures: printed, and kept as JSON lines in the file named by FAIRLANE_FIGURES, if it is set."""

from __future__ import annotations

import os
import sys

import msgspec

Figure = float | int | str


def record(name: str, **values: Figure) -> None:
    """Tell one measurement."""
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
    """The middle one."""
    return sorted(values)[len(values) // 2]


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
