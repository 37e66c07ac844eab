"""How fast a queue is served: the slots of its workers, and how long its jobs take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...model.reading import room_after
from ...model.settings import QueueSettings
from ..positions import MANY_LANES, Worker, servers
from ..shared.stored_settings import read_settings
from .reading import View


class Service:
    """What determines when a full queue has room again."""

    def __init__(self, settings: QueueSettings, seconds: float | None, workers: list[Worker], lanes: int) -> None:
        self.settings = settings
        self.seconds = seconds
        """The median run time of its last jobs; None while none has finished."""
        self.workers = workers
        """Live workers that serve it."""
        self.lanes = lanes
        """Lanes with claimable jobs of the class in question."""

    def servers(self, class_: int) -> int:
        """Slots that could start a job of the class now."""
        return 0 if self.settings.paused else servers(self.workers, self.settings, class_)


async def service(view: View, queue: str, class_: int) -> Service | None:
    """The service of a queue for jobs of a class; None for an unknown queue."""
    row = await view.one("read_service", view.lease, queue, class_, MANY_LANES)
    if row is None:
        return None
    declared, override, seconds, workers, lanes = row
    settings = read_settings(queue, declared, override).settings
    return Service(settings, seconds, [] if workers is None else workers, lanes)


async def room(view: View, where: Mapping[str, Any]) -> float | None:
    """Seconds until a full queue, or a full lane of it, probably has room for one more job; None if unknown."""
    found = await service(view, where["queue"], where["class"])
    if found is None:
        return None
    slots = found.servers(where["class"])
    if "lane" not in where:
        return room_after(found.seconds, slots)
    # The lanes that have work share the slots.
    return room_after(found.seconds, slots / max(1, found.lanes), limit=where["limit"])
