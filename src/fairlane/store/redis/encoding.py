"""The arguments and answers of the functions; see `lua/verbs.lua`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec

from ...model.job import Acceptance, Claimed, Held, JobKind, JobState, NewJob, Priority, Verdict, waited
from ...model.retry import DEFAULT_BACKOFF
from ...model.session import Claim, NewSession
from ...model.states import Move, Transition
from ..codes import STATES
from ..shared.claimed_jobs import checked, problem_of
from ..shared.rows import decode_backoff, encode_backoff

TIME = struct.Struct(">d")
LENGTH = struct.Struct(">H")
NO_LANE = b"\0\0"
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode
_COMPLETE, _JOB = Move.COMPLETE, JobKind.JOB
_ACCEPTANCES = {each.value: each for each in Acceptance}
_PRIORITIES = tuple(Priority)
_RUNS = ord("r")


class Content(msgspec.Struct, array_like=True, gc=False):
    """A job as it was requested. Equal content means equal requests. Opaque to the functions."""

    task: str
    queue: str
    kind: JobKind
    priority: Priority
    lane: str | None
    cost: float
    payload: bytes
    retries: int
    backoff: bytes | None
    timeout: float | None
    unique: str | None
    pool: str
    sticky: str | None
    worker: int | None
    retry_of: str | None
    delay: float | None
    run_at: float | None
    expires: float | None


_content = msgspec.msgpack.Decoder(Content)


def content_of(job: NewJob) -> bytes:
    """Encode the content of a job. Headers are not part of it: a repeated request has another trace id."""
    return encode(
        Content(
            job.task, job.queue, job.kind, job.priority, job.lane, float(job.cost), job.payload, job.retries,
            encode_backoff(job.backoff), _number(job.timeout), job.unique, job.pool, job.sticky, job.worker,
            job.retry_of, _number(job.delay or None), _number(job.run_at), _number(job.expires),
        )
    )  # fmt: skip


def read_content(raw: bytes) -> tuple[float, Content]:
    """When a job was stored, and its content."""
    return TIME.unpack_from(raw)[0], _content.decode(memoryview(raw)[TIME.size :])


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def is_simple(job: NewJob) -> bool:
    """Whether a job is due now, may run anywhere and has no unique key: several such jobs can share a request."""
    return (
        job.kind is _JOB
        and job.unique is None
        and job.sticky is None
        and job.worker is None
        and not job.delay
        and job.run_at is None
        and job.expires is None
        and job.cron is None
        and job.waiter is None
    )


def requests_of(jobs: Sequence[NewJob]) -> list[dict[str, Any]]:
    """The requests for jobs: one each, or one for consecutive jobs that differ only in their ids and lanes."""
    requests: list[dict[str, Any]] = []
    last: tuple[Any, ...] | None = None
    ids: list[str] = []
    lanes: list[str | None] = []
    for job in jobs:
        if not is_simple(job):
            last = None
            requests.append(request_of(job))
            continue
        has_lane = job.lane is not None
        alike = (has_lane, job.task, job.queue, job.priority, job.cost, job.pool, job.retries, job.backoff)
        if alike != last:
            last, ids, lanes = alike, [], []
            request = request_of(job)
            del request["id"]
            request["ids"] = ids
            if has_lane:
                del request["lane_key"]
                request["lanes"] = lanes
            requests.append(request)
        ids.append(job.id)
        if has_lane:
            lanes.append(job.lane)
    return requests


def rest_of(job: NewJob) -> dict[str, Any]:
    """Fields that differ from their defaults and are needed only when a job is retried."""
    rest: dict[str, Any] = {}
    if job.pool != "default":
        rest["pool"] = job.pool
    if job.retries != 3:
        rest["retries"] = job.retries
    if job.backoff != DEFAULT_BACKOFF:
        rest["backoff"] = msgspec.to_builtins(job.backoff)
    return rest


def request_of(job: NewJob) -> dict[str, Any]:
    """The fields of a job that the functions need; defaults are left out."""
    request: dict[str, Any] = {"id": job.id, "task": job.task, "queue": job.queue, "class": int(job.priority)}
    if job.kind is not JobKind.JOB:
        request["kind"] = job.kind.value
    if job.cost != 1.0:
        request["cost"] = job.cost
    request |= rest_of(job)
    if job.delay:
        request["delay"] = job.delay
    if job.ttl:
        request["ttl"] = job.ttl
    if job.cron is not None:
        request |= {"schedule": job.cron.schedule, "slot": job.cron.slot}
    others = {
        "lane_key": job.lane, "sticky": job.sticky, "direct": job.worker, "uniq": job.unique,
        "unique_for": job.unique_for, "run_at": job.run_at, "expires": job.expires, "waiter": job.waiter,
    }  # fmt: skip
    request.update((name, value) for name, value in others.items() if value is not None)
    return request


def lone_job_of(job: NewJob) -> tuple[Any, ...] | None:
    """The arguments of `enqueue_one` for a simple job, else None. The end of its packed record is made here."""
    if job.cost != 1.0 or not is_simple(job):
        return None
    rest = encode({"task": job.task, **rest_of(job)})
    alone = job.id, job.queue, int(job.priority), job.task
    if job.lane is None:
        return *alone, NO_LANE + rest, content_of(job), job.headers or b""
    lane = job.lane.encode()
    return *alone, LENGTH.pack(len(lane)) + lane + rest, content_of(job), job.headers or b"", lane


def session_of(session: NewSession) -> dict[str, Any]:
    """The record of a new session."""
    record: dict[str, Any] = {
        "id": session.id, "kind": session.kind.value, "lease": float(session.lease), "host": session.host,
        "pid": session.pid, "pool": session.pool, "queues": list(session.queues),
    }  # fmt: skip
    if session.index is not None:
        record["index"] = session.index
    if session.slots is not None:
        reserved = session.slots.reserved
        record["slots"] = {"total": session.slots.total, "high": reserved.high, "normal": reserved.normal}
    if session.tasks is not None:
        record["task_set"] = session.task_set
        record["tasks"] = "\n".join(["", *session.tasks, ""])
    return record


def claim_of(claim: Claim, accepts_push: bool) -> bytes:
    """A claim: number, total, asks, whether the next claim may be answered by a push, and the most bytes to return."""
    asks = [
        [ask.queue or False, int(ask.priority), ask.most, False if ask.below is None else ask.below]
        for ask in claim.asks
    ]
    return encode([claim.number, claim.total, asks, accepts_push, claim.most_bytes])


def transitions_of(transitions: Sequence[Transition], first: int) -> tuple[bytes, list[bytes]]:
    """Encoded transitions, and the results and payloads that follow as arguments from number `first` on."""
    results: list[bytes] = []
    if all(t.move is _COMPLETE for t in transitions) and len({t.held.id for t in transitions}) == len(transitions):
        ids, fences, places = [], [], []
        # Many jobs have the same result, mostly none: it is sent once.
        known: dict[bytes | None, int] = {None: 0}
        for t in transitions:
            held, result = t.held, t.result
            ids.append(held.id)
            fences.append(held.fence)
            place = known.get(result)
            if place is None:
                assert result is not None
                place = known[result] = first + len(results)
                results.append(result)
            places.append(place)
        return encode({"ids": ids, "fences": fences, "results": places}), results
    records = []
    for t in transitions:
        record: dict[str, Any] = {"id": t.held.id, "fence": t.held.fence, "move": t.move.value}
        if t.delay:
            record["delay"] = t.delay
        if t.reason is not None:
            record["reason"] = t.reason.value
        if t.error is not None:
            record["error"] = t.error
        if t.error_group is not None:
            record["group"] = t.error_group
        if t.result is not None:
            record["result"] = first + len(results)
            results.append(t.result)
        if t.payload is not None:
            # Encoded as in `Content`, where it takes the place of the old one.
            record["payload"] = first + len(results)
            results.append(encode(t.payload))
        records.append(record)
    return encode(records), results


def verdicts_of(held: Sequence[Held], answers: Sequence[Sequence[Any]]) -> tuple[Verdict, ...]:
    """The verdicts on writes; the answer is empty when all completions were applied."""
    if not answers:
        return tuple([Verdict(each.id, Acceptance.APPLIED, JobState.COMPLETED) for each in held])
    return tuple(
        Verdict(each.id, _ACCEPTANCES[word], STATES[state[0]] if state else None)
        for each, (word, *state) in zip(held, answers, strict=True)
    )


class Answered(NamedTuple):
    """The answer to a claim."""

    claimed: list[Claimed]
    stamps: list[bytes]
    """When those jobs were stored, as bytes: two jobs that had the same id were not stored at the same moment."""
    broken: list[tuple[Held, str]]
    """Claimed jobs whose content cannot be read here, and why."""
    lost: list[str]
    """Jobs that the claim failed, because the functions cannot read their records."""


def answered_of(parts: Sequence[bytes], session: str) -> Answered:
    """The jobs of a claim: three parts each, the last a packed record (see `lua/packed_job_record.lua`) or a list."""
    answered = Answered([], [], [], [])
    layout = _packed_layout(len(session.encode()))
    for place in range(0, len(parts), 3):
        record = parts[place + 2]
        if record[0] == _RUNS:
            fence, attempt, started_at, class_, flags, length = layout.unpack_from(record)
            id = record[layout.size : layout.size + length].decode()
            kind, suspect, limited = _JOB, False, flags % 2 == 1
        else:
            id, *rest = decode(record)
            if not rest:
                answered.lost.append(id)
                continue
            fence, attempt, class_, suspect, limited, word, started_at = rest
            kind = JobKind(word)
        try:
            content = _content.decode(memoryview(parts[place])[TIME.size :])
            job = Claimed(
                id=id,
                fence=fence,
                attempt=attempt,
                task=content.task,
                queue=content.queue,
                lane=content.lane,
                priority=_PRIORITIES[class_],
                payload=content.payload,
                retries=content.retries,
                backoff=decode_backoff(content.backoff),
                timeout=content.timeout,
                kind=kind,
                sticky=content.sticky,
                suspect=suspect,
                limited=limited,
                headers=parts[place + 1] or None,
                waited=waited(fence, started_at, TIME.unpack_from(parts[place])[0], content.delay, content.run_at),
            )
            answered.claimed.append(checked(job))
        except Exception as exc:
            answered.broken.append((Held(id, fence), problem_of(exc, "content")))
        else:
            answered.stamps.append(parts[place][: TIME.size])
    return answered


@cache
def _packed_layout(length: int) -> struct.Struct:
    """Fence, attempt, start, class, flags and length of the id in a running job's packed record; the id follows."""
    return struct.Struct(f">xII{4 + 8}xd{2 + length}xBB{4 + 8}xH")
