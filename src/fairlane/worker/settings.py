"""The settings of one worker, checked when they are made."""

from __future__ import annotations

import socket

import msgspec

from ..model.intervals import Intervals
from ..model.maintenance import Retention
from ..model.names import check_count, check_name, check_seconds
from ..model.slots import Slots, default_reserved


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The queues that a worker serves, and how."""

    queues: dict[str, int] = msgspec.field(default_factory=lambda: {"default": 1})
    """The queues it serves, with their weights."""
    slots: Slots = Slots(total=10, reserved=default_reserved(10))
    pool: str = "default"
    index: int | None = None
    host: str = msgspec.field(default_factory=socket.gethostname)
    grace: float = 30.0
    """Seconds that running jobs get at a stop before they are handed back."""
    burst: bool = False
    """Stop as soon as there is nothing to claim."""
    manager: bool = True
    """Host a standby of the manager."""
    intervals: Intervals = Intervals()
    retention: Retention = Retention()

    def __post_init__(self) -> None:
        for name, weight in self.queues.items():
            check_name("queues", name)
            check_count(f"queues: weight of {name}", weight, least=1, most=1_000)
        check_name("pool", self.pool)
        if self.index is not None:
            check_count("index", self.index, least=0, most=1_000_000)
        check_seconds("grace", self.grace)
