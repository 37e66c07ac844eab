"""How jobs come in: storing them, finding duplicates, refusing what is too much, and admitting them when they are
due."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from ...errors import Conflict, InvalidInput, QueueFull
from ...model.job import MOST_JOBS_PER_CALL, Enqueued, JobKind, JobState, NewJob, Priority
from ...model.lanes import LaneTerms
from ...model.maintenance import Admitted, Promoted
from ...model.reading import room_after
from ...model.session import worker_name
from ..codes import CLEANUP, COMPLETED, PARENT, PENDING, RUNNING, SCHEDULED, STATES, UNGATED
from ..positions import servers
from ..shared.rows import encode_backoff
from . import bindings, broadcasts, damage, endings, lane_limits, service_times
from .job_record import Entry, entry_of
from .queue_cache import Queue, json_texts
from .step import SLOTLESS, TALLY_OF_STATE, Step

MOST_LANES_COUNTED = 1_000


def enqueue(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Store jobs and admit those that are due, all or none."""
    if len(jobs) > MOST_JOBS_PER_CALL:
        raise InvalidInput("jobs", f"{len(jobs)} are more than {MOST_JOBS_PER_CALL} in one call; send them in parts")
    known = _known(step, [job.id for job in jobs])
    stored: set[str] = set()
    answers = []
    for job in jobs:
        if job.kind is JobKind.CLEANUP:
            raise InvalidInput("kind", "a clean-up is stored by release, not by enqueue")
        if job.id in stored:
            known |= _known(step, [job.id])
        existing = _existing(job, known)
        if existing is not None:
            answers.append(existing)
            continue
        duplicate = None if job.unique is None else _unique_holder(step, job)
        if duplicate is not None:
            if job.cron is not None:
                step.run("schedule_fired", job.cron.slot, job.cron.schedule)
            answers.append(duplicate)
            continue
        entry = store(step, job)
        answers.append(Enqueued(job.id, True, STATES[entry.state]))
        stored.add(job.id)
    return answers


def _existing(job: NewJob, known: dict[str, tuple[JobState, bytes]]) -> Enqueued | None:
    """The answer for an id that is taken, which must be by the same content."""
    content = known.get(job.id)
    if content is None:
        return None
    if content[1] != fingerprint(job):
        raise Conflict(f"job {job.id!r} exists already with other content; choose another id")
    return Enqueued(job.id, False, content[0])


def _known(step: Step, ids: list[str]) -> dict[str, tuple[JobState, bytes]]:
    """Ids that are taken, with the state and the content they stand for."""
    wanted = json_texts(ids)
    known = {}
    for id, final, state, *content in step.all("jobs_known", wanted):
        known[id] = (STATES[state if final is None else final], fingerprint_of(content))
    for id, mark, state in step.all("reserved_ids", wanted, step.now):
        known[id] = (STATES[state], mark)
    return known


def fingerprint(job: NewJob) -> bytes:
    """What makes two requests the same. Headers are not part of it: a repeated request has another trace."""
    return fingerprint_of(
        (
            job.task, job.queue, job.kind.value, int(job.priority), job.lane, float(job.cost), job.payload, job.retries,
            encode_backoff(job.backoff), job.timeout, job.unique, job.pool, job.sticky, job.worker, job.retry_of,
            job.delay or None, job.run_at, job.expires,
        )
    )  # fmt: skip


def fingerprint_of(content: Sequence[Any]) -> bytes:
    """The same from the columns of a stored job."""
    numbers = [float(value) if isinstance(value, float | int) else value for value in content]
    return blake2b(msgspec.msgpack.encode(numbers), digest_size=16).digest()


def _unique_holder(step: Step, job: NewJob) -> Enqueued | None:
    row = step.one("unique_get", job.task, job.unique)
    if row is None:
        return None
    id, final, state, until = row
    if final is not None and (until is None or until <= step.now):
        return None
    if final is None and state is None:
        return None  # its holder is neither live nor final: the record is lost
    return Enqueued(id, False, STATES[state if final is None else final])


