"""Whether a worker claims jobs, for `/readyz`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .shutdown import Phase

if TYPE_CHECKING:
    from .worker import Worker


def unready(worker: Worker) -> str | None:
    """What keeps a worker from claiming; None when nothing does. May be called from any thread."""
    phase = worker.phase
    return None if phase is Phase.SERVING else phase.value
