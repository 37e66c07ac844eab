"""The promoter lets time pass: due jobs arrive, expired ones are cancelled. Full passes follow each other."""

from __future__ import annotations

from .leader_context import LeaderContext

BATCH = 1_000
SHORTEST_REST = 0.01
"""A moment that has come since the pass is worth a new one, but never a busy loop."""


class Promoter:
    """Comes at the next due time, and at least every `promote` seconds: a nearer one may be enqueued meanwhile."""

    name = "promoter"

    def __init__(self, context: LeaderContext) -> None:
        self._context = context

    async def run_once(self) -> float:
        context = self._context
        with context.contact.call():
            seen = await context.store.promote(limit=BATCH, term=context.term)
        context.counts["promoted"] += seen.promoted
        context.counts["expired"] += seen.expired
        if seen.more:
            return 0.0
        if seen.next_due is None:
            return context.intervals.promote
        return min(max(seen.next_due, SHORTEST_REST), context.intervals.promote)
