"""Turns stored records into the values of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...model.binding import Binding, BindingState
from ...model.job import KEPT_ATTEMPTS, Attempt, Job, JobKind, Priority, Reason, waiting_since
from ...model.retry import DEFAULT_BACKOFF
from ...model.session import Session, SessionKind, SessionState, Term, worker_name
from ...model.slots import Reserved, Slots
from ...model.tokens import AccessToken, Scope
from ..codes import STATES
from ..shared.rows import decode_backoff
from ..shared.stored_settings import readable
from .encoding import Content, decode, read_content

LOST = Content(
    "lost", "", JobKind.JOB, Priority.NORMAL, None, 1.0, b"", 0, None, None, None, "default", None, None, None, None,
    None, None,
)  # fmt: skip
"""Stands in for content that cannot be read."""


def term_of(answer: Mapping[str, Any]) -> Term | None:
    """The term in an answer; None if there is none."""
    found = answer["leader"]
    if not found:
        return None
    number, session, lease, remaining = found
    return Term(number=number, session=session, lease=lease, remaining=remaining)


def token_record(token: AccessToken) -> dict[str, Any]:
    """The stored form of a token; fields that are None are absent."""
    record = msgspec.to_builtins(token) | {"digest": token.digest.hex()}
    return {name: value for name, value in record.items() if value is not None}


def token_of(record: dict[str, Any]) -> AccessToken:
    """A token from its stored form."""
    queues, expires_at, revoked_at = record.get("queues"), record.get("expires_at"), record.get("revoked_at")
    return AccessToken(
        id=record["id"],
        name=record["name"],
        digest=bytes.fromhex(record["digest"]),
        scopes=tuple(map(Scope, record["scopes"])),
        queues=None if queues is None else tuple(queues),
        lane_prefix=record.get("lane_prefix"),
        created_at=float(record["created_at"]),
        expires_at=None if expires_at is None else float(expires_at),
        revoked_at=None if revoked_at is None else float(revoked_at),
        hint=record["hint"],
    )


def _attempt_of(record: dict[str, Any]) -> Attempt:
    reason = record.get("reason")
    return Attempt(
        fence=record["fence"],
        attempt=record["attempt"],
        session=record["session"],
        worker=record["worker"],
        started_at=record["started_at"],
        ended_at=record["ended_at"],
        outcome=record["outcome"],
        state=STATES[record["state"]],
        reason=None if reason is None else Reason(reason),
        error=record.get("error"),
        refused=record.get("refused") or 0,
    )


def _history_of(raw: bytes) -> list[Attempt]:
    try:
        return [_attempt_of(each) for each in (decode(raw) if raw else ())]
    except Exception:
        return []  # damaged: the job is shown without its history


def _holder_of(raw: bytes) -> dict[str, Any]:
    try:
        holder = decode(raw) if raw else {}
    except Exception:
        return {}  # damaged: the job is shown without its holder
    return holder if isinstance(holder, dict) and ("index" not in holder or "pool" in holder) else {}


def job_of(parts: Sequence[bytes]) -> Job:
    """A job from the parts that `reading.lua` answers with."""
    (_, raw, headers, live, outcome, attempts, progress, result, holder_record, parent, id, queue) = parts
    try:
        enqueued_at, content = read_content(raw)
        backoff = decode_backoff(content.backoff)
    except Exception:
        # A damaged job is shown with what can be read, so that it can be found.
        enqueued_at, content, backoff = 0.0, LOST, DEFAULT_BACKOFF
    record: dict[str, Any] = decode(live or outcome)
    final = not live
    history = _history_of(attempts)
    state = STATES[record["state"]]
    reason = Reason(record["reason"]) if final and "reason" in record else None
    session, move, inbox = record.get("session"), record.get("move"), record.get("inbox")
    direct = record.get("direct", content.worker)
    worker = None
    if session is not None or move is not None:
        holder = _holder_of(holder_record)
        index = holder.get("index")
        worker = holder.get("host") if index is None else worker_name(holder["pool"], index)
        # The last claim is not in the list: it is running, or its end is that of the job.
        history.append(
            Attempt(
                fence=record["fence"],
                attempt=record["attempt"],
                session=session or "unknown",
                worker=worker or "unknown",
                started_at=record["started_at"],
                ended_at=record.get("finished_at"),
                outcome=move,
                state=state if final else None,
                reason=reason,
                error=record.get("error"),
                refused=record.get("refused") or 0,
            )
        )
    elif inbox and not inbox.endswith("/") and not final:
        worker = inbox
    elif direct is not None:
        worker = worker_name(content.pool, direct)
    elif history:
        worker = history[-1].worker
    return Job(
        id=id.decode(),
        task=record.get("task") or content.task,
        queue=queue.decode(),
        kind=JobKind(record.get("kind", "job")),
        state=state,
        reason=reason,
        lane=content.lane,
        priority=content.priority,
        cost=content.cost,
        payload=content.payload,
        headers=headers or None,
        retries=content.retries,
        backoff=backoff,
        timeout=content.timeout,
        unique=content.unique,
        pool=content.pool,
        sticky=content.sticky,
        direct=direct,
        worker=worker,
        session=session or (history[-1].session if final and history else None),
        attempt=record.get("attempt") or 0,
        fence=record.get("fence") or 0,
        arrival=record.get("arrival"),
        retry_of=content.retry_of,
        parent=parent.decode() or None,
        enqueued_at=enqueued_at,
        due_at=record.get("due"),
        expires_at=record.get("expires_at") or record.get("to_start_by"),
        started_at=record.get("started_at"),
        finished_at=record.get("finished_at"),
        cancel_requested=bool(record.get("cancel")),
        suspect=bool(record.get("suspect")),
        progress=progress or None,
        result=result if record.get("result") else None,
        error=record.get("error"),
        error_group=record.get("group"),
        attempts=tuple(history[-KEPT_ATTEMPTS:]),
        first_due_at=waiting_since(enqueued_at, content.delay, content.run_at)
        if content.delay or content.run_at
        else None,
    )


def binding_of(tie: dict[str, Any]) -> Binding:
    """A binding from its record."""
    return Binding(
        pool=tie["pool"],
        key=tie["key"],
        index=tie["index"],
        state=BindingState(tie["state"]),
        opened_at=tie["opened_at"],
        used_at=tie["used_at"],
        closed_at=tie.get("closed_at"),
        cleanup=tie.get("cleanup"),
        cleanup_failed=bool(tie.get("failed")),
    )


def sessions_of(answer: dict[str, Any]) -> list[Session]:
    """Sessions, with their running jobs by class."""
    # MessagePack in Lua encodes an empty table as a list.
    sets: dict[str, Any] = answer["task_sets"] or {}
    known = {id: tuple(filter(None, tasks.split("\n"))) for id, tasks in sets.items() if tasks}
    return readable("session", lambda each: _session_of(each, known), answer["sessions"])


def _session_of(answer: Sequence[Any], task_sets: Mapping[str, tuple[str, ...]]) -> Session:
    record, running, remaining = answer
    slots = record.get("slots")
    present = record["state"] in ("live", "stopping")
    return Session(
        id=record["id"],
        kind=SessionKind(record["kind"]),
        state=SessionState(record["state"]),
        host=record["host"],
        pid=record["pid"],
        pool=record["pool"],
        index=record.get("index"),
        named=bool(record.get("named")),
        queues=tuple(record.get("queues") or ()),
        slots=None
        if slots is None
        else Slots(total=slots["total"], reserved=Reserved(high=slots["high"], normal=slots["normal"])),
        started_at=record["started_at"],
        lease=record["lease"],
        remaining=remaining if present else min(remaining, 0.0),
        running=tuple(running),
        tasks=task_sets.get(record.get("task_set", "")),
    )
