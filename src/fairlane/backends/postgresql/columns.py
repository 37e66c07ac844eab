"""Jobs as the columns that the functions of the store take, and back: arrays, because one call carries many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...job import Acceptance, Claimed, Held, JobKind, JobState, NewJob, Priority, Verdict
from ...retry import DEFAULT_BACKOFF
from ...session import Claim
from ...states import Move, Transition
from ...upkeep import Retention
from ..codes import MOVE_CODES, STATES
from ..rows import decode_backoff, encode_backoff
from .database import Record

_KINDS = tuple(JobKind)
_PRIORITIES = tuple(Priority)
_ACCEPTANCES = (Acceptance.APPLIED, Acceptance.REPEATED, Acceptance.STALE)
_COMPLETE = Move.COMPLETE
_APPLIED = Acceptance.APPLIED
KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}

Column = tuple[Callable[[NewJob], Any], Any]
"""How a value is taken from a job, and the usual value, which is not sent when all have it."""

PLAIN: tuple[Column, ...] = (
    (lambda job: job.lane, None),
    (lambda job: int(job.priority), 1),
    (lambda job: float(job.cost), 1.0),
    (lambda job: job.delay or None, None),
    (lambda job: job.run_at, None),
    (lambda job: job.expires, None),
    (lambda job: job.retries, 3),
    (lambda job: None if job.backoff is DEFAULT_BACKOFF else encode_backoff(job.backoff), None),
    (lambda job: job.timeout, None),
    (lambda job: job.pool, "default"),
    (lambda job: job.retry_of, None),
    (lambda job: job.headers, None),
)
PECULIAR: tuple[Column, ...] = (
    (lambda job: KIND_CODES[job.kind], 0),
    (lambda job: job.unique, None),
    (lambda job: job.unique_for, None),
    (lambda job: job.sticky, None),
    (lambda job: job.worker, None),
    (lambda job: job.waiter, None),
    (lambda job: job.ttl, 0.0),
    (lambda job: None if job.cron is None else job.cron.schedule, None),
    (lambda job: None if job.cron is None else job.cron.slot, None),
)


def is_plain(job: NewJob) -> bool:
    """Whether a job is nothing but a job: what many of can be stored at once."""
    placed = job.sticky is not None or job.worker is not None
    return job.kind is JobKind.JOB and not placed and job.unique is None and job.cron is None


def job_columns(jobs: Sequence[NewJob], columns: Iterable[Column]) -> list[list[Any] | None]:
    """One array for each column, None where all jobs have the usual value."""
    arrays: list[list[Any] | None] = [
        [job.id for job in jobs],
        [job.task for job in jobs],
        [job.queue for job in jobs],
        [job.payload for job in jobs],
    ]
    for take, usual in columns:
        values = [take(job) for job in jobs]
        arrays.append(None if all(value == usual for value in values) else values)
    return arrays


def job_values(job: NewJob) -> list[Any]:
    """One plain job that is due, as `enqueue_one` takes it."""
    return [
        job.id, job.task, job.queue, job.payload, job.lane, int(job.priority), float(job.cost), job.expires,
        job.retries, None if job.backoff is DEFAULT_BACKOFF else encode_backoff(job.backoff), job.timeout, job.pool,
        job.retry_of, job.headers,
    ]  # fmt: skip


def transition_columns(transitions: Sequence[Transition], seqs: dict[str, int]) -> list[Any]:
    """The arrays of `exchange` for decisions. Where the number of a job is known it is given: one look-up less."""
    ids = [t.held.id for t in transitions]
    usual = all(t.move is _COMPLETE for t in transitions)
    return [
        ids,
        [seqs.get(id, 0) for id in ids],
        [t.held.fence for t in transitions],
        None if usual else [MOVE_CODES[t.move] for t in transitions],
        [t.result for t in transitions],
        None if usual else [t.delay for t in transitions],
        None if usual else [None if t.reason is None else t.reason.value for t in transitions],
        None if usual else [t.error for t in transitions],
        None if usual else [t.error_group for t in transitions],
    ]


NOTHING_TO_FINISH: list[Any] = [[], [], [], None, None, None, None, None, None]
NOTHING_TO_CLAIM: list[Any] = [None, None, None, None, None, None]


def claim_columns(claim: Claim) -> list[Any]:
    """The arrays of `exchange` for a claim."""
    return [
        claim.number,
        claim.total,
        [ask.queue for ask in claim.asks],
        [int(ask.priority) for ask in claim.asks],
        [ask.most for ask in claim.asks],
        [ask.below for ask in claim.asks],
    ]


def verdicts_of(held: Sequence[Held], row: Record) -> tuple[Verdict, ...]:
    """What became of each fenced write."""
    return tuple(
        [
            Verdict(claim.id, _APPLIED if how == 0 else _ACCEPTANCES[how], None if state is None else STATES[state])
            for claim, how, state in zip(held, row["acceptances"], row["states"], strict=True)
        ]
    )


def claimed_of(row: Record) -> list[Claimed]:
    """The jobs that a claim has started."""
    if not row["seqs"]:
        return []
    return [
        Claimed(
            id=id,
            fence=fence,
            attempt=attempt,
            task=task,
            queue=queue,
            lane=lane,
            priority=_PRIORITIES[class_],
            payload=payload,
            retries=retries,
            backoff=DEFAULT_BACKOFF if backoff is None else decode_backoff(backoff),
            timeout=timeout,
            kind=_KINDS[kind],
            sticky=sticky,
            suspect=suspect,
            limited=limited,
            headers=headers,
        )
        for id, fence, attempt, task, queue, lane, class_, payload, retries, backoff, timeout, kind, sticky, suspect,
            limited, headers in zip(
            row["ids"], row["fences"], row["attempts"], row["tasks"], row["queues"], row["lanes"], row["classes"],
            row["payloads"], row["retries"], row["backoffs"], row["timeouts"], row["kinds"], row["stickies"],
            row["suspects"], row["limited"], row["headers"], strict=True,
        )
    ]  # fmt: skip


def state_of(code: int | None) -> JobState:
    """The state a code stands for; a job that was stored without saying so is pending."""
    return JobState.PENDING if code is None else STATES[code]


def cleanup_values(job: NewJob | None) -> list[Any]:
    """A clean-up as `release` takes it; it is placed by its binding."""
    if job is None:
        return [None] * 14
    return [
        job.id, job.task, job.queue, int(job.priority), float(job.cost), job.payload, job.headers, job.retries,
        encode_backoff(job.backoff), job.timeout, job.unique, job.unique_for, job.retry_of, job.expires,
    ]  # fmt: skip


def retention_values(keep: Retention) -> list[float | int]:
    """What `prune` is told to keep."""
    return [
        keep.completed_seconds, keep.completed_count, keep.failed_seconds, keep.failed_count, keep.history_seconds,
        keep.id_seconds,
    ]  # fmt: skip
