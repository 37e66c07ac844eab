"""Records of the store, turned into what readers see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...binding import Binding, BindingState
from ...job import KEPT_ATTEMPTS, Attempt, Job, JobKind, Reason
from ...session import Session, SessionKind, SessionState, worker_name
from ...slots import Reserved, Slots
from ..codes import STATES
from ..rows import decode_backoff
from .requests import decode, read_content


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


def job_of(parts: Sequence[bytes]) -> Job:
    """A job out of the parts that `reading.lua` answers with."""
    (_, raw, headers, live, outcome, attempts, progress, result, who, parent, id, queue) = parts
    enqueued_at, content = read_content(raw)
    record: dict[str, Any] = decode(live or outcome)
    final = not live
    history = [_attempt_of(each) for each in (decode(attempts) if attempts else ())]
    state = STATES[record["state"]]
    reason = Reason(record["reason"]) if final and "reason" in record else None
    session, move, inbox = record.get("session"), record.get("move"), record.get("inbox")
    direct = record.get("direct", content.worker)
    worker = None
    if session is not None or move is not None:
        holder = decode(who) if who else {}
        index = holder.get("index")
        worker = holder.get("host") if index is None else worker_name(holder["pool"], index)
        # The last claim is not in the list: it runs, or its end is the job's.
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
        task=content.task,
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
        backoff=decode_backoff(content.backoff),
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
        expires_at=record.get("expires_at"),
        started_at=record.get("started_at"),
        finished_at=record.get("finished_at"),
        cancel_requested=bool(record.get("cancel")),
        suspect=bool(record.get("suspect")),
        progress=progress or None,
        result=result if record.get("result") else None,
        error=record.get("error"),
        error_group=record.get("group"),
        attempts=tuple(history[-KEPT_ATTEMPTS:]),
    )


def binding_of(tie: dict[str, Any]) -> Binding:
    """A binding."""
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


def session_of(answer: Sequence[Any]) -> Session:
    """A session, with what it runs."""
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
    )
