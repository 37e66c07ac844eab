"""Start-time fair queueing in whole numbers: which lane of a queue starts a job next.

A *domain* (queue, class, inbox) has a clock V. Each lane in it is a *flow* with a finish time F, and the tag
of a flow's next job is ``S = max(V, F)``. The lowest (S, arrival) starts; starting sets ``V = max(V, S)`` and
``F = S + charge``. A lane that dumps 100,000 jobs therefore runs far ahead of the clock, and a newcomer,
tagged with V itself, starts within one turn of each active lane.

Only the *next* job of a lane has a tag. Work that never starts is never charged, so cancelling, expiring or
losing any number of waiting jobs leaves no debt; and a lane that was blocked restarts at ``S = V``, without credit.
"""

from __future__ import annotations

SCALE = 1_000
"""Tags are integers: a job of cost 1 in a lane of weight 1 is charged this much."""


def charge(cost: float, weight: float) -> int:
    """What starting a job of `cost` adds to the finish time of a lane of `weight`; at least 1."""
    return max(1, round(SCALE * cost / weight))


def tag(clock: int, finish: int) -> int:
    """The start tag of a flow's next job: not before the clock (no credit), nor its own last finish."""
    return clock if clock > finish else finish


def refund(finish: int, paid: int) -> int:
    """The finish time of a lane that gets back what an interrupted start had paid.

    The job starts again and pays again, so it paid once in the end. The clock bounds its tag from below.
    """
    return max(0, finish - paid)
