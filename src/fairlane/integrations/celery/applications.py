"""The Celery applications in fair mode, each with its `Fair`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from .fair import Fair

fairs: WeakKeyDictionary[Any, Fair] = WeakKeyDictionary()


def fair_of(app: Any) -> Fair:
    """The `Fair` of an application."""
    return fairs[app]