def store(step: Step, job: NewJob, *, parent: Entry | None = None, tie: bindings.Tie | None = None) -> Entry:
    """Store one new job and admit it if it is due. `parent`: it is a copy of a broadcast; `tie`: it is its clean-up."""
    queue = step.queue(job.queue)
    terms = step.catalog.terms(queue, job.lane or "")
    # Copies and clean-ups belong to work that was accepted already: no limit may stop a worker from joining.
    waiter = _check(step, queue, job, terms) if parent is None and tie is None else None
    entry = insert(step, queue, job, waiter, parent)
    if job.unique is not None:
        until = None if job.unique_for is None else step.now + job.unique_for
        step.run("unique_put", job.task, job.unique, entry.seq, job.id, until)
    if job.cron is not None:
        step.run("schedule_fired", job.cron.slot, job.cron.schedule)
    if tie is not None:
        entry.binding, entry.inbox, entry.gate = tie.seq, worker_name(tie.pool, tie.index), CLEANUP
    if job.kind is JobKind.BROADCAST:
        entry.state, entry.gate = RUNNING, PARENT
        entry.started_at = step.now
        entry.due = step.now + job.ttl if job.ttl > 0 else None
        step.count(entry.queue, entry.class_, SLOTLESS)
    step.count(entry.queue, entry.class_, TALLY_OF_STATE[entry.state])
    if entry.state == PENDING:
        if tie is not None:
            lane_limits.arrive(step, entry)
        else:
            endings.admit(step, entry)
    _insert_live(step, entry)
    if job.kind is JobKind.BROADCAST:
        broadcasts.begin(step, entry, job.ttl, add_child, endings.end)
        if step.entry(entry.seq) is None:
            entry.state = COMPLETED  # there was nobody to send it to
    return entry


def insert(step: Step, queue: Queue, job: NewJob, waiter: int | None, parent: Entry | None) -> Entry:
    """Write the identity of a job; its live row is for the caller."""
    expires_at = None if job.expires is None else step.now + job.expires
    backoff = encode_backoff(job.backoff)
    cursor = step.run("job_insert", *_identity(job, queue.id, step.now, None if parent is None else parent.seq))
    seq = cursor.lastrowid
    assert seq is not None
    due = job.run_at if job.run_at is not None else step.now + job.delay
    later = due > step.now
    return Entry(
        seq, queue.id, int(job.priority), SCHEDULED if later else PENDING, 0, None, "", None, 0, 0, None, None,
        due if later else None, expires_at, None, None, waiter, None, 0, 0, 0, 0, 0, 0, 0, None, job.id, job.kind.value,
        job.lane, job.cost, job.pool, job.sticky, job.worker, job.retries, backoff, job.unique, job.task,
        None if parent is None else parent.seq, None,
    )  # fmt: skip


def _identity(job: NewJob, queue: int, now: float, parent: int | None) -> tuple[Any, ...]:
    return (
        job.id, job.task, queue, job.kind.value, int(job.priority), job.lane, float(job.cost), job.payload, job.headers,
        job.retries, encode_backoff(job.backoff), job.timeout, job.unique, job.pool, job.sticky, job.worker, parent,
        job.retry_of, now, job.delay or None, job.run_at, job.expires,
    )  # fmt: skip


def _insert_live(step: Step, e: Entry) -> None:
    step.run(
        "active_job_insert", e.seq, e.queue, e.class_, e.state, e.gate, e.flow, e.inbox, e.lane, e.rank, e.granted,
        e.granted_at, e.arrival, e.due, e.expires_at, e.session, e.waiter, e.binding, e.fence, e.attempt,
        e.started_at, _plain(e),
    )  # fmt: skip


def _plain(e: Entry) -> bool:
    """Whether its end concerns nobody but its lane, so that `finish` can write it with others at once."""
    return e.kind == JobKind.JOB and e.sticky is None and e.uniq is None and e.parent is None


