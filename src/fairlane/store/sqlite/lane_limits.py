"""The places of limited lanes.

A job that was granted a place holds it until it leaves the lane, and the step in which it leaves grants the place to
the next job (see `fairlane.model.lanes` for the order).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...model.job import JobKind, Priority
from ...model.session import UNKNOWN
from ..codes import PENDING, RUNNING, UNGATED
from ..positions import room_of
from ..wakeups import job_topic, place_topic, session_topic, worker_topic
from . import fair_order
from .records import JobRecord, job_record_of
from .step import Lane, Step

IDLE_GRANT_SECONDS = 2.0


class LaneCandidate(msgspec.Struct):
    """A job in line for a place of its lane, with what is needed to grant it the place."""

    lane: int
    seq: int
    class_: int
    state: int
    gate: int
    inbox: str
    arrival: int
    waiter: int | None


def arrive(step: Step, e: JobRecord) -> None:
    """Add a pending job to its lane, and make it claimable if it gets a place. The caller saves it."""
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
        return  # too late to start; `promote` cancels it
    if lane.granted < lane.places:
        lane.granted += 1
        e.granted = 1
    elif not lane.ordered and e.class_ < Priority.LOW and _take_from_weaker(step, lane, e.class_):
        e.granted = 1
    if e.granted:
        _open(step, e)


def ungate(step: Step, e: JobRecord) -> None:
    """Open the gate of a pending job. The caller saves it."""
    e.gate = UNGATED
    if e.granted:
        _open(step, e)


def resume(step: Step, e: JobRecord) -> None:
    """Make a job claimable again that kept its place. The caller saves it."""
    if e.lane is not None:
        e.rank = 0 if step.lane(e.lane).ordered else e.class_
    _open(step, e)


def _open(step: Step, e: JobRecord) -> None:
    if e.kind == JobKind.TURN:
        start_turn(step, e)
    elif e.gate == UNGATED:
        fair_order.enter(step, e)
    elif e.lane is not None:
        e.granted_at = step.now


def start_turn(step: Step, e: JobRecord) -> None:
    """Start a turn in the session that waits for it: turns are never claimed."""
    step.move(e, RUNNING)
    e.session = e.waiter
    e.fence += 1
    e.attempt += 1
    e.started_at = step.now
    row = step.one("session_id", e.waiter)
    step.topics.update((job_topic(e.id), session_topic(row[0])))
    _notify_lane(step, e)


def _take_from_weaker(step: Step, lane: Lane, class_: int) -> bool:
    """Take the place of the last job that has not started, if its class is lower. For unordered lanes."""
    row = step.one("lane_weakest", lane.id, 1)
    if row is None:
        return False
    weakest = job_record_of(row)
    if weakest.class_ <= class_:
        return False
    _ungrant(step, weakest)
    return True


def _ungrant(step: Step, e: JobRecord) -> None:
    fair_order.withdraw(step, e)
    e.granted, e.granted_at = 0, None
    step.save(e)


def grant_free_places(step: Step, lane: Lane) -> int:
    """Grant the free places of a lane to the next jobs; returns how many were granted."""
    if step.deferred_lanes is not None:
        step.deferred_lanes.add(lane.id)
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


def grant_freed_places(step: Step, freed: Mapping[int, int]) -> None:
    """Free a number of places of each lane and grant them again, with few statements: the hot path of limited lanes.

    Nearly always one place passes from one plain job to the next. Then the number of granted places does not change,
    and the rows can be written directly; all other cases take the general path.
    """
    grants: list[tuple[int, float | None, int]] = []
    changed: list[tuple[int, int, int, int]] = []
    inboxes: set[tuple[int, str]] = set()
    general: list[int] = []
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
            general.append(number)
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
    for number in general:
        lane = step.lane(number)
        lane.granted -= freed[number]
        grant_free_places(step, lane)


def _next(step: Step, lane: Lane) -> LaneCandidate | None:
    row = step.one("lane_next", lane.id, step.now)
    return None if row is None else LaneCandidate(*row)


def _grant(step: Step, lane: Lane, waiting: LaneCandidate) -> None:
    """Grant a place to a waiting job: a turn starts, an ungated pending job becomes claimable."""
    lane.granted += 1
    if waiting.waiter is not None:
        turn = step.active_job(waiting.seq)
        assert turn is not None
        turn.granted = 1
        start_turn(step, turn)
        step.save(turn)
        return
    step.run("active_job_grant", *_make_claimable(step, lane, waiting), waiting.seq)


def _make_claimable(step: Step, lane: Lane, waiting: LaneCandidate) -> tuple[int | None, float | None]:
    """Make a granted job claimable if it is pending and ungated.

    Returns its flow, and since when it holds a place that not every worker could use.
    """
    if waiting.state != PENDING:
        return None, None
    if waiting.gate != UNGATED:
        return None, step.now
    flow = fair_order.join(step, lane.queue, waiting.class_, waiting.inbox, lane.key, waiting.arrival)
    return flow, step.now if waiting.inbox else None


def leave_lane(step: Step, e: JobRecord) -> None:
    """Free the place of a job that has ended, or whose saved row no longer names a lane."""
    if e.lane is None:
        return
    lane = step.lane(e.lane)
    if e.granted:
        lane.granted -= 1
    e.lane, e.granted = None, 0
    _notify_lane(step, e)
    grant_free_places(step, lane)


def _notify_lane(step: Step, e: JobRecord) -> None:
    """Notify the jobs of a lane that their places in line have changed."""
    assert e.lane_key is not None
    step.topics.add(place_topic(step.queue_number(e.queue).name, e.lane_key))


def reassign_places(step: Step, lane: Lane) -> None:
    """Move unstarted grants to jobs that come first, after a job was put back or the order has changed.

    The order is by arrival in an ordered lane, and by class in an unordered one.
    """
    while (best := _next(step, lane)) is not None:
        row = step.one("lane_weakest", lane.id, 1)
        if row is None:
            return
        weakest = job_record_of(row)
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
    """Revoke unstarted grants over the limit, newest first."""
    # Read once: each read sorts all jobs that hold a place.
    for row in step.all("lane_weakest", lane.id, max(0, lane.granted - lane.places)):
        lane.granted -= 1
        _ungrant(step, job_record_of(row))


def resize(step: Step, lane: Lane, places: int, ordered: bool) -> None:
    """Apply new terms: a lower limit revokes unstarted grants, newest first; a higher one grants places at once."""
    if ordered != bool(lane.ordered):
        lane.ordered = int(ordered)
        step.run("lane_rerank", lane.id, lane.ordered)
        if not ordered:
            _drop_kept(step, lane)
    lane.places = places
    step.run("lane_resize", places, lane.ordered, lane.id)
    trim(step, lane)
    reassign_places(step, lane)
    grant_free_places(step, lane)


def _drop_kept(step: Step, lane: Lane) -> None:
    """Free the places of jobs that wait for a retry: in an unordered lane they hold none and arrive again when due."""
    for e in map(job_record_of, step.all("lane_kept", lane.id)):
        lane.granted -= e.granted
        e.lane, e.granted = None, 0
        step.save(e)


def remove_limit(step: Step, lane: Lane) -> None:
    """Remove the limit of a lane: all its jobs may start."""
    # Expired jobs too: a claim cancels them. Expired turns are left out, because a grant would start them.
    while (row := step.one("lane_any", lane.id, step.now)) is not None:
        _grant(step, lane, LaneCandidate(*row))
    step.run("lane_forget", lane.id)
    step.run("lane_forget_running", lane.id)
    step.drop_lane(lane)


def add_limit(step: Step, e: JobRecord) -> None:
    """Give a pending or running job of a lane that now has a limit its place."""
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
    """Move grants of unordered lanes that waited 2 s for a worker without a free slot to the next job that can run."""
    moved = 0
    for seq in _idle_grants(step, limit):
        holder = step.active_job(seq)
        if holder is None or holder.lane is None or not holder.granted or _can_start(step, holder):
            continue
        lane = step.lane(holder.lane)
        able: dict[tuple[str, int], bool] = {}
        for row in step.all("lane_others", lane.id, step.now):
            candidate = LaneCandidate(*row)
            target = (candidate.inbox, candidate.class_)
            if target not in able:
                able[target] = candidate.inbox != holder.inbox and _has_room(step, *target)
            if able[target] and candidate.gate == UNGATED:
                _ungrant(step, holder)
                lane.granted -= 1
                _grant(step, lane, candidate)
                moved += 1
                break
    return moved


def _idle_grants(step: Step, limit: int) -> list[int]:
    """Return jobs that hold a place without starting. Of more than `limit`, one page at random: no job may be left out
    for ever because those before it cannot give their places away.
    """
    since = step.now - IDLE_GRANT_SECONDS
    rows = step.all("grants_idle", since, limit, 0)
    if len(rows) == limit:
        page = int(step.draw() * -(-step.one("grants_idle_count", since)[0] // limit))
        rows = rows if page == 0 else step.all("grants_idle", since, limit, page * limit)
    return [seq for (seq,) in rows]


def _can_start(step: Step, e: JobRecord) -> bool:
    """Return whether a worker could claim this job now: any worker, or its own if that is live and has a free slot."""
    return e.gate == UNGATED and _has_room(step, e.inbox, e.class_)


def _has_room(step: Step, inbox: str, class_: int) -> bool:
    if not inbox:
        return True
    if inbox.endswith("/"):
        return False  # unbound: its pool has no worker
    row = step.one("inbox_room", *_worker(inbox))
    return row is not None and room_of(row, class_) > 0


def _worker(inbox: str) -> tuple[str, int]:
    pool, _, index = inbox.rpartition("/")
    return pool, int(index)
