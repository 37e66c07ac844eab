"""Counts for the position of a waiting job, which `fairlane.store.positions` computes.

Jobs ahead of it are counted completely, in a covering index: 300,000 of them take 13 ms (measured). Other lanes are
counted up to limits that depend neither on the backlog nor on the number of lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...model.job import JobKind
from ...model.lanes import terms
from ...model.reading import JobPosition
from ...model.settings import QueueSettings
from ..codes import RUNNING, SCHEDULED
from ..positions import (
    MANY_LANES,
    MOST_LANES,
    CompetingLanes,
    QueueSnapshot,
    WaitingJob,
    counted,
    job_position,
)
from .reading import View, is_task_known, median_seconds, workers_of
from .records import JobRecord, job_record_of, json_texts

FAR = 2**62
LaneCounts = dict[tuple[int, str, int | None], tuple[int, int, int]]
"""The waiting jobs of each class of the lanes that were counted in one call: jobs of one lane are often asked for
together, and all jobs of a lane are many. In an ordered lane, which has one line, they are all in the first number."""


def read_positions(view: View, ids: Sequence[str]) -> list[JobPosition | None]:
    """Return the positions of jobs; None for a job that does not wait."""
    settings = view.settings()
    records = {e.id: e for e in map(job_record_of, view.all("records_by_ids", json_texts(ids)))}
    queues: dict[int, QueueSnapshot] = {}
    lanes: LaneCounts = {}
    answers: list[JobPosition | None] = []
    for id in ids:
        e = records.get(id)
        if e is None or e.state == RUNNING:
            answers.append(None)
            continue
        queue = queues.get(e.queue)
        if queue is None:
            name, _, stored = settings[e.queue]
            queue = queues[e.queue] = _queue_snapshot(view, e.queue, name, stored.settings)
        answers.append(job_position(_JobCounter(view, e, queue, lanes).waiting_job(), queue, view.now))
    return answers


def _queue_snapshot(view: View, number: int, name: str, settings: QueueSettings) -> QueueSnapshot:
    pending, busy = [0, 0, 0], [0, 0, 0]
    for class_, waits, runs in view.all("queue_jobs", number):
        pending[class_], busy[class_] = waits, runs
    return QueueSnapshot(
        name=name,
        settings=settings,
        pending=(pending[0], pending[1], pending[2]),
        busy=(busy[0], busy[1], busy[2]),
        workers=workers_of(view, name),
        seconds=median_seconds(view, number),
    )


class _JobCounter:
    """Counts what matters for the position of one job."""

    def __init__(self, view: View, e: JobRecord, queue: QueueSnapshot, lanes: LaneCounts) -> None:
        self.view = view
        self.e = e
        self.queue = queue
        self.lanes = lanes
        self.ordered = e.lane is not None and terms(queue.settings, e.lane_key).ordered

    def waiting_job(self) -> WaitingJob:
        e, view = self.e, self.view
        # In an ordered lane a job that waits for its retry keeps its place; other scheduled jobs have no place yet.
        in_line = e.arrival is not None and (e.state != SCHEDULED or e.lane is not None)
        place, of, own = self._places() if in_line else (None, 0, 0)
        named = bool(e.inbox) and not e.inbox.endswith("/")
        workers = workers_of(view, self.queue.name, e.inbox) if named else None
        declined = view.one("declined_since", e.seq, e.fence) is not None
        flows_before, retry_until, awaited_task = 0, None, None
        if e.lane is not None and not e.granted:
            [retry_until] = view.one("lane_retrying", e.lane)
            if self.ordered:
                [awaited_task] = view.one("lane_awaits", e.lane) or (None,)
        elif place == 1 and e.flow is not None:
            slots = sum(worker[0] for worker in (self.queue.workers if workers is None else workers))
            [flows_before] = view.one("flows_before", e.flow, slots)
        return WaitingJob(
            id=e.id,
            queue=e.queue,
            kind=e.kind,
            priority=e.class_,
            state=e.state,
            gate=e.gate,
            inbox=e.inbox,
            lane=e.lane_key,
            cost=e.cost,
            limited=e.lane is not None,
            ordered=self.ordered,
            granted=bool(e.granted),
            due=e.due,
            place=place,
            of=of,
            own=own,
            flows_before=flows_before,
            retry_until=retry_until,
            workers=workers,
            task=e.task,
            declined=declined,
            awaited_task=awaited_task,
            known=not declined or is_task_known(view, e.task, self.queue.name, e.inbox),
            competing=None if place is None or e.kind == JobKind.TURN else _competing_lanes(view, e, own),
        )

    def _places(self) -> tuple[int, int, int]:
        """Return its place among the waiting jobs of its lane, their number, and how many of its class are ahead."""
        e = self.e
        assert e.arrival is not None
        counts = self._counts()
        if self.ordered:
            own = before = self._count(dict.fromkeys(range(3), e.arrival))
        else:
            own = self._count({e.class_: e.arrival})
            before = sum(counts[: e.class_]) + own
        return before + 1, sum(counts), own

    def _counts(self) -> tuple[int, int, int]:
        key = (self.e.queue, self.e.flow_key, self.e.lane)
        found = self.lanes.get(key)
        if found is None:
            if self.ordered:
                found = (self._count(dict.fromkeys(range(3), FAR)), 0, 0)
            else:
                found = (self._count({0: FAR}), self._count({1: FAR}), self._count({2: FAR}))
            self.lanes[key] = found
        return found

    def _count(self, bounds: dict[int, int]) -> int:
        """Count the waiting jobs of the lane: of each class, those up to an arrival."""
        e, view = self.e, self.view
        total = 0
        for flow, class_ in view.all("flows_of_lane", e.queue, e.flow_key):
            if class_ in bounds:
                total += view.one("place_ready", flow, bounds[class_])[0]
        for class_, bound in bounds.items():
            if e.lane is not None:
                # In an ordered lane every rank is 0, so the first class counts all.
                rank = 0 if self.ordered else class_
                if self.ordered and class_ > min(bounds):
                    continue
                for name in ("place_waiting", "place_holding"):
                    total += view.one(name, e.lane, rank, bound)[0]
            else:
                total += view.one("place_gated", e.queue, e.lane_key, class_, bound)[0]
        return int(total)


def _competing_lanes(view: View, e: JobRecord, own: int) -> CompetingLanes | None:
    """Return the other lanes of the domain of a waiting job that has `own` jobs of its lane and class ahead of it."""
    row = view.one("domain_get", e.inbox, e.class_, e.queue)
    if row is None:
        return None
    domain, clock = row
    _, finish, head_tag, _ = view.one("flow_get", domain, e.flow_key) or (None, 0, None, None)
    [active] = view.one("flows_active", e.inbox, e.class_, e.queue, MANY_LANES)
    [limited] = (0,) if e.inbox else view.one("lanes_limited", e.queue, MANY_LANES)
    most = counted(own, active, limited)
    blocked = []
    if limited:
        blocked = view.all(
            "competing_lanes_blocked", domain, e.queue, e.flow_key, most, e.class_, MOST_LANES, MANY_LANES
        )
    return CompetingLanes(
        clock=clock,
        finish=finish,
        tag=head_tag,
        active=active,
        limited=limited,
        counted=most,
        ready=view.all("competing_lanes_ready", domain, e.queue, e.flow_key, most, MOST_LANES),
        blocked=blocked,
    )
