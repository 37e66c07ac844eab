"""Fairlane in a Celery application. Requires the extra ``fairlane[celery]``.

`Fair` makes each Celery worker a Fairlane worker: tasks are published as usual, and become ordinary jobs.
`StickyRouter` runs all tasks of a key on one worker. `LoadBalancer` sends each task to the least loaded of several
queues.
The classes are imported when they are used, so that one mode does not load the other's modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import celery as _celery  # noqa: F401 - imported to fail with a sentence where it is missing
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "fairlane.integrations.celery requires Celery: pip install 'fairlane[celery]'", name=exc.name
    ) from None

if TYPE_CHECKING:
    from .balancer.balancer import LoadBalancer
    from .fair import Fair
    from .sticky import Broadcast, StickyRouter

__all__ = ["Broadcast", "Fair", "LoadBalancer", "StickyRouter"]

_MODULES = {
    "Broadcast": ".sticky",
    "Fair": ".fair",
    "LoadBalancer": ".balancer.balancer",
    "StickyRouter": ".sticky",
}


def __getattr__(name: str) -> Any:
    """Import a class on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
