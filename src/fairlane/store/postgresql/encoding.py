"""The arguments of the store's functions, and their answers. Jobs are passed as arrays, one for each column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model.job import Acceptance, Claimed, Held, JobKind, JobState, NewJob, Priority, Verdict
from ...model.maintenance import Retention
from ...model.retry import DEFAULT_BACKOFF
from ...model.session import Claim
from ...model.states import Move, Transition
from ..codes import MOVE_CODES, STATES
from ..shared.claimed_jobs import checked, problem_of
from ..shared.rows import decode_backoff, encode_backoff
from ..wakeups import place_topic
from .database import Record

_KINDS = tuple(JobKind)
_PRIORITIES = tuple(Priority)
_ACCEPTANCES = (Acceptance.APPLIED, Acceptance.REPEATED, Acceptance.STALE)
_COMPLETE = Move.COMPLETE
_APPLIED = Acceptance.APPLIED
USUAL: list[Any] = [None, 1, 1.0, None, 3, None, None, "default", None, None]
"""The defaults of the arguments of `enqueue_one`, from the sixth on; the first five differ from job to job."""
KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}


def is_plain(job: NewJob) -> bool:
    """Whether a job has none of the attributes that prevent it from being stored together with others."""
    placed = job.sticky is not None or job.worker is not None
    return job.kind is JobKind.JOB and not placed and job.unique is None and job.cron is None


def is_due(job: NewJob) -> bool:
    """Whether a new job may start as soon as it is admitted."""
    return not job.delay and job.run_at is None


def job_columns(jobs: Sequence[NewJob]) -> list[list[Any] | None]:
    """The arguments of `enqueue`: an array for each column, None where all jobs have the default value.

    If all jobs have the same task or queue, it is sent once.
    """
    return [
        [job.id for job in jobs],
        _same([job.task for job in jobs]),
        _same([job.queue for job in jobs]),
        [job.payload for job in jobs],
        _unusual([job.lane for job in jobs], None),
        _unusual([job.priority for job in jobs], Priority.NORMAL),
        _unusual([job.cost for job in jobs], 1.0),
        _unusual([job.delay or None for job in jobs], None),
        _unusual([job.run_at for job in jobs], None),
        _unusual([job.expires for job in jobs], None),
        _unusual([job.retries for job in jobs], 3),
        _unusual([_backoff(job) for job in jobs], None),
        _unusual([job.timeout for job in jobs], None),
        _unusual([job.pool for job in jobs], "default"),
        _unusual([job.retry_of for job in jobs], None),
        _unusual([job.headers for job in jobs], None),
    ]


def any_job_columns(jobs: Sequence[NewJob]) -> list[list[Any] | None]:
    """The arguments of `enqueue_any`, which takes jobs of every kind."""
    ids, _, _, *rest = job_columns(jobs)
    return [
        ids,
        [job.task for job in jobs],
        [job.queue for job in jobs],
        *rest,
        _unusual([KIND_CODES[job.kind] for job in jobs], 0),
        _unusual([job.unique for job in jobs], None),
        _unusual([job.unique_for for job in jobs], None),
        _unusual([job.sticky for job in jobs], None),
        _unusual([job.worker for job in jobs], None),
        _unusual([job.waiter for job in jobs], None),
        _unusual([job.ttl for job in jobs], 0.0),
        _unusual([None if job.cron is None else job.cron.schedule for job in jobs], None),
        _unusual([None if job.cron is None else job.cron.slot for job in jobs], None),
    ]


def _same(values: list[str]) -> list[str]:
    return values[:1] if values.count(values[0]) == len(values) else values


def _unusual(values: list[Any], usual: Any) -> list[Any] | None:
    return None if values.count(usual) == len(values) else values


def _backoff(job: NewJob) -> bytes | None:
    return None if job.backoff is DEFAULT_BACKOFF else encode_backoff(job.backoff)


def job_values(job: NewJob, channel: str | None) -> list[Any]:
    """The arguments of `enqueue_one` for a plain job that is due; without those of `USUAL` if all are defaults."""
    values = [job.id, job.task, job.queue, job.payload, channel]
    rest = [
        job.lane, int(job.priority), float(job.cost), job.expires, job.retries, _backoff(job), job.timeout, job.pool,
        job.retry_of, job.headers,
    ]  # fmt: skip
    return values if rest == USUAL else values + rest


def transition_columns(transitions: Sequence[Transition], seqs: dict[str, int]) -> list[Any]:
    """The arguments of `exchange` for transitions. Known numbers of jobs are passed, which saves look-ups."""
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


MOVES = 3
"""The index of the column of moves, which is None when all are completions."""


def payload_columns(transitions: Sequence[Transition]) -> list[list[bytes | None]]:
    """The last argument of `exchange`, which is only passed if a transition has a payload."""
    payloads = [t.payload for t in transitions]
    return [payloads] if any(payload is not None for payload in payloads) else []


NOTHING_TO_FINISH: list[Any] = [[], [], [], None, None, None, None, None, None]
NOTHING_TO_CLAIM: list[Any] = [None, None, None, None, None, None, None]


def claim_columns(claim: Claim) -> list[Any]:
    """The arguments of `exchange` for a claim."""
    return [
        claim.number,
        claim.total,
        [ask.queue for ask in claim.asks],
        [int(ask.priority) for ask in claim.asks],
        [ask.most for ask in claim.asks],
        [ask.below for ask in claim.asks],
        claim.most_bytes,
    ]


def one_claim_values(claim: Claim, queue: int, name: str) -> tuple[Any, ...]:
    """The same for `claim_one`, which starts at most one job of one queue: the asks need no counts."""
    asks = [ask for ask in claim.asks if ask.queue is not None and ask.most > 0]
    return claim.number, queue, name, [int(ask.priority) for ask in asks], [ask.below for ask in asks]


def verdicts_of(held: Sequence[Held], row: Record) -> tuple[Verdict, ...]:
    """The verdicts on fenced writes."""
    return tuple(
        [
            Verdict(claim.id, _APPLIED if how == 0 else _ACCEPTANCES[how], None if state is None else STATES[state])
            for claim, how, state in zip(held, row["acceptances"], row["states"], strict=True)
        ]
    )


Broken = list[tuple[Held, str]]
"""Claims of jobs whose records cannot be read, and why."""


def claimed_of(row: Record) -> tuple[list[Claimed], Broken]:
    """The jobs that a claim has started, read one by one."""
    claimed: list[Claimed] = []
    broken: Broken = []
    if not row["seqs"]:
        return claimed, broken
    for (
        id, fence, attempt, task, queue, lane, class_, payload, retries, backoff, timeout, kind, sticky, suspect,
        limited, headers, wait,
    ) in zip(
        row["ids"], row["fences"], row["attempts"], row["tasks"], row["queues"], row["lanes"], row["classes"],
        row["payloads"], row["retries"], row["backoffs"], row["timeouts"], row["kinds"], row["stickies"],
        row["suspects"], row["limited"], row["headers"], row["waits"], strict=True,
    ):  # fmt: skip
        try:
            job = checked(
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
                    waited=wait,
                )
            )
        except Exception as exc:
            broken.append((Held(id, fence), problem_of(exc)))
        else:
            claimed.append(job)
    return claimed, broken


def one_claimed_of(row: Record, queue: str) -> Claimed:
    """The job that `claim_one` has started. Raises if its record cannot be read."""
    backoff = row["backoff"]
    return checked(
        Claimed(
            id=row["id"],
            fence=row["fence"],
            attempt=row["attempt"],
            task=row["task"],
            queue=queue,
            lane=row["lane"],
            priority=_PRIORITIES[row["class"]],
            payload=row["payload"],
            retries=row["retries"],
            backoff=DEFAULT_BACKOFF if backoff is None else decode_backoff(backoff),
            timeout=row["timeout"],
            kind=JobKind.JOB,
            sticky=None,
            suspect=row["suspect"],
            limited=row["limited"],
            headers=row["headers"],
            waited=row["wait"],
        )
    )


def topics_of(job: Claimed) -> list[str]:
    """The topics of a job that was claimed: that of the job, and that of its lane if jobs may have moved up."""
    if job.limited and job.lane is not None:
        return ["job:" + job.id, place_topic(job.queue, job.lane)]
    return ["job:" + job.id]


def report_columns(reports: Sequence[tuple[Held, bytes]]) -> list[list[Any]]:
    """The arguments of `report`."""
    return [[held.id for held, _ in reports], [held.fence for held, _ in reports], [value for _, value in reports]]


def state_of(code: int | None) -> JobState:
    """The state of a code. None stands for pending: `enqueue` leaves out the states if all jobs have that one."""
    return JobState.PENDING if code is None else STATES[code]


def cleanup_values(job: NewJob | None) -> list[Any]:
    """The arguments of `release` for a clean-up. Its binding determines the worker that runs it."""
    if job is None:
        return [None] * 14
    return [
        job.id, job.task, job.queue, int(job.priority), float(job.cost), job.payload, job.headers, job.retries,
        encode_backoff(job.backoff), job.timeout, job.unique, job.unique_for, job.retry_of, job.expires,
    ]  # fmt: skip


def retention_values(keep: Retention) -> list[float | int]:
    """The arguments of `prune` for a retention."""
    return [
        keep.completed_seconds, keep.completed_count, keep.failed_seconds, keep.failed_count, keep.history_seconds,
        keep.id_seconds,
    ]  # fmt: skip
