"""The rescuer takes back the jobs of dead sessions. It is slow to declare a session dead, because its jobs run again.

A pass first rescues without declaring, which also reads the store's clock. Only if there is no sign of an outage, a
suspension or a clock step in this process since the last pass does it declare too: a silent session then had as much
time to renew its lease as this process had to reach the store.
"""

from __future__ import annotations

from ..model.maintenance import Rescued
from .leader_context import LeaderContext, log


class Rescuer:
    """Declares expired sessions dead, if this process itself had contact, and frees what they hold."""

    name = "rescuer"

    def __init__(self, context: LeaderContext) -> None:
        self._context = context

    async def run_once(self) -> float:
        seen = await self._rescue(declare=False)
        had_contact = self._had_contact(seen.now)
        self._context.clock.set(seen.now)
        more = seen.more
        if had_contact:
            seen = await self._rescue(declare=True)
            self._context.clock.set(seen.now)
            more = more or seen.more
        return 0.0 if more else self._context.intervals.rescue

    def _had_contact(self, now: float) -> bool:
        """Whether an expired lease means that its session is dead, and not that this process was cut off."""
        clock, intervals = self._context.clock, self._context.intervals
        expected, age = clock.now(), clock.age
        if expected is None or age is None or self._context.contact.clean_seconds < intervals.caution:
            return False
        # All processes of a host may have been suspended together while every clock ran on, as in a paused container. A
        # shorter suspension cannot by itself use up a lease that is renewed in time.
        suspended = age - intervals.rescue > intervals.lease - intervals.heartbeat
        return not suspended and abs(now - expected) <= intervals.clock_slack

    async def _rescue(self, *, declare: bool) -> Rescued:
        context = self._context
        with context.contact.call():
            seen = await context.store.rescue(declare=declare, term=context.term)
        context.counts["declared_dead"] += len(seen.declared)
        context.counts["rescued"] += seen.retried + seen.failed + seen.cancelled
        context.counts["crashed"] += seen.failed
        context.counts["lost_bindings"] += seen.lost_bindings
        context.counts["drained"] += seen.drained
        if seen.declared:
            log.warning("declared sessions dead: %s", ", ".join(seen.declared))
        if seen.failed:
            log.error("%d jobs of dead sessions failed: no retry was left", seen.failed)
        return seen
