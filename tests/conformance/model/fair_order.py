"""Start-time fair queueing in one domain, as far as the rules fix it.

Only distances from the domain's clock matter, and a lane at or behind the clock is like a lane that is unknown. So one
state of a domain is the set of lanes that are ahead of its clock, and by how much. A store may forget a domain in which
nothing waits; from then on two states are possible. What the store starts next shows which of them can still be true.
"""

from __future__ import annotations

from collections.abc import Mapping

Lane = str | None
Ahead = frozenset[tuple[Lane, int]]


class FairOrder:
    """All states that the domain may be in."""

    def __init__(self) -> None:
        self.possible: set[Ahead] = {frozenset()}

    def first(self, heads: Mapping[Lane, int]) -> set[Lane]:
        """The lanes whose next job may start now; `heads` has the arrival of the next job of each lane."""
        return {_first(state, heads) for state in self.possible} if heads else set()

    def start(self, lane: Lane, heads: Mapping[Lane, int], charge: int) -> None:
        """The next job of `lane` started: the clock moves to its tag, and its finish time is a charge later."""
        after: set[Ahead] = set()
        for state in self.possible:
            if _first(state, heads) == lane:
                tag = dict(state).get(lane, 0)
                moved = {other: ahead - tag for other, ahead in state if other != lane}
                after.add(_state(moved | {lane: charge}))
        assert after, f"{lane!r} was not first"
        self.possible = after

    def refund(self, lane: Lane, paid: int, *, certain: bool = True) -> None:
        """Refund the cost of a start to the lane; both states are possible where the rules do not specify it."""
        refunded = {
            _state({other: ahead - (paid if other == lane else 0) for other, ahead in state}) for state in self.possible
        }
        self.possible = refunded if certain else self.possible | refunded

    def idle(self) -> None:
        """No job waits: the store may forget the domain."""
        self.possible.add(frozenset())


def _first(state: Ahead, heads: Mapping[Lane, int]) -> Lane:
    ahead = dict(state)
    return min(heads, key=lambda lane: (ahead.get(lane, 0), heads[lane]))


def _state(ahead: Mapping[Lane, int]) -> Ahead:
    return frozenset((lane, distance) for lane, distance in ahead.items() if distance > 0)
