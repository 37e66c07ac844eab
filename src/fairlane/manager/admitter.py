"""The admitter admits what was inserted in a user's own transaction, and mends grants that were not handed on."""

from __future__ import annotations

from .leader_context import LeaderContext


class Admitter:
    """The safety net of admission and lanes. `repaired` stays 0 unless something went wrong."""

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
