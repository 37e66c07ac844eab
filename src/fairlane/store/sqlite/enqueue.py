"""Storing new jobs: finding duplicates, rejecting jobs over a limit, and admitting jobs that are due."""

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
from . import bindings, broadcasts, endings, lane_limits
from .reading import median_seconds, workers_of
from .records import JobRecord, Queue, job_record_of, json_texts
from .step import COUNT_OF_STATE, SLOTLESS, Step

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
        record = store(step, job)
        answers.append(Enqueued(job.id, True, STATES[record.state]))
        stored.add(job.id)
    return answers


def _existing(job: NewJob, known: dict[str, tuple[JobState, bytes]]) -> Enqueued | None:
    """Return the answer for an id that is taken. Raises `Conflict` if its content is different."""
    content = known.get(job.id)
    if content is None:
        return None
    if content[1] != fingerprint(job):
        raise Conflict(f"job {job.id!r} exists already with other content; choose another id")
    return Enqueued(job.id, False, content[0])


def _known(step: Step, ids: list[str]) -> dict[str, tuple[JobState, bytes]]:
    """Return the ids that are taken, each with the state and the fingerprint of its job."""
    wanted = json_texts(ids)
    known = {}
    for id, final, state, *content in step.all("jobs_known", wanted):
        known[id] = (STATES[state if final is None else final], stored_fingerprint(content))
    for id, digest, state in step.all("reserved_ids", wanted, step.now):
        known[id] = (STATES[state], digest)
    return known


def fingerprint(job: NewJob) -> bytes:
    """Return a digest of what makes two requests the same. Headers are not part of it: a repetition has a new trace."""
    return _digest(
        (
            job.task, job.queue, job.kind.value, int(job.priority), job.lane, float(job.cost), job.payload, job.retries,
            encode_backoff(job.backoff), job.timeout, job.unique, job.pool, job.sticky, job.worker, job.retry_of,
            job.delay or None, job.run_at, job.expires,
        )
    )  # fmt: skip


def stored_fingerprint(row: Sequence[Any]) -> bytes:
    """Return the same digest from the `fingerprint_columns` of a stored job, as it was enqueued."""
    *content, replaced = row
    return _digest(content) if replaced is None else replaced


def replace_payload(step: Step, seq: int, payload: bytes) -> None:
    """Replace the payload of a job. Its id still stands for the content that was enqueued."""
    row = step.one("job_content", seq)
    step.run("job_payload", payload, stored_fingerprint(row), seq)


def _digest(content: Sequence[Any]) -> bytes:
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
        return None  # its holder is neither active nor final: the record was lost
    return Enqueued(id, False, STATES[state if final is None else final])


def store(
    step: Step, job: NewJob, *, parent: JobRecord | None = None, binding: bindings.OpenBinding | None = None
) -> JobRecord:
    """Store a new job and admit it if it is due.

    `parent`: the broadcast that it is a copy of; `binding`: the binding that it is the clean-up of.
    """
    queue = step.queue(job.queue)
    terms = step.queue_cache.terms(queue, job.lane or "")
    # Copies and clean-ups belong to work that was already accepted, so limits do not apply to them.
    waiter = _check(step, queue, job, terms) if parent is None and binding is None else None
    e = insert(step, queue, job, waiter, parent)
    if job.unique is not None:
        until = None if job.unique_for is None else step.now + job.unique_for
        step.run("unique_put", job.task, job.unique, e.seq, job.id, until)
    if job.cron is not None:
        step.run("schedule_fired", job.cron.slot, job.cron.schedule)
    if binding is not None:
        e.binding, e.inbox, e.gate = binding.seq, worker_name(binding.pool, binding.index), CLEANUP
    if job.kind is JobKind.BROADCAST:
        e.state, e.gate = RUNNING, PARENT
        e.started_at = step.now
        e.due = step.now + job.ttl if job.ttl > 0 else None
        step.count(e.queue, e.class_, SLOTLESS)
    step.count(e.queue, e.class_, COUNT_OF_STATE[e.state])
    if e.state == PENDING:
        if binding is not None:
            lane_limits.arrive(step, e)
        else:
            endings.admit(step, e)
    _insert_active(step, e)
    if job.kind is JobKind.BROADCAST:
        broadcasts.begin(step, e, job.ttl, add_child, endings.end)
        if step.active_job(e.seq) is None:
            e.state = COMPLETED  # there was no worker to send it to
    return e


