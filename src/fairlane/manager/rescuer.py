"""The rescuer takes back the jobs of the dead. It is slow to call anybody dead, because that runs jobs again.

A pass first looks without declaring anybody, which also reads the store's clock. Only if nothing speaks for an
outage, a suspend or a clock step on our side since the pass before does it look again and declare: then whoever
is silent has had as much time to renew as we had to look.
"""

from __future__ import annotations

from ..model.maintenance import Rescued
from .leader_context import LeaderContext, log


class Rescuer:
    """Declares expired sessions dead, when it is sure of itself, and frees what the dead hold."""

    name = "rescuer"

    def __init__(self, context: LeaderContext) -> None:
        self._context = context

    async def run_once(self) -> float:
        seen = await self._look(declare=False)
        sure = self._sure(seen.now)
        self._context.clock.set(seen.now)
        more = seen.more
        if sure:
            seen = await self._look(declare=True)
            self._context.clock.set(seen.now)
            more = more or seen.more
        return 0.0 if more else self._context.intervals.rescue

    def _sure(self, now: float) -> bool:
        """Whether a lease that has run out may be blamed on its session; `now` is what the store's clock says."""
        clock, intervals = self._context.clock, self._context.intervals
        expected, age = clock.now(), clock.age
        if expected is None or age is None or self._context.contact.clean_seconds < intervals.caution:
            return False
        # All processes of a host may have stood still together while every clock ran on, as in a paused container.
        # Standing still for less than this cannot by itself use up a lease that is renewed in time.
        stood_still = age - intervals.rescue > intervals.lease - intervals.heartbeat
        return not stood_still and abs(now - expected) <= intervals.clock_slack

    async def _look(self, *, declare: bool) -> Rescued:
        context = self._context
        with context.contact.call():
            seen = await context.store.rescue(declare=declare, term=context.term)
        context.counts["declared_dead"] += len(seen.declared)
        context.counts["rescued"] += seen.retried + seen.failed + seen.cancelled
        context.counts["crashed"] += seen.failed
        context.counts["lost_bindings"] += seen.lost_bindings
        context.counts["drained"] += seen.drained
        if seen.declared:
            log.warning("declared dead: %s", ", ".join(seen.declared))
        if seen.failed:
            log.error("jobs failed as crashed, because no retry was left: %d", seen.failed)
        return seen