def _check(step: Step, queue: Queue, job: NewJob, terms: LaneTerms) -> int | None:
    """Refuse what the queue does not take. Returns the number of a turn's waiter."""
    settings = queue.settings
    _check_lane(queue, job)
    if settings.max_pending is not None or terms.max_pending is not None:
        _check_room(step, queue, job, terms)
    if job.kind is not JobKind.TURN:
        return None
    if terms.limit is None and not terms.paused:
        raise InvalidInput(
            "lane",
            f"a turn needs a lane with a limit; set one with app.queue({queue.name!r}).lane({job.lane!r}, limit=1)",
        )
    row = step.one("session_by_id", job.waiter)
    if row is None or row[3] not in ("live", "stopping"):
        raise InvalidInput("waiter", "the session that waits is not live; register it first")
    return int(row[0])


def _check_lane(queue: Queue, job: NewJob) -> None:
    if not queue.settings.admits(job.lane):
        raise InvalidInput("lane", f"{job.lane!r} is not one of the lanes of queue {queue.name!r}")


def _check_room(step: Step, queue: Queue, job: NewJob, terms: LaneTerms) -> None:
    most = queue.settings.max_pending
    if most is not None:
        step.flush_tally()
        [waiting] = step.one("queue_load", queue.id)
        if waiting >= most:
            raise QueueFull(
                f"queue {queue.name!r} has {waiting} jobs waiting and takes at most {most}",
                room_after(service_times.seconds(step, queue.id), _servers(step, queue, job)),
            )
    if terms.max_pending is not None:
        [waiting] = step.one("lane_load", queue.id, job.lane, terms.max_pending)
        if waiting >= terms.max_pending:
            raise QueueFull(
                f"lane {job.lane!r} of queue {queue.name!r} has {waiting} jobs waiting and takes at most "
                f"{terms.max_pending}",
                room_after(service_times.seconds(step, queue.id), _share(step, queue, job), limit=terms.limit),
            )


def _servers(step: Step, queue: Queue, job: NewJob) -> int:
    """Slots that could start a job like this one now."""
    if queue.settings.paused:
        return 0
    return servers(service_times.workers(step, queue.name), queue.settings, int(job.priority))


def _share(step: Step, queue: Queue, job: NewJob) -> float:
    """A lane's part of them: the lanes that have work share the slots."""
    lanes: int = step.one("flows_active", "", int(job.priority), queue.id, MOST_LANES_COUNTED)[0]
    return _servers(step, queue, job) / max(1, lanes)


def add_child(step: Step, parent: Entry, index: int) -> None:
    """One copy of a broadcast, for one worker."""
    payload, headers, timeout = step.one("job_body", parent.seq)
    remaining = None if parent.expires_at is None else max(0.0, parent.expires_at - step.now)
    copy = NewJob(
        id=parent.id,
        task=parent.task,
        queue=step.queue_number(parent.queue).name,
        payload=payload,
        priority=Priority(parent.class_),
        cost=parent.cost,
        expires=remaining,
        retries=parent.retries,
        backoff=parent.backoff,
        timeout=timeout,
        pool=parent.pool,
        worker=index,
        headers=headers,
    )
    # The length of an id is a rule for users; a copy's is its parent's with the index behind it.
    msgspec.structs.force_setattr(copy, "id", broadcasts.child_id(parent.id, index))
    store(step, copy, parent=parent)


def release(step: Step, pool: str, key: str, cleanup: NewJob | None) -> str:
    """Begin to release a key; a clean-up that is known already is not stored again."""
    if cleanup is None:
        return bindings.release(step, pool, key, None)
    if cleanup.kind is not JobKind.CLEANUP:
        raise InvalidInput("cleanup", "give a job of kind 'cleanup'")
    if _known(step, [cleanup.id]):
        # Repeated: the answer is where the release stands now.
        row = step.one("binding_open", pool, key)
        if row is not None and row[4] == "open":
            raise Conflict(f"clean-up {cleanup.id!r} was cancelled when the key was used again; give a new id")
        return "nothing" if row is None else "draining"
    job = msgspec.structs.replace(cleanup, pool=pool)
    # Users leave the placing of a clean-up to its binding; here it is placed.
    msgspec.structs.force_setattr(job, "sticky", key)
    return bindings.release(step, pool, key, lambda tie: store(step, job, tie=tie).seq)


