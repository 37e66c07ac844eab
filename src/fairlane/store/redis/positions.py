"""Where waiting jobs stand, out of figures that the server counts in one call."""

from __future__ import annotations

import msgspec

from ...model.reading import JobPosition, room_after
from ..positions import MANY_LANES, MOST_COUNTED, MOST_LANES, JobFigures, QueueFigures, Worker, servers, standing_of
from ..shared.stored_settings import read_settings

LIMITS = {"lanes": MOST_LANES, "counted": MOST_COUNTED, "many": MANY_LANES}


class _Queue(msgspec.Struct):
    id: int
    name: str
    settings: str
    pending: tuple[int, int, int]
    busy: tuple[int, int, int]
    workers: list[Worker]
    seconds: float | None

    def figures(self) -> QueueFigures:
        return QueueFigures(
            name=self.name,
            settings=read_settings(self.name, self.settings, None).settings,
            pending=self.pending,
            busy=self.busy,
            workers=self.workers,
            seconds=self.seconds,
        )


class _Line(msgspec.Struct):
    now: float
    queues: list[_Queue]
    jobs: list[JobFigures]


class _Service(msgspec.Struct):
    queue: _Queue
    lanes: int


_line = msgspec.msgpack.Decoder(_Line)
_service = msgspec.msgpack.Decoder(_Service)


def room_of(answer: bytes, class_: int, lane: str | None, limit: int | None) -> float | None:
    """Seconds until a queue that is full, or a lane of it, has probably room for one more."""
    service = _service.decode(answer)
    queue = service.queue.figures()
    able = 0 if queue.settings.paused else servers(queue.workers, queue.settings, class_)
    if lane is None:
        return room_after(queue.seconds, able)
    # The lanes that have work share the slots.
    return room_after(queue.seconds, able / max(1, service.lanes), limit=limit)


def standings_of(answer: bytes) -> dict[str, JobPosition]:
    """Where jobs stand, by id; whatever does not wait is not there."""
    line = _line.decode(answer)
    queues = {queue.id: queue.figures() for queue in line.queues}
    return {job.id: standing_of(job, queues[job.queue], line.now) for job in line.jobs}
