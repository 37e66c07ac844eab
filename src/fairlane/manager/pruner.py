"""The pruner deletes what retention does not keep, in passes short enough not to delay other calls."""

from __future__ import annotations

from ..model.maintenance import Retention
from .leader_context import LeaderContext


class Pruner:
    """Deletes finished jobs and old history by age and number."""

    name = "pruner"

    def __init__(self, context: LeaderContext, retention: Retention) -> None:
        self._context = context
        self._retention = retention

    async def run_once(self) -> float:
        context = self._context
        with context.contact.call():
            seen = await context.store.prune(self._retention, term=context.term)
        context.counts["pruned"] += seen.jobs
        return 0.0 if seen.more else context.intervals.prune
