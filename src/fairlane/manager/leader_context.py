"""What the services of one term share: the store, the term, and what their calls reveal about the store.

How long all calls have succeeded, and the time in the store, are measured by the monotonic clock, which cannot be set.
They decide whether a session that is silent is dead, or whether this process was cut off from the store.
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
    """How long every call of this process has succeeded. Shared by all parts of the manager that call the store."""

    def __init__(self, monotonic: Monotonic = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: float | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wrap a call. A rejection counts as success; a cancelled call does not count."""
        try:
            yield
        except Exception as exc:
            if isinstance(exc, StoreError) or not isinstance(exc, FairlaneError):
                self._since = None
            raise
        if self._since is None:
            self._since = self._monotonic()

    def forget(self) -> None:
        """Begin again: this process was suspended, and cannot know who was too."""
        self._since = None

    @property
    def clean_seconds(self) -> float:
        """Seconds since the first call after the last failure."""
        return 0.0 if self._since is None else self._monotonic() - self._since


class StoreClock:
    """The store's clock as it was last read, continued by the monotonic clock."""

    def __init__(self, monotonic: Monotonic = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read: tuple[float, float] | None = None

    def set(self, now: float) -> None:
        """Record that it is `now` in the store."""
        self._read = (now, self._monotonic())

    @property
    def age(self) -> float | None:
        """Seconds since the last reading; None before the first."""
        return None if self._read is None else self._monotonic() - self._read[1]

    def now(self) -> float | None:
        """The store's time, provided that both clocks ran at the same rate; None before the first reading."""
        age = self.age
        return None if self._read is None or age is None else self._read[0] + age


@dataclass(frozen=True, kw_only=True)
class LeaderContext:
    """A term, and what its services work with. Each term has its own; only the counts are kept."""

    store: Store
    term: int
    intervals: Intervals
    contact: Contact
    clock: StoreClock
    """As the rescuer last read it. Only the rescuer uses it: its age tells how long ago its last pass was."""
    counts: dict[str, int]
    """Under the names in `COUNTED`. They only grow."""
