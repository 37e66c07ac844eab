"""The claim: one decision over slots, reservations, queue limits, lanes, bindings and pauses, in fair order.

It reads claimable jobs only, from the flow with the lowest tag, so its cost depends on the number of jobs claimed and
not on the backlog, the number of lanes or how many lanes are blocked.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

import msgspec

from ...errors import InvalidInput, SessionLost, Stale
from ...model.fairness import SCALE, charge
from ...model.job import Claimed, JobKind, Priority, waited
from ...model.names import HIGHEST_FACTOR, LOWEST_FACTOR, check_factor
from ...model.retry import DEFAULT_BACKOFF
from ...model.session import Claim, worker_name
from ...model.slots import Reserved, Slots
from ..codes import PENDING, RUNNING
from ..shared.claimed_jobs import checked, problem_of
from ..shared.rows import decode_backoff
from ..wakeups import place_topic
from . import endings
from .records import Queue, StoredSession, job_record_of
from .step import COUNT_OF_STATE, Domain, Step

MOST_EXPIRED_PER_CLAIM = 100
MOST_BROKEN_ROUNDS = 100
"""Limit of the times that one claim continues past damaged records."""
_PRIORITIES = tuple(Priority)
_KINDS = {kind.value: kind for kind in JobKind}


def claim(step: Step, session_id: str, call: Claim) -> list[Claimed] | None:
    """Start jobs for a worker. None: there were so many damaged records that another step must continue."""
    session = StoredSession.find(step, session_id)
    if session is None or not session.present:
        raise SessionLost("this session is unknown, ended or declared dead; register a new one")
    if call.number < session.claim:
        raise Stale(f"claim {call.number} is older than the last one, {session.claim}")
    if call.number == session.claim:
        return _claimed_again(step, session, call.number)
    if session.state != "live" or session.slots is None or session.index is None:
        return []
    for _ in range(MOST_BROKEN_ROUNDS):
        claimer = _Claimer(step, session, call)
        claimed = claimer.run()
        claimer.fail_broken()
        if claimed:
            # An empty answer need not be repeatable, and an idle worker that claims once a second must not write.
            step.run("session_claim", call.number, session.seq)
        if claimed or not claimer.broken:
            return claimed
        # Only damaged records came first: look at the jobs after them now.
    return None


class _FlowCursor(msgspec.Struct, order=True):
    """A flow in the merge, ordered by (tag, head). Arrivals are unique, so later fields are never compared."""

    tag: int
    head: int
    flow: int
    lane: str
    rows: list[tuple[Any, ...]]
    """Jobs that were read and not started, the next one last."""
    follower: int | None
    """The arrival after the last one read, if known."""
    full: bool = False
    """Whether there may be more jobs than were read."""


class _Claimer:
    """The state of one claim."""

    def __init__(self, step: Step, session: StoredSession, call: Claim) -> None:
        assert session.slots is not None
        self.step = step
        self.session = session
        self.call = call
        self.left = call.total
        self.slots = Slots(
            total=session.slots, reserved=Reserved(high=session.reserved_high, normal=session.reserved_normal)
        )
        self.running = [0, 0, 0]
        for class_, count in step.all("session_load", session.seq):
            self.running[class_] = count
        for class_, count in step.all("session_turns", session.seq):
            self.running[class_] -= count
        self.claimed: list[Claimed] = []
        self.broken: list[tuple[int, str]] = []
        """Started jobs whose records cannot be read, and why."""
        self.expired = 0
        self.bytes = 0
        """Size of the answer so far."""
        self.full = False
        """Whether the next job would exceed the size of an answer."""
        self.queue_running: dict[int, list[int]] = {}

    def run(self) -> list[Claimed]:
        for ask in self.call.asks:
            most = min(ask.most, self.left, self.slots.room(self.running, ask.priority))
            if ask.below is not None:
                most = min(most, ask.below - self.running[ask.priority])
            if most <= 0:
                continue
            if ask.queue is None:
                self._from_inbox(ask.priority, most)
            else:
                self._from_queue(ask.queue, ask.priority, most)
            if self.left <= 0 or self.full:
                break
        return self.claimed

    def fail_broken(self) -> None:
        """Fail jobs whose records are damaged. Called after all others have started: this changes lanes and flows."""
        for seq, problem in self.broken:
            endings.fail_damaged(self.step, seq, problem)
        if self.broken:
            self.step.flush()

    def _from_queue(self, name: str, priority: Priority, most: int) -> None:
        queue = self.step.known_queue(name)
        row = None if queue is None else self.step.one("domain_get", "", int(priority), queue.id)
        if queue is not None and row is not None:
            self._from_domain(queue, Domain(*row), priority, most)

    def _from_inbox(self, priority: Priority, most: int) -> None:
        """Claim from the inbox, which holds jobs of any queue: first in equal shares for each queue, then the rest.

        Declined jobs of each task that the session knows are treated like another queue in its inbox.
        """
        assert self.session.index is not None
        inbox = worker_name(self.session.pool, self.session.index)
        rows = self.step.all("domains_of_inbox", inbox, int(priority))
        rows += self.step.all("domains_of_known", self.session.seq, int(priority))
        if len(rows) > 1:
            first = self.call.number % len(rows)
            rows = rows[first:] + rows[:first]
        share = -(-most // max(1, len(rows)))
        for limit in (share, most):
            for number, queue, clock in rows:
                if most > 0 and not self.full:
                    domain = self.step.one("domain_clock", number) or (clock,)
                    most -= self._from_domain(
                        self.step.queue_number(queue), Domain(number, domain[0]), priority, min(limit, most)
                    )
            if len(rows) < 2:
                break

    def _from_domain(self, queue: Queue, domain: Domain, priority: Priority, most: int) -> int:
        """Start up to `most` jobs of one domain, in fair order; returns how many."""
        if queue.settings.paused:
            return 0
        if queue.slots is not None:
            most = min(most, queue.slots.room(self._load(queue), priority))
        started = 0
        while most > 0:
            cursors = [
                _FlowCursor(tag, row[1], flow, lane, [row], follower)
                for tag, flow, lane, follower, *row in self.step.all("flows_next", domain.id, most)
            ]
            if not cursors:
                break
            took, gone = self._merge(queue, domain, cursors, priority, most)
            started += took
            most -= took
            # Expired jobs were cancelled: look again, a limited number of times.
            if not gone or self.full or self.expired >= MOST_EXPIRED_PER_CLAIM:
                break
        return started

    def _load(self, queue: Queue) -> list[int]:
        load = self.queue_running.get(queue.id)
        if load is None:
            load = self.queue_running[queue.id] = [0, 0, 0]
            for class_, count in self.step.all("queue_running", queue.id):
                load[class_] = count
        return load

    def _merge(
        self, queue: Queue, domain: Domain, cursors: list[_FlowCursor], priority: Priority, most: int
    ) -> tuple[int, bool]:
        """Merge flows by tag: the one with the lowest tag starts its next job and is charged, which raises its tag."""
        step = self.step
        by_flow = {cursor.flow: cursor for cursor in cursors}
        fetch = max(2, -(-most // len(cursors)) + 1)
        finishes: dict[int, int] = {}
        empty: set[int] = set()
        taken: list[tuple[Any, int]] = []
        expired: list[int] = []
        clock, now, weighted = domain.clock, step.now, queue.weighted
        heapify(cursors)
        # Each expired job uses up one of the flows that were read; the remaining jobs are claimed in the next round.
        while cursors and len(taken) + len(expired) < most:
            cursor = cursors[0]
            row = cursor.rows.pop() if cursor.rows else self._read(cursor, cursor.head, fetch)
            if row[3] is not None and row[3] <= now:
                expired.append(row[0])
            elif not self._fits(row, first=not (taken or self.claimed or self.broken)):
                cursor.rows.append(row)
                break
            else:
                cost = row[7]
                if weighted:
                    paid = charge(_cost(cost), step.weight(queue.id, cursor.lane))
                else:
                    paid = SCALE if cost == 1.0 else charge(_cost(cost), 1.0)
                tag = cursor.tag
                if tag > clock:
                    clock = tag
                finishes[cursor.flow] = cursor.tag = tag + paid
                taken.append((row, paid))
            if self._advance(cursor, row[1], fetch):
                heapreplace(cursors, cursor)
            else:
                empty.add(cursor.flow)
                heappop(cursors)
        self._write(queue, domain, clock, by_flow, finishes, empty, taken, priority)
        for seq in expired:
            endings.expire(step, job_record_of(step.one("record_by_seq", seq)))
        self.expired += len(expired)
        if expired:
            step.flush()
        return len(taken), bool(expired)

    def _fits(self, row: tuple[Any, ...], *, first: bool) -> bool:
        """Return whether a job may be added to the answer; if not, the answer is full."""
        size = _size(row[11]) + _size(row[17])
        if self.bytes + size > self.call.most_bytes and not first:
            self.full = True
            return False
        self.bytes += size
        return True

    def _read(self, cursor: _FlowCursor, arrival: int, fetch: int) -> Any:
        """Read jobs of a flow, starting at an arrival; returns the first, or None."""
        rows = self.step.all("flow_jobs", cursor.flow, arrival, fetch)
        cursor.full = len(rows) == fetch
        rows.reverse()
        cursor.rows = rows
        return rows.pop() if rows else None

    def _advance(self, cursor: _FlowCursor, taken: int, fetch: int) -> bool:
        """Move a cursor past the job with arrival `taken`; False if there is no further job."""
        if cursor.rows:
            cursor.head = cursor.rows[-1][1]
        elif cursor.follower is not None:
            cursor.head, cursor.follower = cursor.follower, None
        elif cursor.full and (row := self._read(cursor, taken + 1, fetch)) is not None:
            cursor.rows.append(row)
            cursor.head = row[1]
        else:
            return False
        return True

    def _write(
        self,
        queue: Queue,
        domain: Domain,
        clock: int,
        cursors: dict[int, _FlowCursor],
        finishes: dict[int, int],
        empty: set[int],
        taken: Sequence[tuple[Any, int]],
        priority: Priority,
    ) -> None:
        step, number, now, seq = self.step, self.call.number, self.step.now, self.session.seq
        starts: dict[int, list[int]] = {}
        known: list[tuple[str, int]] = []
        lane_topic = place_topic(queue.name, "")
        for row, paid in taken:
            starts.setdefault(paid, []).append(row[0])
            try:
                self.claimed.append(_claimed(row, row[4] + 1, queue.name, priority, now))
            except Exception as exc:
                self.broken.append((row[0], problem_of(exc)))
                continue
            known.append((row[8], row[0]))
            step.topics.add("job:" + row[8])
            if row[18]:
                step.topics.add(lane_topic + row[10])
        for paid, seqs in starts.items():
            step.run("active_job_start", seq, number, now, paid, msgspec.json.encode(seqs).decode())
        step.queue_cache.add_seqs(known)
        step.many(
            "flow_started",
            [
                (finish, None, None, flow) if flow in empty else (finish, cursors[flow].tag, cursors[flow].head, flow)
                for flow, finish in finishes.items()
            ],
        )
        if clock > domain.clock:
            domain.clock = clock
            step.run("domain_save", clock, domain.id)
        count = len(taken)
        self.left -= count
        self.running[priority] += count
        if queue.id in self.queue_running:
            self.queue_running[queue.id][priority] += count
        step.count(queue.id, priority, COUNT_OF_STATE[PENDING], -count)
        step.count(queue.id, priority, COUNT_OF_STATE[RUNNING], count)


def _size(value: object) -> int:
    return len(value) if isinstance(value, bytes | str) else 0


def _cost(cost: object) -> float:
    """Return what a start costs; 1 if the record is damaged."""
    return cost if isinstance(cost, float) and LOWEST_FACTOR <= cost <= HIGHEST_FACTOR else 1.0


def _claimed(row: tuple[Any, ...], fence: int, queue: str, priority: Priority, now: float | None = None) -> Claimed:
    """Return the claimed job of a row; `now`: its start, if it starts now. Raises if its record is damaged."""
    (
        _, _, _, _, _, attempt, suspect, cost, id, task, lane, payload, retries, backoff, timeout, kind, sticky,
        headers, limited, started_at, *since,
    ) = row  # fmt: skip
    if id is None:
        raise InvalidInput("id", "the identity of the job is missing")
    if cost != 1.0:
        check_factor("cost", cost)
    return checked(
        Claimed(
            id=id,
            fence=fence,
            attempt=attempt + 1,
            task=task,
            queue=queue,
            lane=lane,
            priority=priority,
            payload=payload,
            retries=retries,
            backoff=DEFAULT_BACKOFF if backoff is None else decode_backoff(backoff),
            timeout=timeout,
            kind=_KINDS[kind],
            sticky=sticky,
            suspect=bool(suspect),
            limited=bool(limited),
            headers=headers,
            waited=waited(fence, now or started_at, *since),
        )
    )


def _claimed_again(step: Step, session: StoredSession, number: int) -> list[Claimed]:
    """Return the jobs of a claim again, for a session that did not receive the answer."""
    found = []
    for queue, class_, *row in step.all("claimed_again", session.seq, number):
        # `_claimed` expects the attempt as it was before the claim.
        row[5] -= 1
        try:
            found.append(_claimed(tuple(row), row[4], queue, _PRIORITIES[class_]))
        except Exception as exc:
            endings.fail_damaged(step, row[0], problem_of(exc))
    return found
