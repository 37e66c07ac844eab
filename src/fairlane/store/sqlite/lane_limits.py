"""The places of limited lanes. A job holds a grant from the step that gives it until it leaves the lane, and every
way out hands the place on in the same step (see `fairlane.model.lanes` for who comes next)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...model.job import JobKind, Priority
from ...model.session import UNKNOWN
from ..codes import PENDING, RUNNING, UNGATED
from ..positions import room_of
from ..wakeups import job_topic, place_topic, session_topic, worker_topic
from . import fair_order
from .job_record import Entry, entry_of
from .step import Lane, Step

IDLE_GRANT_SECONDS = 2.0


class Next(msgspec.Struct):
    """A job in line for a place of its lane: no more of it than giving it the place needs."""

    lane: int
    seq: int
    class_: int
    state: int
    gate: int
    inbox: str
    arrival: int
    waiter: int | None


def arrive(step: Step, e: Entry) -> None:
    """Let a pending job take its place in its lane, and in the line if it may start. The caller saves it."""
    if e.arrival is None:
        e.arrival = step.next_arrival()
    terms = step.terms(e)
    if terms.limit is None or e.lane_key is None:
        e.lane, e.granted, e.rank = None, 1, 0
        _open(step, e)
        return
    lane = step.lane_for(e.queue, e.lane_key, terms)
    e.lane, e.granted = lane.id, 0
    e.rank = 0 if lane.ordered else e.class_
    if e.kind == JobKind.TURN and e.expires_at is not None and e.expires_at < step.now:
        return  # too late to start; the sweeper cancels it
    if lane.granted < lane.places:
        lane.granted += 1
        e.granted = 1
    elif not lane.ordered and e.class_ < Priority.LOW and _take_from_weaker(step, lane, e.class_):
        e.granted = 1
    if e.granted:
        _open(step, e)


def ungate(step: Step, e: Entry) -> None:
    """The gate of a pending job has opened. The caller saves it."""
    e.gate = UNGATED
    if e.granted:
        _open(step, e)


def resume(step: Step, e: Entry) -> None:
    """A job that kept its grant is pending again. The caller saves it."""
    if e.lane is not None:
        e.rank = 0 if step.lane(e.lane).ordered else e.class_
    _open(step, e)


def _open(step: Step, e: Entry) -> None:
    if e.kind == JobKind.TURN:
        start_turn(step, e)
    elif e.gate == UNGATED:
        fair_order.enter(step, e)
    elif e.lane is not None:
        e.granted_at = step.now


def start_turn(step: Step, e: Entry) -> None:
    """Start a turn in its waiter: it is never claimed."""
    step.move(e, RUNNING)
    e.session = e.waiter
    e.fence += 1
    e.attempt += 1
    e.started_at = step.now
    row = step.one("session_id", e.waiter)
    step.topics.update((job_topic(e.id), session_topic(row[0])))
    _tell_line(step, e)


def _take_from_weaker(step: Step, lane: Lane, class_: int) -> bool:
    """In an unordered lane a job of a higher class takes the place of the weakest one that has not started."""
    row = step.one("lane_weakest", lane.id)
    if row is None:
        return False
    weakest = entry_of(row)
    if weakest.class_ <= class_:
        return False
    _ungrant(step, weakest)
    return True


def _ungrant(step: Step, e: Entry) -> None:
    fair_order.withdraw(step, e)
    e.granted, e.granted_at = 0, None
    step.save(e)


def hand_on(step: Step, lane: Lane) -> int:
    """Give the free places of a lane to the next in it; returns how many were given."""
    if step.handed_on_later is not None:
        step.handed_on_later.add(lane.id)
        return 0
    given = 0
    while lane.granted < lane.places:
        waiting = _next(step, lane)
        if waiting is None:
            break
        _grant(step, lane, waiting)
        given += 1
    if lane.granted == 0 and step.one("lane_occupied", lane.id) is None:
        step.drop_lane(lane)
    return given


def hand_on_all(step: Step, freed: Mapping[int, int]) -> None:
    """Give back so many places of each lane and hand them on, with few statements: the hot path of limited lanes.

    Nearly always one place went from one plain job to the next of its lane. Then the lane's count stays as it is, and
    nothing has to be kept but the rows to write; every other case goes the long way.
    """
    grants: list[tuple[int, float | None, int]] = []
    changed: list[tuple[int, int, int, int]] = []
    inboxes: set[tuple[int, str]] = set()
    long_way: list[int] = []
    for row in step.all("lanes_with_next", msgspec.json.encode(list(freed)).decode(), step.now):
        (number, queue, places, granted, seq, state, gate, inbox, arrival, waiter, flow, finish, tag, head, clock) = row
        if (
            flow is None
            or waiter is not None
            or state != PENDING
            or gate != UNGATED
            or places - granted + freed[number] != 1
            or step.knows(number, flow)
        ):
            long_way.append(number)
            continue
        if tag is None:
            tag = finish if finish > clock else clock
            changed.append((finish, tag, arrival, flow))
        elif arrival < head:
            changed.append((finish, tag, arrival, flow))
        grants.append((flow, step.now if inbox else None, seq))
        if freed[number] > 1:
            step.lane(number).granted -= freed[number] - 1
        inboxes.add((queue, inbox))
    step.many("active_job_grant", grants)
    step.many("flow_save", changed)
    for queue, inbox in inboxes:
        shared = not inbox or inbox.startswith(UNKNOWN)
        step.topics.add(step.queue_number(queue).topic if shared else worker_topic(inbox))
    for number in long_way:
        lane = step.lane(number)
        lane.granted -= freed[number]
        hand_on(step, lane)


def _next(step: Step, lane: Lane) -> Next | None:
    row = step.one("lane_next", lane.id, step.now)
    return None if row is None else Next(*row)


def _grant(step: Step, lane: Lane, waiting: Next) -> None:
    """Give a place to a waiting job: a turn starts, a job that nothing else holds becomes claimable."""
    lane.granted += 1
    if waiting.waiter is not None:
        turn = step.entry(waiting.seq)
        assert turn is not None
        turn.granted = 1
        start_turn(step, turn)
        step.save(turn)
        return
    step.run("active_job_grant", *_line_up(step, lane, waiting), waiting.seq)


def _line_up(step: Step, lane: Lane, waiting: Next) -> tuple[int | None, float | None]:
    """Make a granted job claimable, if it is pending and ungated: its flow, and since when it holds a place idle."""
    if waiting.state != PENDING:
        return None, None
    if waiting.gate != UNGATED:
        return None, step.now
    flow = fair_order.join(step, lane.queue, waiting.class_, waiting.inbox, lane.key, waiting.arrival)
    return flow, step.now if waiting.inbox else None


def vacate(step: Step, e: Entry) -> None:
    """A job that is gone, or whose saved row names no lane any more, gives up its place."""
    if e.lane is None:
        return
    lane = step.lane(e.lane)
    if e.granted:
        lane.granted -= 1
    e.lane, e.granted = None, 0
    _tell_line(step, e)
    hand_on(step, lane)


def _tell_line(step: Step, e: Entry) -> None:
    """Whoever waits behind this one has moved up."""
    assert e.lane_key is not None
    step.topics.add(place_topic(step.queue_number(e.queue).name, e.lane_key))


def settle(step: Step, lane: Lane) -> None:
    """After a job went back from running to waiting, or the order changed: whoever comes first has the place.

    By arrival in an ordered lane; by class in an unordered one.
    """
    while (best := _next(step, lane)) is not None:
        row = step.one("lane_weakest", lane.id)
        if row is None:
            return
        weakest = entry_of(row)
        if lane.ordered:
            assert weakest.arrival is not None
            first = best.arrival < weakest.arrival
        else:
            first = best.class_ < weakest.class_
        if not first:
            return
        _ungrant(step, weakest)
        lane.granted -= 1
        _grant(step, lane, best)


def trim(step: Step, lane: Lane) -> None:
    """A limit was lowered while jobs ran: take back unstarted grants, newest first, until it holds."""
    while lane.granted > lane.places:
        row = step.one("lane_weakest", lane.id)
        if row is None:
            return
        lane.granted -= 1
        _ungrant(step, entry_of(row))


def resize(step: Step, lane: Lane, places: int, ordered: bool) -> None:
    """Apply new terms: a lower limit takes back unstarted grants, newest first; a higher one hands out at once."""
    if ordered != bool(lane.ordered):
        lane.ordered = int(ordered)
        step.run("lane_rerank", lane.id, lane.ordered)
        if not ordered:
            _drop_kept(step, lane)
    lane.places = places
    step.run("lane_resize", places, lane.ordered, lane.id)
    trim(step, lane)
    settle(step, lane)
    hand_on(step, lane)


def _drop_kept(step: Step, lane: Lane) -> None:
    """In an unordered lane a job that waits for its retry holds no place: it comes back when it is due."""
    for e in map(entry_of, step.all("lane_kept", lane.id)):
        lane.granted -= e.granted
        e.lane, e.granted = None, 0
        step.save(e)


def abolish(step: Step, lane: Lane) -> None:
    """The lane has no limit any more: everybody in it may start."""
    # Expired jobs too: in line a claim finds and cancels them. An expired turn would be started, so it is left out.
    while (row := step.one("lane_any", lane.id, step.now)) is not None:
        _grant(step, lane, Next(*row))
    step.run("lane_forget", lane.id)
    step.run("lane_forget_running", lane.id)
    step.drop_lane(lane)


def establish(step: Step, e: Entry) -> None:
    """A lane that had no limit has one now: a pending or running job of it takes its place anew."""
    if e.state == RUNNING:
        assert e.lane_key is not None
        lane = step.lane_for(e.queue, e.lane_key, step.terms(e))
        lane.granted += 1
        e.lane, e.granted = lane.id, 1
        e.rank = 0 if lane.ordered else e.class_
    else:
        fair_order.withdraw(step, e)
        arrive(step, e)
    step.save(e)


def move_idle_grants(step: Step, limit: int) -> int:
    """Unordered lanes: a grant that waited 2 s for a worker that cannot take it goes to the next job that can run."""
    moved = 0
    for (seq,) in step.all("grants_idle", step.now - IDLE_GRANT_SECONDS, limit):
        holder = step.entry(seq)
        if holder is None or holder.lane is None or not holder.granted or _can_start(step, holder):
            continue
        lane = step.lane(holder.lane)
        able: dict[tuple[str, int], bool] = {}
        for row in step.all("lane_others", lane.id, step.now):
            candidate = Next(*row)
            place = (candidate.inbox, candidate.class_)
            if place not in able:
                able[place] = candidate.inbox != holder.inbox and _takes(step, *place)
            if able[place] and candidate.gate == UNGATED:
                _ungrant(step, holder)
                lane.granted -= 1
                _grant(step, lane, candidate)
                moved += 1
                break
    return moved


def _can_start(step: Step, e: Entry) -> bool:
    """Whether somebody could claim this job now: it is for anybody, or its worker is live with a slot to spare."""
    return e.gate == UNGATED and _takes(step, e.inbox, e.class_)


def _takes(step: Step, inbox: str, class_: int) -> bool:
    if not inbox:
        return True
    if inbox.endswith("/"):
        return False  # it waits for a worker to be bound to
    row = step.one("inbox_room", *_worker(inbox))
    return row is not None and room_of(row, class_) > 0


def _worker(inbox: str) -> tuple[str, int]:
    pool, _, index = inbox.rpartition("/")
    return pool, int(index)
