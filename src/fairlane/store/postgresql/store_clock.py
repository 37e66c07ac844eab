"""The time of calls: the server's, unless a test injects a clock."""

from __future__ import annotations

from ..clock import Clock

BOOT_SECONDS = 1e9
"""Readings of two boots lie further apart than any lease is long."""


class StoreClock:
    """The readings that calls pass to functions: none, so that those read the server's clock, or two of an injected
    clock, the second of which is for leases and terms."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._boots: list[str] = []

    def readings(self) -> tuple[float | None, float | None]:
        """Now, and now for leases."""
        if self._clock is None:
            return None, None
        boot = self._clock.boot()
        if boot not in self._boots:
            self._boots.append(boot)
        return self._clock.now(), self._clock.monotonic() + BOOT_SECONDS * self._boots.index(boot)