def promote(step: Step, limit: int) -> Promoted:
    """Cancel what has expired, then let due jobs arrive: by class, then due time, then id."""
    expired = [seq for (seq,) in step.all("seqs_expired", step.now, limit)]
    # One by one, each place would be looked for behind all others that have expired.
    step.handed_on_later = set()
    for seq in expired:
        # Read one by one: the end of one job can let another into line (a clean-up, a job behind it).
        e = step.entry(seq)
        if e is not None and e.state != RUNNING:
            endings.expire(step, e)
    lanes, step.handed_on_later = step.handed_on_later, None
    for lane in sorted(lanes):
        lane_limits.hand_on(step, step.lane(lane))
    promoted = 0
    for class_ in range(3):
        rows = step.all("records_due", class_, step.now, limit - promoted)
        entries = sorted(map(entry_of, rows), key=lambda e: (e.due, str(e.id)))
        for e in entries:
            endings.promote(step, e)
        promoted += len(entries)
    closed = broadcasts.close_joining(step, limit, endings.end)
    moments = [moment for (moment,) in step.all("next_due_times") if moment is not None]
    if moments and min(moments) <= step.now and not (expired or promoted or closed):
        # Something is due that cannot be found by its identity. With another one the next pass takes it.
        damage.adopt(step)
    return Promoted(
        promoted=promoted,
        expired=len(expired),
        more=limit in (len(expired), promoted, closed),
        next_due=max(0.0, min(moments) - step.now) if moments else None,
    )


def admit(step: Step, limit: int) -> Admitted:
    """Admit what was inserted elsewhere, bind what waits unbound, move idle grants, and repair lanes."""
    arriving = list(map(entry_of, step.all("records_arriving", limit)))
    for e in arriving:
        admit_arriving(step, e)
    bound = 0
    for (inbox,) in step.all("pools_unbound"):
        bound += bindings.bind_unbound(step, inbox.removesuffix("/"), limit, endings.end)
    offered = endings.offer_again(step, limit)
    moved = lane_limits.move_idle_grants(step, limit)
    repaired = 0
    for (lane,) in step.all("lanes_with_room", limit):
        repaired += lane_limits.hand_on(step, step.lane(lane))
    return Admitted(
        admitted=len(arriving), moved=moved, repaired=repaired, more=limit in (len(arriving), bound, offered)
    )


def admit_arriving(step: Step, e: Entry) -> None:
    later = e.due is not None and e.due > step.now
    e.state = SCHEDULED if later else PENDING
    e.gate = UNGATED
    step.count(e.queue, e.class_, TALLY_OF_STATE[e.state])
    if not later:
        e.due = None
        endings.admit(step, e)
    step.save(e)


def insert_arriving(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Store jobs in a transaction of the user's. They are admitted after its commit, and in no tally before."""
    answers = []
    for job in jobs:
        if job.kind is not JobKind.JOB or job.cron is not None:
            raise InvalidInput("job", "only plain jobs can be stored inside a transaction of yours")
        queue = step.queue(job.queue)
        _check_lane(queue, job)
        found = _existing(job, _known(step, [job.id]))
        if found is None and job.unique is not None:
            found = _unique_holder(step, job)
        answers.append(found or Enqueued(job.id, True, JobState.PENDING))
        if found is not None:
            continue
        expires_at = None if job.expires is None else step.now + job.expires
        due = job.run_at if job.run_at is not None else step.now + job.delay
        seq = step.run("job_insert", *_identity(job, queue.id, step.now, None)).lastrowid
        plain = job.sticky is None and job.unique is None
        step.run("active_job_arrive", seq, queue.id, int(job.priority), due, expires_at, plain)
        if job.unique is not None:
            until = None if job.unique_for is None else step.now + job.unique_for
            step.run("unique_put", job.task, job.unique, seq, job.id, until)
    return answers
