"""The settings of queues and lanes. They belong to a queue and are stored, so that every process uses the same.

Code *declares* settings under a version, and a newer version replaces an older one. An operator *overrides*
single fields, and the override wins until it is cleared. The effective settings are the declaration with the
override applied.
"""

from __future__ import annotations

import msgspec

from ..errors import InvalidInput
from . import names
from .slots import MOST_SLOTS, Reserved, Slots


class LaneRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings for the lanes whose key matches `pattern`: a literal key, or a literal prefix followed by
    ``*``.
    """

    pattern: str
    limit: int | None = None
    """How many jobs of one lane run at once; None for no limit."""
    weight: float = 1.0
    ordered: bool | None = None
    """Strict arrival order. Requires a limit; the default is True for a limit of 1, otherwise False."""
    max_pending: int | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        names.check_key("lane pattern", self.pattern)
        if "*" in self.pattern[:-1]:
            raise InvalidInput("lane pattern", f"{self.pattern!r} may have '*' only as its last character")
        if self.limit is not None:
            if self.limit == 0:
                raise InvalidInput("limit", "0 would never run anything; pause the lane instead")
            names.check_count("limit", self.limit, least=1)
        names.check_factor("weight", self.weight)
        if self.ordered and self.limit is None:
            raise InvalidInput("ordered", "requires a limit: set how many jobs of the lane may run at once")
        if self.max_pending is not None:
            names.check_count("max_pending", self.max_pending, least=1)

    @property
    def prefix(self) -> str:
        """The literal part of the pattern."""
        return self.pattern.removesuffix("*")

    def matches(self, key: str) -> bool:
        """Whether this rule applies to the lane `key`."""
        return key.startswith(self.prefix) if self.pattern.endswith("*") else key == self.pattern


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of one queue."""

    limit: int | None = None
    """How many of its jobs run at once in the whole fleet."""
    reserved: Reserved = Reserved()
    max_pending: int | None = None
    paused: bool = False
    lanes: tuple[LaneRule, ...] = ()
    closed: tuple[str, ...] = ()
    """If not empty, the only lanes of the queue; jobs for any other lane are rejected."""

    def __post_init__(self) -> None:
        if self.limit is not None:
            _check_queue_limit(self.limit)
            Slots(total=self.limit, reserved=self.reserved)
        elif self.reserved != Reserved():
            raise InvalidInput("reserved", "requires a limit to reserve slots from")
        if self.max_pending is not None:
            names.check_count("max_pending", self.max_pending, least=1)
        _check_patterns(self.lanes)
        for key in self.closed:
            names.check_key("closed", key)

    @property
    def slots(self) -> Slots | None:
        """The queue's limit as slots with reservations, None when it has no limit."""
        return None if self.limit is None else Slots(total=self.limit, reserved=self.reserved)

    def admits(self, lane: str | None) -> bool:
        """Whether jobs may be sent to this lane."""
        return not self.closed or lane in self.closed


class QueueOverride(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operator's changes to the declaration; an unset field leaves the declared value."""

    limit: int | msgspec.UnsetType | None = msgspec.UNSET
    max_pending: int | msgspec.UnsetType | None = msgspec.UNSET
    paused: bool | msgspec.UnsetType = msgspec.UNSET
    lanes: tuple[LaneRule, ...] = ()
    """Rules that replace the declared ones of the same pattern."""

    def __post_init__(self) -> None:
        if self.limit is not msgspec.UNSET and self.limit is not None:
            _check_queue_limit(self.limit)
        if self.max_pending is not msgspec.UNSET and self.max_pending is not None:
            names.check_count("max_pending", self.max_pending, least=1)
        _check_patterns(self.lanes)

    def over(self, declared: QueueSettings) -> QueueSettings:
        """Return the effective settings.

        Reservations that do not fit into the overriding limit shrink, so that a valid declaration and a valid
        override always combine to valid settings.
        """
        changed: dict[str, object] = {
            field: value
            for field in ("limit", "max_pending", "paused")
            if (value := getattr(self, field)) is not msgspec.UNSET
        }
        if "limit" in changed:
            changed["reserved"] = _within(self.limit, declared.reserved)
        if self.lanes:
            patterns = {rule.pattern for rule in self.lanes}
            changed["lanes"] = self.lanes + tuple(r for r in declared.lanes if r.pattern not in patterns)
        return msgspec.structs.replace(declared, **changed)


class SettingsChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one queue's settings: a declaration, an override, or both. None clears the override."""

    queue: str
    declared: QueueSettings | None = None
    version: int = 0
    override: QueueOverride | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        names.check_name("queue", self.queue)
        names.check_count("version", self.version, least=0, most=2**53)


def _check_queue_limit(limit: int) -> None:
    if limit == 0:
        raise InvalidInput("limit", "0 would never run anything; pause the queue instead")
    names.check_count("limit", limit, least=1, most=MOST_SLOTS)


def _check_patterns(rules: tuple[LaneRule, ...]) -> None:
    seen: set[str] = set()
    for rule in rules:
        if rule.pattern in seen:
            raise InvalidInput("lanes", f"the pattern {rule.pattern!r} is given twice")
        seen.add(rule.pattern)


def _within(limit: int | msgspec.UnsetType | None, reserved: Reserved) -> Reserved:
    """The reservations that fit into `limit` and leave one slot for low jobs."""
    if not isinstance(limit, int):
        return Reserved()
    high = min(reserved.high, limit - 1)
    return Reserved(high=high, normal=min(reserved.normal, limit - 1 - high))