def insert(step: Step, queue: Queue, job: NewJob, waiter: int | None, parent: JobRecord | None) -> JobRecord:
    """Write the identity of a job. The caller writes its active row."""
    expires_at = None if job.expires is None else step.now + job.expires
    backoff = encode_backoff(job.backoff)
    cursor = step.run("job_insert", *_identity(job, queue.id, step.now, None if parent is None else parent.seq))
    seq = cursor.lastrowid
    assert seq is not None
    due = job.run_at if job.run_at is not None else step.now + job.delay
    later = due > step.now
    return JobRecord(
        seq=seq, queue=queue.id, class_=int(job.priority), state=SCHEDULED if later else PENDING, gate=UNGATED,
        flow=None, inbox="", lane=None, rank=0, granted=0, granted_at=None, arrival=None, due=due if later else None,
        expires_at=expires_at, session=None, claim=None, waiter=waiter, binding=None, fence=0, attempt=0, crashes=0,
        suspect=0, cancel=0, refused=0, paid=0, started_at=None, id=job.id, kind=job.kind.value, lane_key=job.lane,
        cost=job.cost, pool=job.pool, sticky=job.sticky, direct=job.worker, retries=job.retries, backoff_json=backoff,
        uniq=job.unique, task=job.task, parent=None if parent is None else parent.seq, attempts_json=None,
    )  # fmt: skip


def _identity(job: NewJob, queue: int, now: float, parent: int | None) -> tuple[Any, ...]:
    return (
        job.id, job.task, queue, job.kind.value, int(job.priority), job.lane, float(job.cost), job.payload, job.headers,
        job.retries, encode_backoff(job.backoff), job.timeout, job.unique, job.pool, job.sticky, job.worker, parent,
        job.retry_of, now, job.delay or None, job.run_at, job.expires,
    )  # fmt: skip


def _insert_active(step: Step, e: JobRecord) -> None:
    step.run(
        "active_job_insert", e.seq, e.queue, e.class_, e.state, e.gate, e.flow, e.inbox, e.lane, e.rank, e.granted,
        e.granted_at, e.arrival, e.due, e.expires_at, e.session, e.waiter, e.binding, e.fence, e.attempt,
        e.started_at, _plain(e),
    )  # fmt: skip


def _plain(e: JobRecord) -> bool:
    """Return whether the end of a job affects only its lane, so that `finish` can write it together with others."""
    return e.kind == JobKind.JOB and e.sticky is None and e.uniq is None and e.parent is None


def _check(step: Step, queue: Queue, job: NewJob, terms: LaneTerms) -> int | None:
    """Reject a job that its queue does not accept. Returns the session of the waiter of a turn."""
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
        step.flush_counts()
        [waiting] = step.one("queue_load", queue.id)
        if waiting >= most:
            raise QueueFull(
                f"queue {queue.name!r} has {waiting} jobs waiting and takes at most {most}",
                room_after(median_seconds(step, queue.id), _servers(step, queue, job)),
            )
    if terms.max_pending is not None:
        [waiting] = step.one("lane_load", queue.id, job.lane, terms.max_pending)
        if waiting >= terms.max_pending:
            raise QueueFull(
                f"lane {job.lane!r} of queue {queue.name!r} has {waiting} jobs waiting and takes at most "
                f"{terms.max_pending}",
                room_after(median_seconds(step, queue.id), _share(step, queue, job), limit=terms.limit),
            )


def _servers(step: Step, queue: Queue, job: NewJob) -> int:
    """Return the number of slots that could run a job like this one."""
    if queue.settings.paused:
        return 0
    return servers(workers_of(step, queue.name), queue.settings, int(job.priority))


def _share(step: Step, queue: Queue, job: NewJob) -> float:
    """Return the part of those slots for one lane: lanes that have work share them."""
    lanes: int = step.one("flows_active", "", int(job.priority), queue.id, MOST_LANES_COUNTED)[0]
    return _servers(step, queue, job) / max(1, lanes)


