"""The documents of live topics: the queues, the workers with their slots, the lanes of a queue, and the line of a lane.

Each read is bounded: its cost depends on the length of a page, not on the backlog.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from ..documents import lane_record, leader_record, queue_record, session_record
from ..errors import NotFound
from ..model import lanes
from ..model.listings import WAITING_LINE, LaneJob, LanePage
from ..model.reading import MOST_PER_PAGE, QueueReading
from ..model.session import SessionKind, SessionState
from .next_up import next_up

if TYPE_CHECKING:
    from .service import Service

Document = dict[str, Any]
MOST_WORKERS = 200
"""Sessions in an event; `/workers` lists them all."""
MOST_LANES = 100
LINE = 50
"""Waiting jobs of a line in an event, and as many running ones."""
ESTIMATED = 10
"""Jobs at the head of a line whose estimates are read; those of the jobs behind them are interpolated."""
ARGUMENTS_READ = 20
"""Jobs whose arguments are read for one event."""
ARGUMENTS_SHOWN, LONGEST_ARGUMENTS = 4, 120
NEXT_SECONDS = 2.0
"""The jobs that start next are read at this interval."""
RATE_SECONDS = 5.0
"""Seconds over which rates are measured: jobs end in batches, and a figure that jumps cannot be read."""
WINDOW = 60.0
"""Seconds over which the used share of a lane is measured."""


def whole(seconds: float | None) -> float | None:
    """A duration that changes all the time, in whole seconds, to avoid an event for every fraction."""
    return None if seconds is None else float(int(seconds))


class QueuesView:
    """Every queue, with the jobs that arrived and ended per second within the last few seconds."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._seen: dict[str, deque[tuple[float, int, int]]] = {}

    async def __call__(self) -> Document:
        return {"queues": [self._record(queue) for queue in await self._service.queues.get()]}

    def _record(self, queue: QueueReading) -> Document:
        now, counts = time.monotonic(), queue.counts
        ended = counts.completed + counts.failed + counts.cancelled
        seen = ended + counts.pending + counts.scheduled + counts.running
        window = self._seen.setdefault(queue.name, deque())
        window.append((now, ended, seen))
        while now - window[0][0] > RATE_SECONDS:
            window.popleft()
        took = now - window[0][0]
        rates: dict[str, float | None] = {"arrived_per_second": None, "ended_per_second": None}
        if took > 0:
            rates = {
                "arrived_per_second": round((seen - window[0][2]) / took, 1),
                "ended_per_second": round((ended - window[0][1]) / took, 1),
            }
        record = queue_record(queue)
        return record | {"oldest_wait": whole(record["oldest_wait"])} | rates


