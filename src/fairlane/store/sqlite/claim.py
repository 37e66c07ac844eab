"""The claim: one decision over slots, reservations, queue limit, lanes, bindings and pauses, in fair order.

Only claimable jobs are looked at, through the flow whose tag is lowest, so the cost depends on what is claimed: not
on the backlog, not on the number of lanes, not on how many of them are blocked.
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
from . import damage, endings
from .job_record import entry_of
from .queue_cache import Queue
from .sessions import Presence
from .step import TALLY_OF_STATE, Domain, Step

MOST_EXPIRED_PER_CLAIM = 100
MOST_BROKEN_ROUNDS = 100
"""How often one claim looks for what stands behind damaged records."""
_PRIORITIES = tuple(Priority)
_KINDS = {kind.value: kind for kind in JobKind}


def claim(step: Step, session: str, call: Claim) -> list[Claimed] | None:
    """Start jobs for a worker, ask by ask. None: so many damaged records came first that another step must go on."""
    who = Presence.find(step, session)
    if who is None or not who.present:
        raise SessionLost("this session is unknown, ended or declared dead; register a new one")
    if call.number < who.claim:
        raise Stale(f"claim {call.number} is older than the last one, {who.claim}")
    if call.number == who.claim:
        return _claimed_again(step, who, call.number)
    if who.state != "live" or who.slots is None or who.index is None:
        return []
    for _ in range(MOST_BROKEN_ROUNDS):
        claimer = _Claimer(step, who, call)
        claimed = claimer.run()
        claimer.fail_broken()
        if claimed:
            # Only then: an idle worker asks once a second, and nothing is lost when an empty answer is not repeated.
            step.run("session_claim", call.number, who.seq)
        if claimed or not claimer.broken:
            return claimed
        # Nothing but damaged records came first. What stands behind them is looked for at once.
    return None


class _Line(msgspec.Struct, order=True):
    """A flow in the merge: lowest (tag, head) first. Arrivals are unique, so nothing behind them is ever compared."""

    tag: int
    head: int
    flow: int
    lane: str
    rows: list[tuple[Any, ...]]
    """Jobs that were read and not taken, the next one last."""
    follower: int | None
    """The arrival after the last one read, where it is known."""
    full: bool = False
    """Whether there may be more than was read."""


class _Claimer:
    """The state of one claim while it goes through its asks."""

    def __init__(self, step: Step, who: Presence, call: Claim) -> None:
        assert who.slots is not None
        self.step = step
        self.who = who
        self.call = call
        self.left = call.total
        self.slots = Slots(total=who.slots, reserved=Reserved(high=who.reserved_high, normal=who.reserved_normal))
        self.running = [0, 0, 0]
        for class_, count in step.all("session_load", who.seq):
            self.running[class_] = count
        for class_, count in step.all("session_turns", who.seq):
            self.running[class_] -= count
        self.claimed: list[Claimed] = []
        self.broken: list[tuple[int, str]] = []
        """Jobs that have started although their records cannot be read, and why not."""
        self.expired = 0
        self.bytes = 0
        """What the answer carries so far."""
        self.full = False
        """Whether the next job would be too much for the answer."""
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
        """End the jobs of damaged records. Only after everything has started: this changes lanes and flows."""
        for seq, problem in self.broken:
            damage.fail(self.step, seq, problem)
        if self.broken:
            self.step.flush()

    def _from_queue(self, name: str, priority: Priority, most: int) -> None:
        queue = self.step.known_queue(name)
        row = None if queue is None else self.step.one("domain_get", "", int(priority), queue.id)
        if queue is not None and row is not None:
            self._from_domain(queue, Domain(*row), priority, most)

    def _from_inbox(self, priority: Priority, most: int) -> None:
        """The inbox holds jobs of any queue: the queues take turns, in equal shares and then for the rest.

        So do declined jobs of tasks that the session knows, as if each of those tasks were a queue in its inbox.
        """
        assert self.who.index is not None
        inbox = worker_name(self.who.pool, self.who.index)
        rows = self.step.all("domains_of_inbox", inbox, int(priority))
        rows += self.step.all("domains_of_known", self.who.seq, int(priority))
        if len(rows) > 1:
            turn = self.call.number % len(rows)
            rows = rows[turn:] + rows[:turn]
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
            lines = [
                _Line(tag, row[1], flow, lane, [row], follower)
                for tag, flow, lane, follower, *row in self.step.all("flows_next", domain.id, most)
            ]
            if not lines:
                break
            took, gone = self._from_lines(queue, domain, lines, priority, most)
            started += took
            most -= took
            # Expired jobs in the way were cancelled: look again, but not without end.
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

    def _from_lines(
        self, queue: Queue, domain: Domain, lines: list[_Line], priority: Priority, most: int
    ) -> tuple[int, bool]:
        """Merge flows by tag: the lowest starts its next job, pays, and goes back into line with a higher tag."""
        step = self.step
        ahead = {line.flow: line for line in lines}
        fetch = max(2, -(-most // len(lines)) + 1)
        finishes: dict[int, int] = {}
        empty: set[int] = set()
        taken: list[tuple[Any, int]] = []
        expired: list[int] = []
        clock, now, weighted = domain.clock, step.now, queue.weighted
        heapify(lines)
        # Each expired job in the way uses up one of the flows that were read, so the rest is for the next round.
        while lines and len(taken) + len(expired) < most:
            line = lines[0]
            row = line.rows.pop() if line.rows else self._read(line, line.head, fetch)
            if row[3] is not None and row[3] <= now:
                expired.append(row[0])
            elif not self._fits(row, first=not (taken or self.claimed or self.broken)):
                line.rows.append(row)
                break
            else:
                cost = row[7]
                if weighted:
                    paid = charge(_cost(cost), step.weight(queue.id, line.lane))
                else:
                    paid = SCALE if cost == 1.0 else charge(_cost(cost), 1.0)
                tag = line.tag
                if tag > clock:
                    clock = tag
                finishes[line.flow] = line.tag = tag + paid
                taken.append((row, paid))
            if self._advance(line, row[1], fetch):
                heapreplace(lines, line)
            else:
                empty.add(line.flow)
                heappop(lines)
        self._write(queue, domain, clock, ahead, finishes, empty, taken, priority)
        for seq in expired:
            endings.expire(step, entry_of(step.one("record_by_seq", seq)))
        self.expired += len(expired)
        if expired:
            step.flush()
        return len(taken), bool(expired)

    def _fits(self, row: tuple[Any, ...], *, first: bool) -> bool:
        """Whether a job may be added to the answer, which is full if not."""
        size = _size(row[11]) + _size(row[17])
        if self.bytes + size > self.call.most_bytes and not first:
            self.full = True
            return False
        self.bytes += size
        return True

    def _read(self, line: _Line, arrival: int, fetch: int) -> Any:
        """Read jobs of a flow from an arrival on; returns the first, or None."""
        rows = self.step.all("flow_jobs", line.flow, arrival, fetch)
        line.full = len(rows) == fetch
        rows.reverse()
        line.rows = rows
        return rows.pop() if rows else None

    def _advance(self, line: _Line, taken: int, fetch: int) -> bool:
        """Make the job after the one with arrival `taken` the head of its flow; False when there is none."""
        if line.rows:
            line.head = line.rows[-1][1]
        elif line.follower is not None:
            line.head, line.follower = line.follower, None
        elif line.full and (row := self._read(line, taken + 1, fetch)) is not None:
            line.rows.append(row)
            line.head = row[1]
        else:
            return False
        return True

    def _write(
        self,
        queue: Queue,
        domain: Domain,
        clock: int,
        lines: dict[int, _Line],
        finishes: dict[int, int],
        empty: set[int],
        taken: Sequence[tuple[Any, int]],
        priority: Priority,
    ) -> None:
        step, number, now, seq = self.step, self.call.number, self.step.now, self.who.seq
        starts: dict[int, list[int]] = {}
        known: list[tuple[str, int]] = []
        line = place_topic(queue.name, "")
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
                step.topics.add(line + row[10])
        for paid, seqs in starts.items():
            step.run("active_job_start", seq, number, now, paid, msgspec.json.encode(seqs).decode())
        step.catalog.remember_seqs(known)
        step.many(
            "flow_started",
            [
                (finish, None, None, flow) if flow in empty else (finish, lines[flow].tag, lines[flow].head, flow)
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
        step.count(queue.id, priority, TALLY_OF_STATE[PENDING], -count)
        step.count(queue.id, priority, TALLY_OF_STATE[RUNNING], count)


def _size(value: object) -> int:
    return len(value) if isinstance(value, bytes | str) else 0


def _cost(cost: object) -> float:
    """What a start costs; that of a damaged record is 1."""
    return cost if isinstance(cost, float) and LOWEST_FACTOR <= cost <= HIGHEST_FACTOR else 1.0


def _claimed(row: tuple[Any, ...], fence: int, queue: str, priority: Priority, now: float | None = None) -> Claimed:
    """A job out of a row; `now`: when it starts, if not before. Raises what is wrong with its record."""
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


def _claimed_again(step: Step, who: Presence, number: int) -> list[Claimed]:
    """Jobs that were claimed before, for who has lost the answer."""
    found = []
    for queue, class_, *row in step.all("claimed_again", who.seq, number):
        # The row stands after the claim; `_claimed` counts from before it.
        row[5] -= 1
        try:
            found.append(_claimed(tuple(row), row[4], queue, _PRIORITIES[class_]))
        except Exception as exc:
            damage.fail(step, row[0], problem_of(exc))
    return found
