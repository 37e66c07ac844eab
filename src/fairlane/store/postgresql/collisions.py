"""Logs how many calls collided and were repeated, at most once a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .address import Address

logger = logging.getLogger("fairlane.store")

LOG_SECONDS = 60.0
"""Least seconds between two warnings."""


class Collisions:
    """Counts the collisions of one process on one database. Used from any thread."""

    def __init__(self, address: Address, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._lock = threading.Lock()
        self._unlogged = 0
        self._next = float("-inf")

    def add(self, exc: Exception) -> None:
        """Count a call that collided and is repeated."""
        now = self._clock()
        with self._lock:
            self._unlogged += 1
            if now < self._next:
                return
            count, self._unlogged = self._unlogged, 0
            self._next = now + LOG_SECONDS
        logger.warning(
            "%s: %d call%s since the last such line collided and %s repeated, the last with %s (SQLSTATE %s); "
            "see `fairlane doctor` and the server's log",
            *(self._address, count, "s" if count > 1 else "", "were" if count > 1 else "was"),
            *(type(exc).__name__, getattr(exc, "sqlstate", "")),
        )
