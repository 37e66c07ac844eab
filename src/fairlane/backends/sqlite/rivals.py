"""The other lanes of a queue as an estimate sees them: how many of their jobs start before a given one.

Only the first in fair order are looked at, and each only so far, because readers ask often: the cost has a bound that
neither the backlog nor the number of lanes moves. What is not looked at is taken to be like the rest.
"""

from __future__ import annotations

from ...fairness import charge, tag
from ...lanes import terms
from ...reading import Rival
from ...settings import QueueSettings
from .steps.entry import Entry
from .views import View

MOST_LANES = 50
MOST_COUNTED = 2_000
"""Jobs that are counted in all, at most."""
MANY_LANES = 1_000
"""Lanes are counted up to here."""
UNCOUNTED = float("inf")


def rivals(view: View, e: Entry, settings: QueueSettings, own: int) -> list[Rival]:
    """The lanes that share a domain with a waiting job which has `own` jobs of its lane and class before it."""
    row = view.one("domain_get", e.inbox, e.class_, e.queue)
    if row is None:
        return []
    return _Line(view, e, settings, own, *row).rivals()


class _Line:
    """A domain from the place of one job in it."""

    def __init__(self, view: View, e: Entry, settings: QueueSettings, own: int, domain: int, clock: int) -> None:
        self.view = view
        self.e = e
        self.settings = settings
        self.domain = domain
        self.clock = clock
        _, finish, head_tag, _ = view.one("flow_get", domain, e.flow_key) or (None, 0, None, None)
        head = tag(clock, finish) if head_tag is None else head_tag
        # The tag it will have when its turn comes, if nothing but fair order holds it.
        self.start = head + own * self._charge(e.flow_key, e.cost)
        [self.active] = view.one("flows_active", e.inbox, e.class_, e.queue, MANY_LANES)
        [limited] = view.one("lanes_limited", e.queue, MANY_LANES)
        self.limited: int = 0 if e.inbox else limited
        # Whoever has twice as many may have any number of them.
        self.counted = min(2 * own + 10, MOST_COUNTED // min(MOST_LANES, max(1, self.active + self.limited)))

    def rivals(self) -> list[Rival]:
        return self._ready() + self._blocked()

    def _ready(self) -> list[Rival]:
        e, view = self.e, self.view
        rows = view.all("rivals_ready", self.domain, e.queue, e.flow_key, self.counted, MOST_LANES)
        lanes = 1.0
        # They come in fair order: behind one that starts later than this job there is none that starts sooner.
        if len(rows) == MOST_LANES and rows[-1][1] <= self.start:
            lanes = max(1.0, self.active / MOST_LANES)
        return [
            self._rival(lane, next_tag, cost, places, claimable + waiting, lanes)
            for lane, next_tag, cost, places, claimable, waiting in rows
        ]

    def _blocked(self) -> list[Rival]:
        e, view = self.e, self.view
        if not self.limited:
            return []
        rows = view.all(
            "rivals_blocked", self.domain, e.queue, e.flow_key, self.counted, e.class_, MOST_LANES, MANY_LANES
        )
        lanes = 1.0
        if len(rows) == MOST_LANES:
            # Those with claimable jobs are counted above.
            lanes = max(1.0, (self.limited - self.active) / MOST_LANES)
        return [
            self._rival(lane, tag(self.clock, finish or 0), e.cost, places, waiting, lanes)
            for lane, finish, places, waiting in rows
            if waiting
        ]

    def _rival(self, lane: str, next_tag: int, cost: float, places: int | None, waiting: int, lanes: float) -> Rival:
        # Of two with the same tag either may come first.
        turns = max(0.0, (self.start - next_tag) / self._charge(lane, cost) + 0.5)
        return Rival(waiting=waiting if waiting < self.counted else UNCOUNTED, turns=turns, limit=places, lanes=lanes)

    def _charge(self, lane: str, cost: float) -> int:
        return charge(cost, terms(self.settings, lane or None).weight)
