"""What may run at once, and what a worker asks for next.

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
    """Slots kept free for a class and those above it."""

    high: int = 0
    normal: int = 0


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """A hard limit with reservations in it."""

    total: int
    reserved: Reserved = Reserved()

    def __post_init__(self) -> None:
        check_count("slots", self.total, least=1, most=MOST_SLOTS)
        check_count("reserved.high", self.reserved.high, least=0)
        check_count("reserved.normal", self.reserved.normal, least=0)
        if self.reserved.high + self.reserved.normal >= self.total:
            kept = self.reserved.high + self.reserved.normal
            raise InvalidInput("reserved", f"{kept} reserved of {self.total} would leave none for low work")

    def __str__(self) -> str:
        """In words: "10 slots: 9 for ordinary work, 1 reserved for high"."""
        count = f"{self.total} slot{'s' if self.total > 1 else ''}"
        high, normal = self.reserved.high, self.reserved.normal
        if not high and not normal:
            return f"{count}, all for ordinary work" if self.total > 1 else f"{count}, for all work"
        low = f" ({self.total - high - normal} for low)" if normal else ""
        kept = f", {high} reserved for high" if high else ""
        return f"{count}: {self.total - high} for ordinary work{low}{kept}"

    def room(self, running: Sequence[int], priority: Priority) -> int:
        """How many more jobs of `priority` may start, given the number running in each class (high, normal,
        low).
        """
        high, normal, low = running
        room = self.total - high - normal - low
        if priority >= Priority.NORMAL:
            room = min(room, self.total - self.reserved.high - normal - low)
        if priority is Priority.LOW:
            room = min(room, self.total - self.reserved.high - self.reserved.normal - low)
        return max(0, room)


def default_reserved(total: int) -> Reserved:
    """One slot for high when there are at least four, else none: a small worker does not keep half of itself idle."""
    return Reserved(high=1 if total >= 4 else 0)


def usual_slots(total: int) -> Slots:
    """So many slots, with the usual reservation."""
    return Slots(total=total, reserved=default_reserved(total))


class Ask(msgspec.Struct, frozen=True):
    """A wish for at most `most` jobs of a class from one source: a queue, or the worker's inbox (None)."""

    queue: str | None
    priority: Priority
    most: int
    below: int | None = None
    """Start one only while the worker runs fewer than this many of the class: the floor, over all sources."""


class Floor:
    """Counts a worker's starts, so that no class waits for ever behind the ones above it.

    A class that saw nine starts of others since its own last one is due. It starts as not due.
    """

    def __init__(self) -> None:
        self._since = [0, 0, 0]

    def started(self, priority: Priority, count: int = 1) -> None:
        """`count` jobs of `priority` started here."""
        if count <= 0:
            return
        for other in Priority:
            self._since[other] += count
        self._since[priority] = 0

    def due(self) -> list[Priority]:
        """The classes that are due, lowest first."""
        return [p for p in reversed(Priority) if self._since[p] >= FLOOR - 1]


def asks(
    slots: Slots,
    running: Sequence[int],
    due: Sequence[Priority],
    sources: Mapping[str | None, int],
    rng: Random,
) -> list[Ask]:
    """What to ask for, in order: due classes within their floor, then high, normal, low.

    Inside a class the sources take turns by weight: each is first asked for its share of the free slots, in random
    order, and then for all that is left. The store holds every answer to the slots, so an ask may promise too
    much. Weights are whole numbers of at least 1.
    """
    wishes: list[Ask] = []
    if not sources:
        return wishes
    for priority in due:
        floor = -(-slots.total // FLOOR)
        room = min(floor - running[priority], slots.room(running, priority))
        if room > 0:
            wishes += _from_sources(priority, room, sources, rng, below=floor)
    for priority in Priority:
        room = slots.room(running, priority)
        if room > 0:
            wishes += _from_sources(priority, room, sources, rng)
    return wishes


def _from_sources(
    priority: Priority, room: int, sources: Mapping[str | None, int], rng: Random, *, below: int | None = None
) -> list[Ask]:
    order = list(sources)
    if len(order) == 1:
        return [Ask(order[0], priority, room, below)]
    # Whoever's random clock rings first comes first: of any of them, each in proportion to its weight. So what an
    # empty source leaves over is shared by weight as well.
    order.sort(key=lambda name: rng.expovariate(sources[name]))
    # The sources lie side by side, each as long as its weight, and `room` marks at equal distances fall on them from
    # a random offset: whole shares that add up to `room`, each on average exactly its part of it.
    whole = sum(sources.values())
    reached = rng.randrange(whole)
    shares = []
    for name in order:
        before, reached = reached, reached + room * sources[name]
        share = reached // whole - before // whole
        if share:
            shares.append(Ask(name, priority, share, below))
    return shares + [Ask(name, priority, room, below) for name in order]
