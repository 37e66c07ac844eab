"""The promoter lets time pass: due jobs arrive, expired ones are cancelled. Full passes follow each other."""

from __future__ import annotations

from .leader_context import LeaderContext

BATCH = 1_000
SHORTEST_REST = 0.01
"""A moment that has come since the pass is worth a new one, but never a busy loop."""


class Promoter:
    """Comes at the next due time, and at least every `promote` seconds: a nearer one may be enqueued meanwhile."""

    name = "promoter"

    def __init__(self, reign: LeaderContext) -> None:
        self._reign = reign

    async def run_once(self) -> float:
        reign = self._reign
        with reign.contact.call():
            seen = await reign.store.promote(limit=BATCH, term=reign.term)
        reign.counts["promoted"] += seen.promoted
        reign.counts["expired"] += seen.expired
        if seen.more:
            return 0.0
        if seen.next_due is None:
            return reign.intervals.promote
        return min(max(seen.next_due, SHORTEST_REST), reign.intervals.promote)
