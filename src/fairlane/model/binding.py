"""Bindings: a sticky key tied to one worker of a pool until it is released."""

from __future__ import annotations

from enum import StrEnum

import msgspec

IDLE_SECONDS = 86_400.0
"""An open binding that has not been used for this long is drained."""


class BindingState(StrEnum):
    """open → draining → released; or lost, when its worker is gone. A job that arrives while draining re-opens it."""

    OPEN = "open"
    DRAINING = "draining"
    RELEASED = "released"
    LOST = "lost"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The assignment of a sticky key to a worker. Closed bindings are kept as history."""

    pool: str
    key: str
    index: int
    state: BindingState
    opened_at: float
    used_at: float
    closed_at: float | None
    cleanup: str | None
    """The id of its clean-up job, if one was requested."""
    cleanup_failed: bool


class Release(StrEnum):
    """The result of `release`."""

    NOTHING = "nothing"
    """The key is not bound, so there is nothing to clean up. Not an error."""
    DRAINING = "draining"
    RELEASED = "released"
