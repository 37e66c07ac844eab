"""Lanes: which settings apply to a key."""

from __future__ import annotations

import msgspec

from .settings import LaneRule, QueueSettings


class LaneTerms(msgspec.Struct, frozen=True):
    """The settings that apply to one lane once all rules are resolved."""

    limit: int | None = None
    """The number of places: 0 while the lane is paused, None for no limit."""
    weight: float = 1.0
    ordered: bool = False
    max_pending: int | None = None
    paused: bool = False
    own_limit: int | None = None
    """The limit of its rule, which applies again once the lane is resumed."""


OPEN_TERMS = LaneTerms()
"""The terms of a lane that no rule matches, and of jobs without a lane."""


def terms(settings: QueueSettings, key: str | None) -> LaneTerms:
    """Return the terms of a lane. The rule with the longest literal prefix wins; an exact key beats an equal prefix."""
    if key is None or not settings.lanes:
        return OPEN_TERMS
    best: LaneRule | None = None
    for rule in settings.lanes:
        if rule.matches(key) and (best is None or _closeness(rule) > _closeness(best)):
            best = rule
    if best is None:
        return OPEN_TERMS
    ordered = best.limit == 1 if best.ordered is None else best.ordered
    return LaneTerms(
        limit=0 if best.paused else best.limit,
        weight=best.weight,
        ordered=ordered,
        max_pending=best.max_pending,
        paused=best.paused,
        own_limit=best.limit,
    )


def _closeness(rule: LaneRule) -> tuple[int, bool]:
    return (len(rule.prefix), not rule.pattern.endswith("*"))
