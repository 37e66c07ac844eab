"""The one place that reads time. A store owns a clock; everybody else sends durations.

Two readings, because they answer different questions: `now` is the wall clock, for due times that a person
named; `monotonic` never jumps when somebody sets the wall clock, so leases and terms are measured with it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What a store needs to know about time."""

    def now(self) -> float:
        """Seconds since 1970, UTC."""

    def monotonic(self) -> float:
        """Seconds on a clock that is shared by all processes of this boot and never goes back."""

    def boot(self) -> str:
        """Names this boot of the machine: monotonic readings of two boots cannot be compared."""


class SystemClock:
    """The machine's own clocks."""

    def __init__(self) -> None:
        self._boot = _boot_id()

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def boot(self) -> str:
        return self._boot


class ManualClock:
    """A clock that moves only when told to, for tests. Both readings move together unless one is stepped."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._monotonic = 1_000.0
        self._boot = "manual"

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def boot(self) -> str:
        return self._boot

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        if not seconds >= 0:
            raise ValueError("time does not run backwards; use step_wall to set the wall clock")
        self._now += seconds
        self._monotonic += seconds

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock by `seconds`, as an operator or NTP would. Leases must not notice."""
        self._now += seconds

    def reboot(self) -> None:
        """Start another boot: the monotonic clock begins anew."""
        self._monotonic = 1.0
        self._boot += "'"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Elsewhere a lease that lies further ahead than its own length betrays another boot.
        return "unnamed"
