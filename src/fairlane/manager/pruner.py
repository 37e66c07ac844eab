"""The pruner forgets what retention does not keep, in passes short enough to hold nobody up."""

from __future__ import annotations

from ..model.maintenance import Retention
from .leader_context import LeaderContext


class Pruner:
    """Deletes finished jobs and old history by age and number."""

    name = "pruner"

    def __init__(self, reign: LeaderContext, retention: Retention) -> None:
        self._reign = reign
        self._retention = retention

    async def run_once(self) -> float:
        reign = self._reign
        with reign.contact.call():
            seen = await reign.store.prune(self._retention, term=reign.term)
        reign.counts["pruned"] += seen.jobs
        return 0.0 if seen.more else reign.intervals.prune
