"""The rescuer takes back the jobs of dead sessions. It is slow to declare a session dead, because its jobs run again.

A pass first rescues without declaring, which also reads the store's clock. Only if there is no sign of an outage, a
suspension or a clock step in this process since the last pass does it declare too: a silent session then had as much
time to renew its lease as this process had to reach the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ..errors import FairlaneError
from ..model.maintenance import Rescued
from ..model.names import plural
from ..model.session import Session
from .leader_context import LeaderContext, log

MOST_NAMED = 20
"""How many sessions that died together are named in the log."""


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
            taken_back = seen.retried + seen.failed + seen.cancelled
            log.warning(
                "declared %s dead and took %s back: %s",
                plural(len(seen.declared), "session"),
                plural(taken_back, "job"),
                ", ".join(await self._names(seen.declared)),
            )
        if seen.failed:
            log.error("%s of dead sessions failed: no retry was left", plural(seen.failed, "job"))
        return seen

    async def _names(self, declared: Sequence[str]) -> list[str]:
        """The sessions in words. Reads them all, but only after some were declared dead, which is rare."""
        sessions: list[Session] = []
        with suppress(FairlaneError):
            sessions = await self._context.store.sessions()
        known = {session.id: session for session in sessions}
        names = [f"{_name(known[id])} (session {id})" if id in known else id for id in declared[:MOST_NAMED]]
        return [*names, f"and {len(declared) - MOST_NAMED} more"] if len(declared) > MOST_NAMED else names


def _name(session: Session) -> str:
    who = session.kind.value if session.worker is None else f"{session.kind.value} {session.worker}"
    return f"{who} on {session.host}, pid {session.pid}"
