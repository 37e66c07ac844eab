"""Where a waiting job stands in line, what holds it, and the figures for an estimate.

Places are counted only as far as they are exact, so the longest lane costs no more than a thousand index entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...job import JobKind, JobState, Priority
from ...lanes import LaneTerms, terms
from ...reading import EXACT_PLACES, Gate, Standing, starts_before
from ...settings import QueueSettings
from .rivals import rivals
from .steps import service
from .steps.catalog import json_texts
from .steps.codes import ARRIVING, RUNNING, SCHEDULED
from .steps.entry import CLEANUP, UNBOUND, Entry, entry_of
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
        self.ordered = self.terms.ordered and e.lane is not None
        self.workers = service.workers(view, queue, e.inbox)

    def standing(self) -> Standing:
        e = self.e
        # In an ordered lane a job that waits for its retry keeps its place; elsewhere what is scheduled has none yet.
        in_line = e.arrival is not None and (e.state != SCHEDULED or e.lane is not None)
        place, of = self._places() if in_line else (None, 0)
        exact = place is None or place <= EXACT_PLACES
        free, servers = self._servers()
        gate, until = self._gate(place, free)
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
            queue_ahead=self._queue_ahead(place, servers),
            servers=servers,
            lane_limit=self.terms.limit,
            service_seconds=service.seconds(self.view, e.queue),
        )

    # -- places --------------------------------------------------------------------------------------------------

    def _places(self) -> tuple[int, int]:
        """This job's place among the waiting jobs of its lane, and how many those are."""
        before = self._count(self._before())
        everyone = self._count(dict.fromkeys(range(3), FAR))
        return before + 1, min(everyone, EXACT_PLACES)

    def _before(self) -> dict[int, int]:
        """Up to which arrival the jobs of each class go before this one in its lane."""
        e = self.e
        assert e.arrival is not None
        if self.ordered:
            return dict.fromkeys(range(3), e.arrival)
        return dict.fromkeys(range(e.class_), FAR) | {e.class_: e.arrival}

    def _count(self, bounds: dict[int, int]) -> int:
        """Waiting jobs of the lane by class, up to an arrival in each, as far as counts are exact."""
        e, view = self.e, self.view
        total: int = 0
        for flow, class_ in view.all("flows_of_lane", e.queue, e.flow_key):
            if class_ in bounds:
                total += view.one("place_ready", flow, bounds[class_], EXACT_PLACES + 1 - min(total, EXACT_PLACES))[0]
        for class_, bound in bounds.items():
            left = EXACT_PLACES + 1 - total
            if left <= 0:
                break
            if e.lane is not None:
                # In an ordered lane every rank is 0, so the first class has counted all.
                rank = 0 if self.ordered else class_
                if self.ordered and class_ > min(bounds):
                    continue
                for name in ("place_waiting", "place_holding"):
                    total += view.one(name, e.lane, rank, bound, left)[0]
            else:
                total += view.one("place_gated", e.queue, e.lane_key, class_, bound, left)[0]
        return int(min(total, EXACT_PLACES))

    def _queue_ahead(self, place: int | None, servers: int) -> int:
        """An estimate of what starts before it, out of the lanes it shares the queue with."""
        e = self.e
        if place is None:
            return 0
        if e.kind == JobKind.TURN:
            return place - 1
        own = place - 1
        if not self.ordered and e.class_ > 0:
            own -= self._count(dict.fromkeys(range(e.class_), FAR))
        [higher] = self.view.one("pending_up_to", e.queue, e.class_ - 1)
        [waiting] = self.view.one("pending_up_to", e.queue, e.class_)
        ahead = starts_before(own, rivals(self.view, e, self.settings, own), servers, higher=higher)
        return max(own, min(int(waiting) - 1, ahead))

    # -- gates ---------------------------------------------------------------------------------------------------

    def _servers(self) -> tuple[int, int]:
        """Free slots and all slots that could run it. A turn needs none: the places of its lane serve it."""
        e = self.e
        if e.kind == JobKind.TURN:
            places = self.terms.limit or 0
            return places, places
        free = sum(service.room_of(row, e.class_) for row in self.workers)
        return free, service.servers(self.workers, self.settings, e.class_)

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
        if not self.workers:
            return (Gate.WORKER_GONE if e.inbox else Gate.NO_WORKER), None
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

    def _queue_is_full(self) -> bool:
        slots = self.settings.slots
        if slots is None:
            return False
        load = [0, 0, 0]
        for class_, count in self.view.all("queue_running", self.e.queue):
            load[class_] = count
        return slots.room(load, Priority(self.e.class_)) == 0
