"""The promoter acts on due times: scheduled jobs become pending, and expired ones are cancelled."""

from __future__ import annotations

from .leader_context import LeaderContext

BATCH = 1_000
SHORTEST_REST = 0.01
"""The shortest rest before a due time, so that due times close together do not make a busy loop."""


class Promoter:
    """Runs at the next due time, and at least every `promote` seconds: an earlier job may be enqueued meanwhile."""

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
