"""How fast a queue is served: the slots that are there for it, and how long its jobs take.

The figures behind every estimate, for a step as for a reader.
"""

from __future__ import annotations

from statistics import median_high
from typing import Any, Protocol

from ..positions import Worker


class Look(Protocol):
    """A step or a view: whoever can ask the file at a moment."""

    mono: float
    boot: str

    def one(self, name: str, *values: Any) -> Any:
        """The first row of a query, or None."""

    def all(self, name: str, *values: Any) -> list[Any]:
        """Every row of a query."""


def workers(look: Look, queue: str, inbox: str = "") -> list[Worker]:
    """The live workers that could run a job: the one its inbox names, else all that serve the queue."""
    if not inbox or inbox.endswith("/"):
        return look.all("workers_of_queue", look.boot, look.mono, queue)
    pool, _, index = inbox.rpartition("/")
    row = look.one("worker_at", pool, int(index), look.boot, look.mono)
    return [] if row is None else [row]


def knows(look: Look, task: str, queue: str, inbox: str = "") -> bool:
    """Whether one of those workers knows a task. One that does not say what it knows may."""
    if not inbox or inbox.endswith("/"):
        return bool(look.one("task_known", task, look.boot, look.mono, queue)[0])
    pool, _, index = inbox.rpartition("/")
    return bool(look.one("task_known_at", task, look.boot, look.mono, pool, int(index))[0])


def seconds(look: Look, queue: int) -> float | None:
    """The median run time of the last jobs of a queue; None while none has finished."""
    times = [max(0.0, time) for (time,) in look.all("service_times", queue)]
    return median_high(times) if times else None
