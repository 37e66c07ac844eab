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
    """What an application says about one queue; checked at once, told to the store when it is opened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = QueueSettings()

    def declare(self, **fields: Any) -> None:
        """Lay these fields over what is declared; None leaves a field alone."""
        given = {field: value for field, value in fields.items() if value is not None}
        for field, value in given.items():
            known = getattr(self.settings, field)
            if known not in (value, getattr(QueueSettings(), field)):
                raise InvalidInput(field, f"queue {self.name!r} is declared with two of them; leave one out")
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
        """Declare the lanes that match `pattern`: a key, or the beginning of keys followed by ``*``.

        `limit` is how many jobs of one such lane run at once, `weight` its share, `ordered` strict order of arrival.
        """
        rule = LaneRule(pattern=pattern, limit=limit, weight=weight, ordered=ordered, max_pending=max_pending)
        self.settings = msgspec.structs.replace(self.settings, lanes=(*self.settings.lanes, rule))
        return self

    def __repr__(self) -> str:
        return f"<QueueDeclaration of {self.name}>"


def reserved_of(reserved: Reserved | Mapping[str, int] | None) -> Reserved | None:
    """What a user writes as the slots of a queue that are kept for a priority."""
    if reserved is None or isinstance(reserved, Reserved):
        return reserved
    unknown = sorted(set(reserved) - set(Reserved.__struct_fields__))
    if unknown:
        raise InvalidInput("reserved", f"{shown(unknown[0])} is none of 'high', 'normal'")
    return Reserved(**reserved)


def closed_set(lanes: Sequence[str] | None) -> tuple[str, ...] | None:
    """What a user writes as all the lanes of a queue."""
    if lanes is None:
        return None
    if isinstance(lanes, str):
        raise InvalidInput("lanes", f"must be a list of lanes, such as [{lanes!r}]")
    return tuple(lanes)
