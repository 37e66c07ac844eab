"""The clock of calls: the server's, unless a test injects another one."""

from __future__ import annotations

from ..clock import Clock

BOOT_SECONDS = 1e9
"""Added to monotonic readings per boot: leases of an earlier boot have run out in any case."""


class StoreClock:
    """The time that calls pass to functions: two readings of an injected clock, the second of which is for leases and
    terms. Without one both are None, and the functions read the server's clock."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._boots: list[str] = []

    def readings(self) -> tuple[float | None, float | None]:
        """The current time, and the current time for leases."""
        if self._clock is None:
            return None, None
        boot = self._clock.boot()
        if boot not in self._boots:
            self._boots.append(boot)
        return self._clock.now(), self._clock.monotonic() + BOOT_SECONDS * self._boots.index(boot)
