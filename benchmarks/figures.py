"""What a benchmark says: figures, some with a bound they must keep, and the table they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a ratio (or, without one, the value itself) must keep."""

    limit: float
    least: bool = True
    """True: at least the limit; False: at most."""

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.limit:.3f}"

    def holds(self, number: float) -> bool:
        return number >= self.limit if self.least else number <= self.limit


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number."""

    bench: str
    case: str
    value: float
    unit: str
    ratio: float | None = None
    against: str = ""
    """What the ratio is taken to."""
    bound: Bound | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the bound holds; None when there is none."""
        if self.bound is None:
            return None
        return self.bound.holds(self.value if self.ratio is None else self.ratio)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of pairs measured beside each other, so that a slow moment hits both."""
    return median(a / b for a, b in zip(above, below, strict=True))


def table(figures: Sequence[Figure]) -> str:
    """The figures for people."""
    rows = [("benchmark", "case", "median", "unit", "ratio", "to", "bound", "")]
    rows += [
        (
            figure.bench,
            figure.case,
            _number(figure.value),
            figure.unit,
            "" if figure.ratio is None else f"{figure.ratio:.3f}",
            figure.against,
            "" if figure.bound is None else str(figure.bound),
            {None: "", True: "pass", False: "FAIL"}[figure.passed],
        )
        for figure in figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = {2, 4}
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def as_json(figures: Sequence[Figure]) -> str:
    """The figures for programs."""
    return json.dumps([asdict(figure) | {"passed": figure.passed} for figure in figures], indent=2)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
