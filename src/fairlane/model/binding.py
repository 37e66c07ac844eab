"""Bindings: a sticky key tied to one worker of a pool until it is released."""

from __future__ import annotations

from enum import StrEnum

import msgspec

IDLE_SECONDS = 86_400.0
"""An open binding that nobody used for this long is drained."""


class BindingState(StrEnum):
    """open → draining → released; or lost, when its worker is gone. A late job turns draining into open."""

    OPEN = "open"
    DRAINING = "draining"
    RELEASED = "released"
    LOST = "lost"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """One tie between a key and a worker; closed ones stay as history."""

    pool: str
    key: str
    index: int
    state: BindingState
    opened_at: float
    used_at: float
    closed_at: float | None
    cleanup: str | None
    """The id of its clean-up, if one was asked for."""
    cleanup_failed: bool


class Release(StrEnum):
    """The answer to `release`."""

    NOTHING = "nothing"
    """The key is not bound: there is nothing to clean up, and that is not an error."""
    DRAINING = "draining"
    RELEASED = "released"
