"""Conversion of rows of the SQL stores into the records that readers see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ...errors import InvalidInput
from ...model.binding import Binding, BindingState
from ...model.ended import EndedJob
from ...model.job import KEPT_ATTEMPTS, Attempt, Job, JobKind, Priority, Reason, waiting_since
from ...model.retry import DEFAULT_BACKOFF, Backoff
from ...model.schedule import Schedule, StoredSchedule, Timetable
from ...model.session import worker_name
from ..codes import MOVES, STATES

NEWEST = 2**62
"""A seq above that of every job."""

_attempts = msgspec.json.Decoder(list[Attempt])
_backoff = msgspec.json.Decoder(Backoff)
_timetable: msgspec.json.Decoder[Timetable] = msgspec.json.Decoder(Timetable)
_encoder = msgspec.json.Encoder()
_KINDS = {kind.value: kind for kind in JobKind}
_REASONS = {reason.value: reason for reason in Reason}


def decode_attempts(raw: bytes | str | None) -> list[Attempt]:
    """Return finished claims, oldest first."""
    return [] if raw is None else _attempts.decode(raw)


def readable_attempts(raw: bytes | str | None) -> list[Attempt]:
    """Return the same, or an empty list if the history cannot be read: the job itself is still valid."""
    try:
        return decode_attempts(raw)
    except Exception:
        return []


def decode_backoff(raw: bytes | None) -> Backoff:
    """Return the policy of a `backoff` column."""
    if raw is None:
        return DEFAULT_BACKOFF
    try:
        return _backoff.decode(raw)
    except Exception as exc:
        raise InvalidInput("backoff", f"is not a policy ({exc})") from None


def encode_backoff(backoff: Backoff) -> bytes | None:
    """Return the value of the `backoff` column; the default policy is not stored."""
    return None if backoff == DEFAULT_BACKOFF else _encoder.encode(backoff)


def job_of(row: Iterable[Any]) -> Job:
    """Return the job of a row. Of a damaged row everything readable is returned, so that the job can be found."""
    columns = tuple(row)
    try:
        return _job_of(columns)
    except Exception:
        return _job_of(_readable(columns))


def _readable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the row with default values in place of those that cannot be read."""
    columns = list(row)

    def replace(index: int, read: Callable[[Any], Any], default: Any) -> None:
        try:
            read(columns[index])
        except Exception:
            columns[index] = default

    replace(4, JobKind, JobKind.JOB.value)
    replace(5, Priority, Priority.NORMAL.value)
    replace(11, decode_backoff, None)
    replace(22, decode_attempts, None)
    replace(24, lambda reason: reason is None or Reason(reason), None)
    for index in (44, 45):
        replace(index, lambda seconds: 0.0 + (seconds or 0.0), None)
    return tuple(columns)


def _job_of(row: Iterable[Any]) -> Job:
    """Return the job of a row with columns in this order."""
    (
        _seq, id, task, queue, kind, class_, lane, cost, payload, headers, retries, backoff, timeout, uniq, pool,
        sticky, direct, retry_of, parent, enqueued_at, expires_at, progress, attempts, final, reason, result, error,
        error_group, move, finished_at, live, inbox, due, cancel, suspect, arrival, attempt, fence, started_at,
        refused, session, session_pool, session_index, session_host, delay, run_at,
    ) = row  # fmt: skip
    history = decode_attempts(attempts)
    state = STATES[live if final is None else final]
    worker = None
    if session is not None or move is not None:
        worker = session_host if session_index is None else worker_name(session_pool, session_index)
        # The last claim is not in the `attempts` column: it is running, or it ended with the job.
        history.append(
            Attempt(
                fence=fence, attempt=attempt, session=session or "unknown", worker=worker or "unknown",
                started_at=started_at, ended_at=finished_at, outcome=None if move is None else MOVES[move].value,
                state=None if final is None else state, reason=None if reason is None else Reason(reason),
                error=error, refused=refused,
            )
        )  # fmt: skip
    elif inbox and not inbox.endswith("/"):
        worker = inbox
    elif direct is not None:
        worker = worker_name(pool, direct)
    elif history:
        worker = history[-1].worker
    return Job(
        id=id,
        task=task,
        queue=queue,
        kind=JobKind(kind),
        state=state,
        reason=None if reason is None else Reason(reason),
        lane=lane,
        priority=Priority(class_),
        cost=cost,
        payload=payload,
        headers=headers,
        retries=retries,
        backoff=decode_backoff(backoff),
        timeout=timeout,
        unique=uniq,
        pool=pool,
        sticky=sticky,
        direct=direct,
        worker=worker,
        session=session or (history[-1].session if final is not None and history else None),
        attempt=attempt,
        fence=fence,
        arrival=arrival,
        retry_of=retry_of,
        parent=parent,
        enqueued_at=enqueued_at,
        due_at=due,
        expires_at=expires_at,
        started_at=started_at,
        finished_at=finished_at,
        cancel_requested=bool(cancel),
        suspect=bool(suspect),
        progress=progress,
        result=result,
        error=error,
        error_group=error_group,
        attempts=tuple(history[-KEPT_ATTEMPTS:]),
        first_due_at=waiting_since(enqueued_at, delay, run_at) if delay or run_at else None,
    )


def ended_of(row: Iterable[Any]) -> EndedJob:
    """Return a job of the feed. A kind or a reason that cannot be read is replaced, so that its end is reported."""
    id, task, queue, kind, state, reason, error, finished_at = row
    return EndedJob(
        id=id,
        task=task,
        queue=queue,
        kind=_KINDS.get(kind, JobKind.JOB),
        state=STATES[state],
        reason=_REASONS.get(reason),
        error=error,
        finished_at=float(finished_at),
    )


def binding_of(row: Iterable[Any]) -> Binding:
    """Return the binding of a row."""
    pool, key, index, state, opened_at, used_at, closed_at, cleanup, cleanup_failed = row
    return Binding(
        pool=pool, key=key, index=index, state=BindingState(state), opened_at=opened_at, used_at=used_at,
        closed_at=closed_at, cleanup=cleanup, cleanup_failed=bool(cleanup_failed),
    )  # fmt: skip


def schedules_of(rows: Iterable[Iterable[Any]]) -> list[StoredSchedule]:
    """Return the schedules of rows, without those that this process cannot read. The last column is the store's now."""
    found = []
    for name, raw, job, stored_at, declared_at, last_slot, now in rows:
        try:
            schedule = Schedule(name=name, timetable=_timetable.decode(raw), job=_bytes(job))
            times = [None if time is None else float(time) for time in (stored_at, declared_at, last_slot)]
        except (ValueError, TypeError):
            # Damaged, or stored by a process that knows more time zones.
            continue
        stored = StoredSchedule(
            schedule=schedule, stored_at=times[0] or 0.0, declared_at=times[1] or 0.0, last_slot=times[2], now=now
        )
        found.append(stored)
    return found


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("not bytes")
    return value


def position_of(cursor: str | None) -> int:
    """Return the seq of a cursor; a page shows jobs with lower ones."""
    if cursor is None:
        return NEWEST
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise InvalidInput("cursor", "is not a cursor that a page returned")
    return int(cursor)
