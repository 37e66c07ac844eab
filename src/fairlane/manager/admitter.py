"""The granter admits what was inserted in a user's own transaction, and mends grants that were not handed on."""

from __future__ import annotations

from .leader_context import LeaderContext


class Admitter:
    """The safety net of admission and lanes. `repaired` stays 0 unless something went wrong."""

    name = "granter"

    def __init__(self, reign: LeaderContext) -> None:
        self._reign = reign

    async def run_once(self) -> float:
        reign = self._reign
        with reign.contact.call():
            seen = await reign.store.admit(term=reign.term)
        reign.counts["admitted"] += seen.admitted
        reign.counts["moved"] += seen.moved
        reign.counts["repaired"] += seen.repaired
        return 0.0 if seen.more else reign.intervals.admit
