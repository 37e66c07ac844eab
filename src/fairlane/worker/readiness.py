"""Whether a worker claims, as `/readyz` tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import Worker


def unready(worker: Worker) -> str | None:
    """What keeps a worker from claiming; None when nothing does. May be called in any thread."""
    if worker._stopping.is_set():
        return "the worker is stopping"
    if not worker.ready.is_set():
        return "the worker is not registered yet"
    if worker._session_lost:
        return "the session was lost; the worker registers anew"
    if worker._out_of_contact:
        return "the store has not renewed the session in time"
    return None
