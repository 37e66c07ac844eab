"""The admitter admits jobs that were inserted in a user's own transaction, and repairs lanes whose free places were not
filled.
"""

from __future__ import annotations

from .leader_context import LeaderContext


class Admitter:
    """Admits and repairs in passes. The count of `repaired` stays 0 unless a store has made an error."""

    name = "admitter"

    def __init__(self, context: LeaderContext) -> None:
        self._context = context

    async def run_once(self) -> float:
        context = self._context
        with context.contact.call():
            seen = await context.store.admit(term=context.term)
        context.counts["admitted"] += seen.admitted
        context.counts["moved"] += seen.moved
        context.counts["repaired"] += seen.repaired
        return 0.0 if seen.more else context.intervals.admit
