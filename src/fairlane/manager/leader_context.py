"""What the services of one term share: the store, the term, and what this process knows of the store by its calls.

Since when all calls succeed and what time it is in the store are measured by the monotonic clock, which no operator
can set. They answer one question: may a silence of others be blamed on them, or is it our own ears?
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import FairlaneError, StoreError
from ..model.intervals import Intervals
from ..store.port import Store

Monotonic = Callable[[], float]
log = logging.getLogger("fairlane.manager")

COUNTED = (
    *("promoted", "expired", "declared_dead", "rescued", "crashed", "lost_bindings", "drained"),
    *("admitted", "moved", "repaired", "pruned", "fired"),
)


class Contact:
    """How long every call of this process has succeeded. Shared by all that calls the store for the manager."""

    def __init__(self, monotonic: Monotonic = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: float | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Put it around a call. A refusal is an answer too; a call that was cancelled says nothing."""
        try:
            yield
        except Exception as exc:
            if isinstance(exc, StoreError) or not isinstance(exc, FairlaneError):
                self._since = None
            raise
        if self._since is None:
            self._since = self._monotonic()

    @property
    def clean_seconds(self) -> float:
        """Seconds since the first call after the last failure."""
        return 0.0 if self._since is None else self._monotonic() - self._since


class StoreClock:
    """The store's clock as it was last read, carried on by the monotonic one."""

    def __init__(self, monotonic: Monotonic = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read: tuple[float, float] | None = None

    def set(self, now: float) -> None:
        """The store has just said that it is `now`."""
        self._read = (now, self._monotonic())

    @property
    def age(self) -> float | None:
        """Seconds since it was read; None before."""
        return None if self._read is None else self._monotonic() - self._read[1]

    def now(self) -> float | None:
        """The store's time, if both clocks ran alike since; None before the first reading."""
        age = self.age
        return None if self._read is None or age is None else self._read[0] + age


@dataclass(frozen=True, kw_only=True)
class LeaderContext:
    """A term, and what its services work with. Made anew for each, so that nothing outlives it but the counts."""

    store: Store
    term: int
    intervals: Intervals
    contact: Contact
    clock: StoreClock
    counts: dict[str, int]
    """By the names in `COUNTED`; they only grow."""
