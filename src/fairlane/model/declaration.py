"""What an application declares about its queues and their lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import InvalidInput
from .names import shown
from .settings import LaneRule, QueueSettings
from .slots import Reserved


class QueueDeclaration:
    """The settings an application declares for one queue: checked immediately, stored when the store is opened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = QueueSettings()

    def declare(self, **fields: Any) -> None:
        """Add these fields to the declaration; None leaves a field unchanged."""
        given = {field: value for field, value in fields.items() if value is not None}
        for field, value in given.items():
            known = getattr(self.settings, field)
            if known not in (value, getattr(QueueSettings(), field)):
                raise InvalidInput(field, f"queue {self.name!r} is declared with two different values; keep one")
        self.settings = msgspec.structs.replace(self.settings, **given)

    def lane(
        self,
        pattern: str,
        *,
        limit: int | None = None,
        weight: float = 1.0,
        ordered: bool | None = None,
        max_pending: int | None = None,
    ) -> QueueDeclaration:
        """Declare the lanes that match `pattern`: a key, or a prefix followed by ``*``.

        `limit` is how many jobs of one such lane run at once, `weight` its share, `ordered` strict order of arrival.
        """
        rule = LaneRule(pattern=pattern, limit=limit, weight=weight, ordered=ordered, max_pending=max_pending)
        self.settings = msgspec.structs.replace(self.settings, lanes=(*self.settings.lanes, rule))
        return self

    def __repr__(self) -> str:
        return f"<QueueDeclaration of {self.name}>"


def reserved_of(reserved: Reserved | Mapping[str, int] | None) -> Reserved | None:
    """Convert the `reserved` argument of `app.queue`."""
    if reserved is None or isinstance(reserved, Reserved):
        return reserved
    unknown = sorted(set(reserved) - set(Reserved.__struct_fields__))
    if unknown:
        raise InvalidInput("reserved", f"unknown priority {shown(unknown[0])}; use 'high' or 'normal'")
    return Reserved(**reserved)


def closed_set(lanes: Sequence[str] | None) -> tuple[str, ...] | None:
    """Convert the `lanes` argument of `app.queue`."""
    if lanes is None:
        return None
    if isinstance(lanes, str):
        raise InvalidInput("lanes", f"must be a list of lanes, such as [{lanes!r}]")
    return tuple(lanes)
