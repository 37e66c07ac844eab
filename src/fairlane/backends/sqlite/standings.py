"""Where a waiting job stands in line, what holds it, and the figures for an estimate.

Places are counted only as far as they are exact, so the longest lane costs no more than a thousand index entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...job import JobState, Priority
from ...lanes import LaneTerms, terms
from ...reading import EXACT_PLACES, Gate, Standing
from ...settings import QueueSettings
from .steps.catalog import json_texts
from .steps.codes import ARRIVING, RUNNING, SCHEDULED
from .steps.entry import CLEANUP, UNBOUND, Entry, entry_of
from .steps.places import room_of
from .views import View

FAR = 2**62


def standings(view: View, ids: Sequence[str]) -> list[Standing | None]:
    """Where jobs stand; None for whatever does not wait."""
    settings = view.settings()
    entries = {e.id: e for e in map(entry_of, view.all("entries_by_ids", json_texts(ids)))}
    answers: list[Standing | None] = []
    for id in ids:
        e = entries.get(id)
        if e is None or e.state == RUNNING:
            answers.append(None)
        else:
            name, _, queue_settings, _ = settings[e.queue]
            answers.append(_Stander(view, e, name, queue_settings).standing())
    return answers


class _Stander:
    """The look at one job."""

    def __init__(self, view: View, e: Entry, queue: str, settings: QueueSettings) -> None:
        self.view = view
        self.e = e
        self.queue = queue
        self.settings = settings
        self.terms: LaneTerms = terms(settings, e.lane_key)
        self.workers = view.all("workers_of_queue", view.boot, view.mono, queue)

    def standing(self) -> Standing:
        e = self.e
        # In an ordered lane a job that waits for its retry keeps its place; elsewhere what is scheduled has none yet.
        in_line = e.arrival is not None and (e.state != SCHEDULED or e.lane is not None)
        place, of = self._places() if in_line else (None, 0)
        exact = place is None or place <= EXACT_PLACES
        free, servers = self._servers()
        gate, until = self._gate(place, free)
        times = sorted(seconds for (seconds,) in self.view.all("service_times_read", e.queue))
        return Standing(
            id=e.id,
            now=self.view.now,
            state=JobState.SCHEDULED if e.state == SCHEDULED else JobState.PENDING,
            gate=gate,
            until=until,
            worker=e.inbox if e.inbox and not e.inbox.endswith("/") else None,
            lane=e.lane_key,
            queue=self.queue,
            place=place,
            of=of,
            exact=exact,
            queue_ahead=self._queue_ahead(place),
            servers=servers,
            lane_limit=self.terms.limit,
            service_seconds=times[len(times) // 2] if times else None,
        )

    # -- places --------------------------------------------------------------------------------------------------

    def _places(self) -> tuple[int, int]:
        """This job's place among the waiting jobs of its lane, and how many those are."""
        assert self.e.arrival is not None
        before = self._count(self.e.arrival)
        everyone = self._count(None)
        return before + 1, min(everyone, EXACT_PLACES)

    def _count(self, arrival: int | None) -> int:
        """Waiting jobs of the lane that go before `arrival` (all of them for None), as far as counts are exact."""
        e, view = self.e, self.view
        total: int = 0
        ordered = self.terms.ordered and e.lane is not None
        bounds = {}
        for class_ in range(3):
            if arrival is None or (not ordered and class_ < e.class_):
                bounds[class_] = FAR
            elif ordered or class_ == e.class_:
                bounds[class_] = arrival
        for flow, class_ in view.all("flows_of_lane", e.queue, e.flow_key):
            if class_ in bounds:
                total += view.one("place_ready", flow, bounds[class_], EXACT_PLACES + 1 - min(total, EXACT_PLACES))[0]
        for class_, bound in bounds.items():
            left = EXACT_PLACES + 1 - total
            if left <= 0:
                break
            if e.lane is not None:
                # In an ordered lane every rank is 0, so the first class has counted all.
                rank = 0 if ordered else class_
                if ordered and class_ > min(bounds):
                    continue
                for name in ("place_waiting", "place_holding"):
                    total += view.one(name, e.lane, rank, bound, left)[0]
            else:
                total += view.one("place_gated", e.queue, e.lane_key, class_, bound, left)[0]
        return int(min(total, EXACT_PLACES))

    def _queue_ahead(self, place: int | None) -> int:
        """An estimate: in fair order each active lane has as many starts before this job as it has jobs before it."""
        if place is None:
            return 0
        e = self.e
        [active] = self.view.one("flows_active", e.inbox, e.class_, e.queue, EXACT_PLACES)
        [waiting] = self.view.one("pending_up_to", e.queue, e.class_)
        return max(0, min(int(waiting) - 1, place * max(1, int(active)) - 1))

    # -- gates ---------------------------------------------------------------------------------------------------

    def _servers(self) -> tuple[int, int]:
        """Free slots and all slots of the workers that could run it, within the queue's limit."""
        e = self.e
        rows = self.workers
        if e.inbox and not e.inbox.endswith("/"):
            pool, _, index = e.inbox.rpartition("/")
            row = self.view.one("worker_at", pool, int(index), self.view.boot, self.view.mono)
            rows = [] if row is None else [row]
        every = sum(row[0] for row in rows)
        free = sum(room_of(row, e.class_) for row in rows)
        if self.settings.limit is not None:
            every = min(every, self.settings.limit)
        return free, every

    def _gate(self, place: int | None, free: int) -> tuple[Gate, float | None]:
        e = self.e
        if e.state == SCHEDULED:
            return Gate.DUE, e.due
        if e.state == ARRIVING:
            return Gate.ARRIVING, None
        if self.settings.paused:
            return Gate.QUEUE_PAUSED, None
        if e.lane is not None and not e.granted:
            return self._lane_gate()
        if e.gate == UNBOUND:
            return Gate.UNBOUND, None
        if e.gate == CLEANUP:
            return Gate.CLEANUP, None
        placed = bool(e.inbox)
        if placed and free == 0 and not self._worker_is_there():
            return Gate.WORKER_GONE, None
        if not placed and not self.workers:
            return Gate.NO_WORKER, None
        if self._queue_is_full():
            return Gate.QUEUE_LIMIT, None
        if place is not None and place > 1:
            return Gate.AHEAD, None
        if free == 0:
            return Gate.SLOTS, None
        if self._others_first(free):
            return Gate.AHEAD, None
        return Gate.NONE, None

    def _others_first(self, free: int) -> bool:
        """Whether the heads of other lanes, or higher classes, take all the slots that are free."""
        e = self.e
        [higher] = self.view.one("pending_up_to", e.queue, e.class_ - 1)
        [lanes] = self.view.one("flows_before", e.flow, free)
        return bool(higher + lanes >= free)

    def _lane_gate(self) -> tuple[Gate, float | None]:
        if self.terms.paused:
            return Gate.LANE_PAUSED, None
        [until] = self.view.one("lane_retrying", self.e.lane)
        if self.terms.ordered and until is not None:
            return Gate.LANE_RETRY, until
        return Gate.LANE, None

    def _worker_is_there(self) -> bool:
        pool, _, index = self.e.inbox.rpartition("/")
        return self.view.one("worker_at", pool, int(index), self.view.boot, self.view.mono) is not None

    def _queue_is_full(self) -> bool:
        slots = self.settings.slots
        if slots is None:
            return False
        load = [0, 0, 0]
        for class_, count in self.view.all("queue_running", self.e.queue):
            load[class_] = count
        return slots.room(load, Priority(self.e.class_)) == 0
