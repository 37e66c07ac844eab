"""The intervals of workers and managers in one value: how often they poll, and how long they trust a lease.

All are in seconds. They are validated together when the value is created, and all problems are reported at once.
Tests shrink them all with `scaled`, which keeps their proportions.
"""

from __future__ import annotations

import msgspec

from ..errors import InvalidInput
from . import names
from .states import UNKNOWN_TASK_SECONDS

SHORTEST = 0.001
"""A shorter interval would be a busy loop."""


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """How often each service polls the store, and how long it trusts what it knows."""

    heartbeat: float = 5.0
    """A session renews its lease this often."""
    lease: float = 15.0
    """A session that has not renewed for this long may be declared dead."""
    poll: float = 1.0
    """A worker polls for work this often, even when no wake-up arrives."""
    rescue: float = 2.0
    promote: float = 1.0
    """The promoter runs at the next due time, and at least this often."""
    admit: float = 1.0
    schedule: float = 1.0
    prune: float = 10.0
    leader_lease: float = 10.0
    leader_renew: float = 3.0
    stand: float = 2.0
    """A standby tries to lead within this time after the term that it knows of has ended; at a random moment, so that
    standbys do not all try at once."""
    caution: float = 10.0
    """The rescuer declares no session dead before its process has been this long without a store error."""
    clock_slack: float = 2.0
    """The rescuer declares no session dead when store clock and monotonic clock drifted apart by more than this."""
    trust_margin: float = 1.0
    """A leader distrusts its term, and a session without contact its lanes, this long before the lease ends."""
    loop_lag: float = 1.0
    """A task function that blocks the event loop for longer than this is reported."""
    unknown_task: float = UNKNOWN_TASK_SECONDS
    """A job whose task no worker knew for this long, counted from the first that declined it, fails."""

    def __post_init__(self) -> None:
        problems = [problem for field in self.__struct_fields__ if (problem := self._problem_of(field))]
        # Fields can be compared only once each of them is a valid number.
        problems = problems or self._conflicts()
        if problems:
            raise InvalidInput("intervals", "; ".join(problems))

    def scaled(self, factor: float) -> Intervals:
        """The same intervals, each `factor` times as long."""
        return Intervals(**{field: getattr(self, field) * factor for field in self.__struct_fields__})

    def _problem_of(self, field: str) -> str | None:
        try:
            names.check_seconds(field, getattr(self, field), least=SHORTEST)
        except InvalidInput as exc:
            return str(exc)
        return None

    def _conflicts(self) -> list[str]:
        """Pairs of which the first must be shorter than the second."""
        return [
            f"{field}: {value:g} s must be less than {lease} - trust_margin, which is {room:g} s"
            for field, value, lease, room in (
                ("heartbeat", self.heartbeat, "lease", self.lease - self.trust_margin),
                ("leader_renew", self.leader_renew, "leader_lease", self.leader_lease - self.trust_margin),
            )
            if value >= room
        ]