def add_child(step: Step, parent: JobRecord, index: int) -> None:
    """Store the copy of a broadcast for one worker."""
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
    # Set past the check of its length, which applies to ids of users: a copy has its parent's id and an index.
    msgspec.structs.force_setattr(copy, "id", broadcasts.child_id(parent.id, index))
    store(step, copy, parent=parent)


def release(step: Step, pool: str, key: str, cleanup: NewJob | None) -> str:
    """Begin to release a key. A clean-up that is already stored is not stored again."""
    if cleanup is None:
        return bindings.release(step, pool, key, None)
    if cleanup.kind is not JobKind.CLEANUP:
        raise InvalidInput("cleanup", "give a job of kind 'cleanup'")
    if _known(step, [cleanup.id]):
        # A repeated call: return the present state of the release.
        row = step.one("binding_open", pool, key)
        if row is not None and row[4] == "open":
            raise Conflict(f"clean-up {cleanup.id!r} was cancelled when the key was used again; give a new id")
        return "nothing" if row is None else "draining"
    job = msgspec.structs.replace(cleanup, pool=pool)
    # Set past the check that keeps users from placing a clean-up themselves.
    msgspec.structs.force_setattr(job, "sticky", key)
    return bindings.release(step, pool, key, lambda binding: store(step, job, binding=binding).seq)


def promote(step: Step, limit: int) -> Promoted:
    """Cancel expired jobs, then admit due jobs by class, due time and id."""
    expired = [seq for (seq,) in step.all("seqs_expired", step.now, limit)]
    # Granting each freed place at once would search past all other expired jobs every time.
    step.deferred_lanes = set()
    for seq in expired:
        # Read one by one: the end of one job can admit or start another one of them.
        e = step.active_job(seq)
        if e is not None and e.state != RUNNING:
            endings.expire(step, e)
    lanes, step.deferred_lanes = step.deferred_lanes, None
    for lane in sorted(lanes):
        lane_limits.grant_free_places(step, step.lane(lane))
    promoted = 0
    late: float | None = None
    for class_ in range(3):
        rows = step.all("records_due", class_, step.now, limit - promoted)
        due = sorted(map(job_record_of, rows), key=lambda e: (e.due, str(e.id)))
        if due and due[0].due is not None:
            late = max(late or 0.0, step.now - due[0].due)
        for e in due:
            endings.promote(step, e)
        promoted += len(due)
    closed = broadcasts.close_joining(step, limit, endings.end)
    next_due = [time for (time,) in step.all("next_due_times") if time is not None]
    if next_due and min(next_due) <= step.now and not (expired or promoted or closed):
        # A job is due whose identity is lost. The next pass finds it under a new one.
        endings.restore_identities(step)
    return Promoted(
        promoted=promoted,
        expired=len(expired),
        more=limit in (len(expired), promoted, closed),
        next_due=max(0.0, min(next_due) - step.now) if next_due else None,
        late=late,
    )


def admit(step: Step, limit: int) -> Admitted:
    """Admit jobs stored in user transactions, bind unbound jobs, move idle grants, and repair lanes."""
    arriving = list(map(job_record_of, step.all("records_arriving", limit)))
    for e in arriving:
        admit_arriving(step, e)
    bound = 0
    for (inbox,) in step.all("pools_unbound"):
        bound += bindings.bind_unbound(step, inbox.removesuffix("/"), limit, endings.end)
    offered = endings.offer_again(step, limit)
    moved = lane_limits.move_idle_grants(step, limit)
    repaired = 0
    for (lane,) in step.all("lanes_with_room", limit):
        repaired += lane_limits.grant_free_places(step, step.lane(lane))
    return Admitted(
        admitted=len(arriving), moved=moved, repaired=repaired, more=limit in (len(arriving), bound, offered)
    )


def admit_arriving(step: Step, e: JobRecord) -> None:
    """Admit a job that was stored in a user transaction."""
    later = e.due is not None and e.due > step.now
    e.state = SCHEDULED if later else PENDING
    e.gate = UNGATED
    step.count(e.queue, e.class_, COUNT_OF_STATE[e.state])
    if not later:
        e.due = None
        endings.admit(step, e)
    step.save(e)


def insert_arriving(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Store jobs in a user transaction. They are admitted after its commit and counted from then on."""
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
