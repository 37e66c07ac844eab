"""The clock of a store. Callers of a store send durations; only the store reads the time.

There are two readings for two purposes: `now` is the wall clock, for due times that a user specified; `monotonic`
does not jump when the wall clock is set, so leases and terms are measured with it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """The time source of a store."""

    def now(self) -> float:
        """Seconds since 1970, UTC."""

    def monotonic(self) -> float:
        """Seconds on a clock that all processes of this boot share and that never goes back."""

    def boot(self) -> str:
        """The id of this boot of the machine: monotonic readings of two boots cannot be compared."""


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
    """A clock for tests that moves only when advanced. Both readings move together unless one is stepped."""

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
        """Advance both readings by `seconds`."""
        if not seconds >= 0:
            raise ValueError("cannot advance by a negative time; use step_wall to set the wall clock")
        self._now += seconds
        self._monotonic += seconds

    def step_wall(self, seconds: float) -> None:
        """Move the wall clock by `seconds`, as an operator or NTP would. Leases must not be affected."""
        self._now += seconds

    def reboot(self) -> None:
        """Simulate a reboot: the monotonic clock restarts."""
        self._monotonic = 1.0
        self._boot += "'"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without a boot id, a lease that ends later than its own length from now shows that it is from another boot.
        return "unnamed"
