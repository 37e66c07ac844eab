"""One atomic step on the store: a connection inside a transaction, the time, and the rows it has changed.

Rows of jobs are written at once, because queries look for them. A batch changes the same flows, lanes and counts many
times, so those are kept in memory and written once, by `flush`. The two hot paths that write flows directly (a claim,
and `lane_limits.grant_freed_places`) only touch flows that this step has not loaded.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import msgspec

from ...errors import TermLost
from ...model.lanes import LaneTerms
from ...model.settings import QueueSettings
from ..clock import Clock
from ..codes import COMPLETED, RUNNING
from .records import SQL, JobRecord, Queue, QueueCache, job_record_of, lease_left

SLOTLESS = 3
COUNT_OF_STATE = (1, 0, 1, 2, 4, 5, 6)
"""Which of the counts of a queue each state belongs to: scheduled, pending, running, (slotless), completed, failed,
cancelled."""

_rng = Random()


class Domain(msgspec.Struct):
    """The jobs of one (queue, class, inbox), which share a clock of the fair order."""

    id: int
    clock: int


class Flow(msgspec.Struct):
    """A lane in a domain: its finish time and, while it has claimable jobs, the tag and arrival of the next one."""

    id: int
    domain: Domain
    finish: int
    tag: int | None
    head: int | None
    dirty: bool = False


class Lane(msgspec.Struct):
    """A lane with a limit that has jobs."""

    id: int
    queue: int
    key: str
    places: int
    ordered: int
    granted: int
    stored: int
    """`granted` as stored in the file."""


class Step:
    """What a verb of the store works with."""

    def __init__(self, connection: sqlite3.Connection, queue_cache: QueueCache, clock: Clock) -> None:
        self.connection = connection
        self.queue_cache = queue_cache
        self.now = clock.now()
        self.mono = clock.monotonic()
        self.boot = clock.boot()
        self.topics: set[str] = set()
        self._fresh = False
        self._arrival: int | None = None
        self._ending: int | None = None
        self._counts: dict[tuple[int, int], list[int]] = {}
        self._domains: dict[tuple[int, int, str], Domain] = {}
        self._flows: dict[tuple[int, int, str, str], Flow] = {}
        self._flow_ids: dict[int, Flow] = {}
        self._lanes: dict[int, Lane] = {}
        self.deferred_lanes: set[int] | None = None
        """Lanes whose free places are granted later, after many jobs have left; None: grant them at once."""

    # -- statements ----------------------------------------------------------------------------------------------

    def one(self, name: str, *values: Any) -> Any:
        """Return the first row of a query, or None."""
        return self.connection.execute(SQL[name], values).fetchone()

    def all(self, name: str, *values: Any) -> list[Any]:
        """Return every row of a query."""
        return self.connection.execute(SQL[name], values).fetchall()

    def run(self, name: str, *values: Any) -> sqlite3.Cursor:
        """Execute a statement."""
        return self.connection.execute(SQL[name], values)

    def many(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute a statement for each row."""
        self.connection.executemany(SQL[name], rows)

    def draw(self) -> float:
        """Return a random number in [0, 1)."""
        return _rng.random()

    def check_term(self, term: int | None) -> None:
        """Raise `TermLost` if this term of a leader has ended."""
        if term is None:
            return
        row = self.one("leader")
        if (
            row is None
            or row[0] != term
            or row[1] is None
            or lease_left(row[4], row[3], row[2], self.mono, self.boot) <= 0
        ):
            raise TermLost(f"term {term} has ended; stop leading and stand again")

    # -- queues and lanes ----------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        """Return the queue called `name`; create it if it is new."""
        found = self.known_queue(name)
        if found is None:
            number = self.run("queue_insert", name).lastrowid
            assert number is not None
            self.many("queue_count_insert", [(number, class_) for class_ in range(3)])
            found = self.queue_cache.add((number, name, 0, msgspec.json.encode(QueueSettings()).decode(), None))
        return found

    def known_queue(self, name: str) -> Queue | None:
        """Return the queue called `name`, or None: a step that only reads must not create it."""
        if not self._fresh:
            self.queue_cache.refresh(self.connection)
            self._fresh = True
        found = self.queue_cache.names.get(name)
        if found is None:
            row = self.one("queue_by_name", name)
            found = None if row is None else self.queue_cache.add(row)
        return found

    def queue_number(self, number: int) -> Queue:
        """Return the queue with this id."""
        if not self._fresh:
            self.queue_cache.refresh(self.connection)
            self._fresh = True
        found = self.queue_cache.numbers.get(number)
        return found or self.queue_cache.add(self.one("queue_by_id", number))

    def terms(self, e: JobRecord) -> LaneTerms:
        """Return the terms of the lane of a job."""
        if e.lane_key is None:
            return self.queue_cache.terms(self.queue_number(e.queue), "")
        return self.queue_cache.terms(self.queue_number(e.queue), e.lane_key)

    def weight(self, queue: int, lane: str) -> float:
        """Return the weight of a lane."""
        return self.queue_cache.terms(self.queue_number(queue), lane).weight

    def lane(self, number: int) -> Lane:
        """Return a limited lane that exists."""
        found = self._lanes.get(number)
        if found is None:
            found = self._keep_lane(self.one("lane_by_id", number))
        return found

    def lane_for(self, queue: int, key: str, terms: LaneTerms) -> Lane:
        """Return the limited lane of a key; create it if it has no jobs yet."""
        row = self.one("lane_by_key", queue, key)
        if row is not None:
            return self._lanes.get(row[0]) or self._keep_lane(row)
        number = self.run("lane_insert", queue, key, terms.limit, int(terms.ordered)).lastrowid
        return self._keep_lane((number, queue, key, terms.limit, int(terms.ordered), 0))

    def _keep_lane(self, row: tuple[Any, ...]) -> Lane:
        number, queue, key, places, ordered, granted = row
        lane = Lane(number, queue, key, places, ordered, granted, granted)
        self._lanes[lane.id] = lane
        return lane

    def drop_lane(self, lane: Lane) -> None:
        """Delete a lane that has no jobs left."""
        self.run("lane_delete", lane.id)
        del self._lanes[lane.id]

    # -- fair order ----------------------------------------------------------------------------------------------

    def domain(self, queue: int, class_: int, inbox: str) -> Domain:
        """Return a domain; create it if it is new."""
        key = (queue, class_, inbox)
        found = self._domains.get(key)
        if found is None:
            row = self.one("domain_get", inbox, class_, queue)
            if row is None:
                row = (self.run("domain_insert", inbox, class_, queue).lastrowid, 0)
            found = self._domains[key] = Domain(*row)
        return found

    def flow(self, queue: int, class_: int, inbox: str, lane: str) -> Flow:
        """Return the flow of a lane in a domain; create it if it is new."""
        key = (queue, class_, inbox, lane)
        found = self._flows.get(key)
        if found is None:
            domain = self.domain(queue, class_, inbox)
            row = self.one("flow_get", domain.id, lane)
            if row is None:
                row = (self.run("flow_insert", domain.id, lane).lastrowid, 0, None, None)
            found = self._flow_ids.get(row[0]) or Flow(row[0], domain, *row[1:])
            self._flows[key] = self._flow_ids[found.id] = found
        return found

    def knows(self, lane: int, flow: int) -> bool:
        """Return whether this step has loaded the lane or the flow, so that the file may be behind."""
        return lane in self._lanes or flow in self._flow_ids

    def flow_number(self, number: int) -> Flow:
        """Return a flow that exists."""
        found = self._flow_ids.get(number)
        if found is None:
            flow, finish, tag, head, queue, class_, inbox = self.one("flow_by_id", number)
            found = self._flow_ids[number] = Flow(flow, self.domain(queue, class_, inbox), finish, tag, head)
        return found

    # -- jobs ----------------------------------------------------------------------------------------------------

    def next_arrival(self) -> int:
        """Return the next number in the order of admission."""
        if self._arrival is None:
            self._arrival = self.one("arrival_get")[0]
        self._arrival += 1
        return self._arrival

    def next_ending(self, code: int) -> int | None:
        """Return the next number in the order of ends for a job that ends in this state; None for a completed job."""
        if code == COMPLETED:
            return None
        if self._ending is None:
            self._ending = self.one("ending_get")[0]
        self._ending += 1
        return self._ending

    def active_job(self, seq: int) -> JobRecord | None:
        """Return an active job, or None if it is final or unknown."""
        row = self.one("record_by_seq", seq)
        return None if row is None else job_record_of(row)

    def save(self, e: JobRecord) -> None:
        """Write the changes of an active job."""
        self.run(
            "active_job_save", e.state, e.gate, e.flow, e.inbox, e.lane, e.rank, e.granted, e.granted_at, e.arrival,
            e.due, e.expires_at, e.session, e.claim, e.binding, e.fence, e.attempt, e.crashes, e.suspect, e.cancel,
            e.refused, e.paid, e.started_at, e.returns, e.seq,
        )  # fmt: skip

    def count(self, queue: int, class_: int, column: int, by: int = 1) -> None:
        """Change one of the counts of a queue."""
        row = self._counts.get((queue, class_))
        if row is None:
            row = self._counts[queue, class_] = [0] * 7
        row[column] += by

    def move(self, e: JobRecord, state: int) -> None:
        """Change the state of an active job and the counts of its queue, which include running jobs without a slot."""
        self.count(e.queue, e.class_, COUNT_OF_STATE[e.state], -1)
        self.count(e.queue, e.class_, COUNT_OF_STATE[state])
        if e.kind in ("turn", "broadcast"):
            self.count(e.queue, e.class_, SLOTLESS, int(state == RUNNING) - int(e.state == RUNNING))
        e.state = state

    def flush_counts(self) -> None:
        """Write the counts now, for a query that reads them."""
        for (queue, class_), row in self._counts.items():
            if any(row):
                self.run("queue_count_add", *row, queue, class_)
        self._counts.clear()

    # -- writing -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the changes that were kept in memory."""
        if self._arrival is not None:
            self.run("arrival_set", self._arrival)
            self._arrival = None
        if self._ending is not None:
            self.run("ending_set", self._ending)
            self._ending = None
        self.flush_counts()
        flows = [(f.finish, f.tag, f.head, f.id) for f in self._flow_ids.values() if f.dirty]
        if flows:
            self.many("flow_save", flows)
        self._flows.clear()
        self._flow_ids.clear()
        self._domains.clear()
        for lane in self._lanes.values():
            if lane.granted != lane.stored:
                self.run("lane_save", lane.granted, lane.id)
        self._lanes.clear()
