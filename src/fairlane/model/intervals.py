"""Every interval of the running parts, in one value: how often they look, and how long they trust.

All are seconds. They are checked together when the value is made, and all problems are told at once, so that
a deployment is mended in one go. Tests shrink them all by `scaled`, which keeps their proportions.
"""

from __future__ import annotations

import msgspec

from ..errors import InvalidInput
from . import names
from .states import UNKNOWN_TASK_SECONDS

SHORTEST = 0.001
"""A shorter interval is a busy loop by another name."""


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """How often each part looks at the store, and how long it trusts what it knows."""

    heartbeat: float = 5.0
    """A session renews its lease this often."""
    lease: float = 15.0
    """A session that has not renewed for this long may be declared dead."""
    poll: float = 1.0
    """A worker looks for work this often, even when no wake-up comes."""
    rescue: float = 2.0
    promote: float = 1.0
    """The promoter comes at the next due time, and at least this often."""
    admit: float = 1.0
    schedule: float = 1.0
    prune: float = 10.0
    leader_lease: float = 10.0
    leader_renew: float = 3.0
    stand: float = 2.0
    """A standby tries to lead this often."""
    caution: float = 10.0
    """The rescuer declares nobody dead before its process has been this long without a store error."""
    clock_slack: float = 2.0
    """The rescuer declares nobody dead when store clock and monotonic clock drifted apart by more than this."""
    trust_margin: float = 1.0
    """A leader distrusts its term, and a session without contact its lanes, this long before the lease ends."""
    loop_lag: float = 1.0
    """A body that holds the event loop for longer is reported."""
    unknown_task: float = UNKNOWN_TASK_SECONDS
    """A job whose task no worker knew for this long, counted from the first that declined it, fails."""

    def __post_init__(self) -> None:
        problems = [problem for field in self.__struct_fields__ if (problem := self._problem_of(field))]
        # Comparing fields that are not even numbers would only repeat the same complaint in other words.
        problems = problems or self._misfits()
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

    def _misfits(self) -> list[str]:
        """Pairs in which the one must leave room for the other."""
        return [
            f"{field}: {value:g} s must be less than {lease} - trust_margin, which is {room:g} s"
            for field, value, lease, room in (
                ("heartbeat", self.heartbeat, "lease", self.lease - self.trust_margin),
                ("leader_renew", self.leader_renew, "leader_lease", self.leader_lease - self.trust_margin),
            )
            if value >= room
        ]
