"""Lines: how jobs arrive in their lane, which of them hold its places, and which start without being claimed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fairlane.model.fairness import charge
from fairlane.model.job import JobKind, JobState, Reason
from fairlane.model.lanes import LaneTerms

from . import bindings, endings
from .records import JobRecord, Records


class Place(NamedTuple):
    """A job of a limited lane."""

    priority: int
    arrival: int
    running: bool = False


def grant_order(ordered: bool, priority: int, arrival: int) -> tuple[int, int]:
    """The sort key by which a lane grants its places: by arrival alone if it is ordered, else by class first."""
    return (0, arrival) if ordered else (priority, arrival)


def granted(lane: LaneTerms, jobs: Iterable[Place]) -> list[Place]:
    """The jobs of a lane that hold a place: the running ones, then the first of the others while there is room."""
    places = list(jobs)
    if lane.limit is None:
        return places
    running = [job for job in places if job.running]
    rest = sorted(
        (job for job in places if not job.running),
        key=lambda job: grant_order(lane.ordered, job.priority, job.arrival),
    )
    return running + rest[: max(0, lane.limit - len(running))]


def arrive(records: Records, job: JobRecord, *, anew: bool = True, fresh: bool = False) -> None:
    """Let a job into the line. `anew`: at its end; `fresh`: for the first time, so that it re-opens its binding."""
    job.state = JobState.PENDING
    job.due_at = None
    job.keeps_place = job.retrying = False
    if anew or job.arrival is None:
        records.arrivals += 1
        job.arrival = records.arrivals
    if job.new.worker is not None:
        job.index = job.new.worker
    elif job.new.sticky is not None:
        bindings.seat(records, job, fresh=fresh)


def wait(records: Records, job: JobRecord, delay: float, *, keeps_arrival: bool) -> None:
    """Let a job that ran wait: in an ordered lane in its own place, elsewhere it has to arrive again.

    `keeps_arrival`: it comes back as if it had not left, ordered or not.
    """
    ordered = records.terms(job).ordered
    job.holder = None
    if delay > 0:
        job.state = JobState.SCHEDULED
        job.due_at = records.now + delay
        job.keeps_place = ordered
        job.retrying = True
    else:
        job.state = JobState.PENDING
        if not ordered and not keeps_arrival:
            records.arrivals += 1
            job.arrival = records.arrivals


def promote(records: Records, job: JobRecord) -> None:
    """Let a scheduled job arrive when it is due."""
    anew = not job.keeps_place
    if anew and job.crashed_last and job.arrival is not None:
        # In an unordered lane the rules name both the old place (for a rescue) and a new one (for a retry).
        anew = records.seen.jobs[job.id].arrival != records.last_arrival.get(job.id)
    arrive(records, job, anew=anew, fresh=not job.retrying)


def holders(records: Records, line: tuple[str, str | None], *, late_hold: bool = True) -> set[str]:
    """The ids of the jobs that hold a lane's places.

    `late_hold`: whether waiting jobs past their expiry do. They never start, and until they are cancelled a store
    may leave a place with one or pass it over.
    """
    jobs = {job.arrival: job for job in records.lane(line) if late_hold or not _late(records, job)}
    if not jobs:
        return set()
    lane = records.terms(next(iter(jobs.values())))
    places = [
        Place(job.new.priority, arrival, job.state is JobState.RUNNING)
        for arrival, job in jobs.items()
        if arrival is not None
    ]
    return {jobs[place.arrival].id for place in granted(lane, places)}


def start(records: Records, job: JobRecord, session: str, claim: int) -> None:
    """Give a job to a session."""
    job.state = JobState.RUNNING
    job.holder = session
    job.claim = claim
    job.fence += 1
    job.attempt += 1
    job.crashed_last = job.declined = False
    job.started_in = None


def price(records: Records, job: JobRecord) -> int:
    """What starting the job costs its lane."""
    return charge(job.new.cost, records.terms(job).weight)


def start_turns(records: Records) -> None:
    """Start every turn that holds a place: the step that grants it starts it."""
    turns = [j for j in records.jobs.values() if j.new.kind is JobKind.TURN and j.state is JobState.PENDING]
    for turn in sorted(turns, key=lambda job: job.arrival or 0):
        if _late(records, turn):
            if records.shown_expired(turn):
                endings.end(records, turn, JobState.CANCELLED, Reason.EXPIRED)
            continue
        must = turn.id in holders(records, turn.line)
        may = turn.id in holders(records, turn.line, late_hold=False)
        if must or (may and records.seen.jobs[turn.id].state is JobState.RUNNING):
            assert turn.new.waiter is not None
            start(records, turn, turn.new.waiter, 0)


def _late(records: Records, job: JobRecord) -> bool:
    return job.waiting and records.past_expiry(job)


def place(records: Records, job: JobRecord) -> tuple[int | None, int]:
    """A waiting job's place in its lane, counted from 1, and how many wait there."""
    ordered = records.terms(job).ordered
    waiting = [j for j in records.lane(job.line) if j.state is not JobState.RUNNING]
    if not job.in_line:
        return (None, len(waiting))
    keys = sorted(grant_order(ordered, j.new.priority, j.arrival or 0) for j in waiting)
    return (keys.index(grant_order(ordered, job.new.priority, job.arrival or 0)) + 1, len(waiting))