class WorkersView:
    """The processes that are present, and the leader."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self) -> Document:
        client = self._service.app.client
        present = (SessionState.LIVE, SessionState.STOPPING)
        sessions = [each for each in await client.sessions() if each.state in present]
        workers = [each for each in sessions if each.kind is SessionKind.WORKER]
        workers.sort(key=lambda each: (each.pool, each.index or 0))
        term = await client.leader()
        leader = leader_record(term)
        if leader is not None and term is not None:
            found = next((each for each in sessions if each.id == term.session), None)
            leader = {"term": leader["term"], "session": leader["session"]} | {
                "name": None if found is None else found.worker or f"{found.kind.value} on {found.host}"
            }
        records = []
        for worker in workers[:MOST_WORKERS]:
            record = session_record(worker)
            late = worker.remaining < worker.lease / 3
            records.append({name: value for name, value in record.items() if name not in ("remaining", "tasks")})
            records[-1]["late"] = late
        return {"workers": records, "total": len(workers), "leader": leader}


class LanesView:
    """A queue, its longest lanes with the shares that they used in the last minute, and the jobs that start next."""

    def __init__(self, service: Service, queue: str) -> None:
        self._service = service
        self._queue = queue
        self._history: deque[tuple[float, int, dict[str | None, int]]] = deque()
        self._next: list[Document] = []
        self._next_at = float("-inf")

    async def __call__(self) -> Document:
        client = self._service.app.client
        reading = await known_queue(self._service, self._queue)
        listing = await client.lanes(self._queue, limit=MOST_LANES)
        if time.monotonic() - self._next_at >= NEXT_SECONDS:
            # The only part that takes more than one read: less often.
            store = await self._service.app.connection.store()
            self._next = await next_up(store, self._queue, listing)
            self._next_at = time.monotonic()
        self._note(reading.counts.running, {lane.lane: lane.running for lane in listing})
        used = self._used()
        record = queue_detail(reading)
        return {
            "queue": record | {"oldest_wait": whole(record["oldest_wait"])},
            "lanes": [
                lane_record(lane) | {"oldest_wait": whole(lane.oldest_wait), "used": used.get(lane.lane)}
                for lane in listing
            ],
            "cursor": listing.cursor,
            "exact": listing.exact,
            "next": self._next,
            "measured_seconds": int(self._history[-1][0] - self._history[0][0]),
        }

    def _note(self, running: int, lanes: dict[str | None, int]) -> None:
        now = time.monotonic()
        self._history.append((now, running, lanes))
        while now - self._history[0][0] > WINDOW:
            self._history.popleft()

    def _used(self) -> dict[str | None, float]:
        """The share of the running time of the queue that each lane had within the window."""
        whole = sum(max(running, sum(by_lane.values())) for _, running, by_lane in self._history)
        if not whole:
            return {}
        totals: dict[str | None, int] = {}
        for _, _, by_lane in self._history:
            for lane, running in by_lane.items():
                totals[lane] = totals.get(lane, 0) + running
        return {lane: round(total / whole, 3) for lane, total in totals.items()}


class LineView:
    """The line of a lane: its jobs in order with their estimates, and what holds the first of them."""

    def __init__(self, service: Service, queue: str, lane: str | None) -> None:
        self._service = service
        self._queue = queue
        self._lane = lane
        self._arguments: dict[str, str | None] = {}
        """The arguments of the jobs in line, shortened. They are read once for each job."""

    async def __call__(self) -> Document:
        client = self._service.app.client
        reading = await known_queue(self._service, self._queue)
        # The waiting jobs first: one that starts in between is on both pages, not on none.
        waiting = await client.lane_line(self._queue, self._lane, limit=LINE, cursor=WAITING_LINE)
        running, count = await self._running()
        terms = msgspec.to_builtins(lanes.terms(reading.settings, self._lane))
        return {
            "queue": self._queue,
            "lane": self._lane,
            "terms": terms,
            "queue_paused": reading.settings.paused,
            **await self._line(running, waiting),
            "running": count,
            "more": waiting.cursor is not None or count > len(running),
        }

    async def _running(self) -> tuple[list[LaneJob], int]:
        """The first running jobs of the lane, and how many there are: no more than the slots of all workers."""
        first: list[LaneJob] = []
        count, limit, cursor = 0, LINE, None
        while True:
            page = await self._service.app.client.lane_line(self._queue, self._lane, limit=limit, cursor=cursor)
            found = [job for job in page.jobs if job.running]
            first, count = first or found, count + len(found)
            if len(found) < len(page.jobs) or page.cursor is None:
                return first, count
            limit, cursor = MOST_PER_PAGE, page.cursor

    async def _line(self, running: list[LaneJob], page: LanePage) -> Document:
        started = {job.id for job in running}
        waiting = [job for job in page.jobs if job.id not in started]
        line = running + waiting
        await self._read_arguments([job.id for job in line])
        asked = [job.id for job in dict.fromkeys((*waiting[:ESTIMATED], *waiting[-1:]))]
        store = await self._service.app.connection.store()
        found = {each.id: each for each in await store.positions(asked) if each is not None} if asked else {}
        known = [
            (job.place or 0, eta) for job in waiting if job.id in found and (eta := found[job.id].eta()) is not None
        ]
        jobs = [
            msgspec.to_builtins(job)
            | {
                "priority": job.priority.label,
                "eta": _between(known, job.place),
                "arguments": self._arguments.get(job.id),
            }
            for job in line
        ]
        head = next((found[job.id] for job in waiting if job.id in found), None)
        last = found.get(waiting[-1].id) if waiting else None
        return {
            "ordered": page.ordered,
            "jobs": jobs,
            "exact": page.exact,
            "waiting": max(len(waiting), last.of if last is not None else 0),
            "waiting_exact": last is None or last.of_exact,
            "head": None if head is None else {"id": head.id, "why": head.why(), "gate": head.gate.value},
        }

    async def _read_arguments(self, ids: list[str]) -> None:
        """Read the arguments of a few jobs that are new in line; of the others with the next event."""
        self._arguments = {id: self._arguments[id] for id in ids if id in self._arguments}
        new = [id for id in ids if id not in self._arguments][:ARGUMENTS_READ]
        if new:
            store = await self._service.app.connection.store()
            for id, job in zip(new, await store.get(new), strict=True):
                self._arguments[id] = None if job is None else _shortened(job.payload)


def _shortened(payload: bytes) -> str | None:
    """The arguments of a job as a person would write them, cut to a line."""
    try:
        args, kwargs = msgspec.json.decode(payload, type=tuple[list[msgspec.Raw], dict[str, msgspec.Raw]])
    except msgspec.DecodeError:
        return None
    words = [bytes(each) for each in args] + [f"{name}=".encode() + bytes(each) for name, each in kwargs.items()]
    text = b", ".join(word[:LONGEST_ARGUMENTS] for word in words[:ARGUMENTS_SHOWN]).decode("utf-8", "replace")
    return text[:LONGEST_ARGUMENTS] or None


def _between(known: list[tuple[int, float]], place: int | None) -> float | None:
    """An estimate for a place, interpolated between the places whose estimates are known."""
    if place is None or not known:
        return None
    before = max((each for each in known if each[0] <= place), default=None)
    after = min((each for each in known if each[0] >= place), default=None)
    if before is None or after is None:
        return None
    if before[0] == after[0]:
        return round(before[1], 1)
    part = (place - before[0]) / (after[0] - before[0])
    return round(before[1] + part * (after[1] - before[1]), 1)


async def known_queue(service: Service, name: str) -> QueueReading:
    """A queue as the live views read them together; one that has just been created is read alone."""
    for reading in await service.queues.get():
        if reading.name == name:
            return reading
    return await one_queue(service, name)


async def one_queue(service: Service, name: str) -> QueueReading:
    """A queue with its counts, as they are now."""
    for reading in await service.app.client.queues():
        if reading.name == name:
            return reading
    raise NotFound(f"queue {name!r} does not exist yet; declare it with app.queue() or enqueue a job")


def queue_detail(queue: QueueReading) -> Document:
    """A queue with its counts, its declared settings and their override."""
    return queue_record(queue) | {
        "declared": msgspec.to_builtins(queue.declared),
        "override": None if queue.override is None else msgspec.to_builtins(queue.override),
        "lanes": msgspec.to_builtins(queue.settings.lanes),
    }
