"""States, gates and moves as small numbers: half the cost of words in the rows and indexes of the hot path."""

from __future__ import annotations

import re

from ..model.job import JobKind, JobState, Priority, Reason
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

_TOKENS = {
    **{f"STATE.{name}": code for code, name in enumerate(("ARRIVING", *(state.name for state in STATES[1:])))},
    **{f"GATE.{name}": code for code, name in enumerate(("NONE", "UNBOUND", "CLEANUP", "UNADMITTED", "PARENT"))},
    **{f"MOVE.{move.name}": code for move, code in MOVE_CODES.items()},
    **{f"KIND.{kind.name}": code for code, kind in enumerate(JobKind)},
    **{f"CLASS.{priority.name}": int(priority) for priority in Priority},
}
_LUA_TOKENS = {
    **_TOKENS,
    **{f"MOVE.{move.name}": f"'{move}'" for move in MOVES},
    **{f"KIND.{kind.name}": f"'{kind}'" for kind in JobKind},
    **{f"REASON.{reason.name}": f"'{reason}'" for reason in Reason},
}
"""The records of Redis hold states, gates and classes as numbers, and moves, kinds and reasons as words."""
_TOKEN = re.compile(r"\b(?:STATE|GATE|MOVE|KIND|CLASS|REASON)\.[A-Z_]+\b")


def with_codes(text: str) -> str:
    """Replace every ``STATE.RUNNING``, ``MOVE.RETRY`` and so on in a SQL text by its number.

    The numbers are written once, above; a name that does not exist is an error when the text is loaded.
    """
    return _TOKEN.sub(lambda match: str(_TOKENS[match[0]]), text)


def with_lua_codes(text: str) -> str:
    """The same for a Lua text, where ``MOVE.RETRY``, ``KIND.TURN`` and ``REASON.EXPIRED`` become quoted words."""
    return _TOKEN.sub(lambda match: str(_LUA_TOKENS[match[0]]), text)
