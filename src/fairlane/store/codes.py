"""States, gates and moves as small numbers: half the cost of words in the rows and indexes of the hot path."""

from __future__ import annotations

from ..model.job import JobState
from ..model.states import Move

ARRIVING, SCHEDULED, PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = range(7)
"""The states of a live row (up to running) and of an outcome. Arriving: stored, not yet admitted."""

STATES = (
    JobState.PENDING,
    JobState.SCHEDULED,
    JobState.PENDING,
    JobState.RUNNING,
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
)
"""The state a reader sees for each code."""
FINAL_CODES = {JobState.COMPLETED: COMPLETED, JobState.FAILED: FAILED, JobState.CANCELLED: CANCELLED}

UNGATED, UNBOUND, CLEANUP, UNADMITTED, PARENT = range(5)
"""What keeps a live job from its place in line."""

MOVES = tuple(Move)
"""The move for each code; a new one goes to the end of `Move`, because the codes are in files."""
MOVE_CODES = {move: code for code, move in enumerate(MOVES)}
