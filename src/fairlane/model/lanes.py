"""Lanes: which terms hold for a key, and which of a limited lane's jobs hold its places.

A *grant* is one of a limited lane's places. It belongs to the lane until its job runs. Ordered lanes grant by
arrival alone; unordered ones by class, then arrival. Pure decisions: stores hold the records and apply these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .settings import LaneRule, QueueSettings


class LaneTerms(msgspec.Struct, frozen=True):
    """What holds for one lane after all rules were read."""

    limit: int | None = None
    """Places; 0 while the lane is paused, None for as many as there are slots."""
    weight: float = 1.0
    ordered: bool = False
    max_pending: int | None = None
    paused: bool = False


OPEN_TERMS = LaneTerms()
"""What holds for a lane that no rule speaks of, and for jobs without a lane."""


def terms(settings: QueueSettings, key: str | None) -> LaneTerms:
    """The terms of a lane: the longest literal prefix wins, an exact key before a prefix of equal length."""
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
    )


def _closeness(rule: LaneRule) -> tuple[int, bool]:
    return (len(rule.prefix), not rule.pattern.endswith("*"))


class Place(msgspec.Struct, frozen=True):
    """A job of a limited lane as the grant decision sees it."""

    priority: int
    arrival: int
    running: bool = False


def grant_order(ordered: bool, priority: int, arrival: int) -> tuple[int, int]:
    """The sort key by which a lane's places are given out, best first."""
    return (0, arrival) if ordered else (priority, arrival)


def granted(lane: LaneTerms, jobs: Iterable[Place]) -> list[Place]:
    """Which of a lane's jobs hold a grant: what runs, then the best of the rest while there is room."""
    everyone = list(jobs)
    if lane.limit is None:
        return everyone
    running = [job for job in everyone if job.running]
    rest = sorted(
        (job for job in everyone if not job.running),
        key=lambda job: grant_order(lane.ordered, job.priority, job.arrival),
    )
    return running + rest[: max(0, lane.limit - len(running))]


def yields(arriving: int, holders: Sequence[Place]) -> Place | None:
    """The unstarted holder in an unordered lane that gives its grant to an arriving job of that class."""
    weakest = max((h for h in holders if not h.running), key=lambda h: (h.priority, h.arrival), default=None)
    return weakest if weakest is not None and weakest.priority > arriving else None
