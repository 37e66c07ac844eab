"""How fast a queue is served: the slots that are there for it, and how long its jobs take.

The figures behind every estimate, for a step as for a reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high
from typing import Any, Protocol

from ....job import Priority
from ....settings import QueueSettings
from ....slots import Reserved, Slots

IDLE = (0, 0, 0)


class Look(Protocol):
    """A step or a view: whoever can ask the file at a moment."""

    mono: float
    boot: str

    def one(self, name: str, *values: Any) -> Any:
        """The first row of a query, or None."""

    def all(self, name: str, *values: Any) -> list[Any]:
        """Every row of a query."""


def workers(look: Look, queue: str, inbox: str = "") -> list[Any]:
    """The live workers that could run a job: the one its inbox names, else all that serve the queue."""
    if not inbox or inbox.endswith("/"):
        return look.all("workers_of_queue", look.boot, look.mono, queue)
    pool, _, index = inbox.rpartition("/")
    row = look.one("worker_at", pool, int(index), look.boot, look.mono)
    return [] if row is None else [row]


def servers(rows: Sequence[Any], settings: QueueSettings, class_: int) -> int:
    """How many jobs of a class those workers run at once when they do nothing else, within the queue's limit."""
    slots = sum(_slots(row).room(IDLE, Priority(class_)) for row in rows)
    return slots if settings.slots is None else min(slots, settings.slots.room(IDLE, Priority(class_)))


def room_of(row: Sequence[int], class_: int) -> int:
    """Free slots of a worker for a class, out of its slots, its reservations and what it runs."""
    return _slots(row).room(row[3:], Priority(class_))


def seconds(look: Look, queue: int) -> float | None:
    """The median run time of the last jobs of a queue; None while none has finished."""
    times = [max(0.0, time) for (time,) in look.all("service_times", queue)]
    return median_high(times) if times else None


def _slots(row: Sequence[int]) -> Slots:
    return Slots(total=row[0], reserved=Reserved(high=row[1], normal=row[2]))
