"""How many jobs may run at once, and what a worker asks for next.

Reservations protect upwards: with `total` slots, of which `high` and `normal` are reserved, normal and low
together never hold more than ``total - high``, low alone never more than ``total - high - normal``, and high
may use all. The same rule holds for a worker's slots and for a queue's fleet-wide limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import msgspec

from ..errors import InvalidInput
from .job import Priority
from .names import check_count

MOST_SLOTS = 100_000
FLOOR = 10
"""Every class keeps one start in this many, however busy the classes above it are."""


class Reserved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Slots reserved for a class and the classes above it."""

    high: int = 0
    normal: int = 0


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs run at once at most, and how many of these slots are reserved for higher priorities."""

    total: int
    reserved: Reserved = Reserved()

    def __post_init__(self) -> None:
        check_count("slots", self.total, least=1, most=MOST_SLOTS)
        check_count("reserved.high", self.reserved.high, least=0)
        check_count("reserved.normal", self.reserved.normal, least=0)
        if self.reserved.high + self.reserved.normal >= self.total:
            kept = self.reserved.high + self.reserved.normal
            raise InvalidInput("reserved", f"reserving {kept} of {self.total} slots leaves none for low work")

    def __str__(self) -> str:
        """For example "10 slots: 9 for ordinary work, 1 reserved for high"."""
        count = f"{self.total} slot{'s' if self.total > 1 else ''}"
        high, normal = self.reserved.high, self.reserved.normal
        if not high and not normal:
            return f"{count}, all for ordinary work" if self.total > 1 else f"{count}, for all work"
        low = f" ({self.total - high - normal} for low)" if normal else ""
        kept = f", {high} reserved for high" if high else ""
        return f"{count}: {self.total - high} for ordinary work{low}{kept}"

    def room(self, running: Sequence[int], priority: Priority) -> int:
        """How many more jobs of `priority` may start, given the number running in each class (high, normal, low)."""
        high, normal, low = running
        room = self.total - high - normal - low
        if priority >= Priority.NORMAL:
            room = min(room, self.total - self.reserved.high - normal - low)
        if priority is Priority.LOW:
            room = min(room, self.total - self.reserved.high - self.reserved.normal - low)
        return max(0, room)


def default_reserved(total: int) -> Reserved:
    """One slot for high if there are at least four, else none: a small worker should not keep half its slots idle."""
    return Reserved(high=1 if total >= 4 else 0)


def usual_slots(total: int) -> Slots:
    """`total` slots with the default reservation."""
    return Slots(total=total, reserved=default_reserved(total))


class Ask(msgspec.Struct, frozen=True):
    """A request for at most `most` jobs of a class from one source: a queue, or the worker's inbox (None)."""

    queue: str | None
    priority: Priority
    most: int
    below: int | None = None
    """Start a job only while the worker runs fewer than this many of the class: the floor, over all sources."""


class Floor:
    """Counts a worker's starts, so that no class starves behind the classes above it.

    A class is due once nine jobs of other classes have started since its own last start. Initially no class is due.
    """

    def __init__(self) -> None:
        self._since = [0, 0, 0]

    def started(self, priority: Priority, count: int = 1) -> None:
        """Record that `count` jobs of `priority` started on this worker."""
        if count <= 0:
            return
        for other in Priority:
            self._since[other] += count
        self._since[priority] = 0

    def due(self) -> list[Priority]:
        """Return the classes that are due, lowest first."""
        return [p for p in reversed(Priority) if self._since[p] >= FLOOR - 1]


def asks(
    slots: Slots,
    running: Sequence[int],
    due: Sequence[Priority],
    sources: Mapping[str | None, int],
    rng: Random,
) -> list[Ask]:
    """Return what to ask for, in order: due classes within their floor, then high, normal, low.

    Within a class the sources alternate by weight: each is first asked for its share of the free slots, in random
    order, and then for all that is left. The store enforces the slots, so the asks may add up to more. Weights are
    whole numbers of at least 1.
    """
    requests: list[Ask] = []
    if not sources:
        return requests
    for priority in due:
        floor = -(-slots.total // FLOOR)
        room = min(floor - running[priority], slots.room(running, priority))
        if room > 0:
            requests += _from_sources(priority, room, sources, rng, below=floor)
    for priority in Priority:
        room = slots.room(running, priority)
        if room > 0:
            requests += _from_sources(priority, room, sources, rng)
    return requests


def _from_sources(
    priority: Priority, room: int, sources: Mapping[str | None, int], rng: Random, *, below: int | None = None
) -> list[Ask]:
    order = list(sources)
    if len(order) == 1:
        return [Ask(order[0], priority, room, below)]
    # Sorting by exponential variates puts each source first with a probability proportional to its weight, within
    # every subset as well: what an empty source leaves over is also shared by weight.
    order.sort(key=lambda name: rng.expovariate(sources[name]))
    # Systematic sampling: the sources form intervals as long as their weights, and `room` equidistant points from a
    # random offset fall on them. The shares are whole numbers that add up to `room`, and exact on average.
    whole = sum(sources.values())
    reached = rng.randrange(whole)
    shares = []
    for name in order:
        before, reached = reached, reached + room * sources[name]
        share = reached // whole - before // whole
        if share:
            shares.append(Ask(name, priority, share, below))
    return shares + [Ask(name, priority, room, below) for name in order]
