"""Checks of claimed jobs, one by one: a record that cannot be read fails only its own job.

A disk, an operator or a bug of another version can damage any record. Its job fails as `bad_payload`, for which its id,
fence and session are enough, and the other jobs of the same claim start normally.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import FairlaneError, InvalidInput
from ...model import names
from ...model.job import Claimed, Held, Reason
from ...model.session import Claim
from ...model.states import Transition, fail
from ..port import Store
from ..wakeups import queue_topic

logger = logging.getLogger("fairlane.store")
LOST_PAYLOAD = b""
"""The payload of a job whose identity was lost. It is not JSON, so the job fails when it is claimed."""


def checked(job: Claimed) -> Claimed:
    """Return the job if its fields are valid. Raises `InvalidInput`, which names the first that is not."""
    timeout = job.timeout
    # One condition for nearly all jobs: this is the hot path of every claim.
    if (
        type(job.id) is str
        and job.id
        and type(job.task) is str
        and job.task
        and type(job.payload) is bytes
        and job.payload
        and type(job.retries) is int
        and job.retries >= 0
        and (job.lane is None or type(job.lane) is str)
        and (timeout is None or (type(timeout) is float and 0 < timeout <= names.LONGEST_SECONDS))
    ):
        return job
    names.check_key("id", job.id)
    names.check_name("task", job.task)
    names.check_size("payload", job.payload, names.PAYLOAD_BYTES)
    names.check_count("retries", job.retries, least=0)
    if job.lane is not None:
        names.check_key("lane", job.lane)
    if timeout is not None:
        names.check_seconds("timeout", timeout, least=0.001)
    if not job.payload:
        raise InvalidInput("payload", "is missing")
    return job


def problem_of(exc: Exception, field: str = "record") -> str:
    """Return why a record could not be read, with the name of the field if known."""
    return str(exc) if isinstance(exc, InvalidInput) else f"{field}: {type(exc).__name__}: {exc}"


def unreadable(held: Held, problem: str) -> Transition:
    """Log a damaged record and return the transition that fails its job."""
    logger.error("the record of job %s cannot be read, the job fails (%s)", held.id, problem)
    return fail(held, Reason.BAD_PAYLOAD, f"the stored record cannot be read ({problem})")


def log_lost(ids: Sequence[str]) -> None:
    """Log jobs that the store has failed because it could not read their records."""
    for id in ids:
        logger.error("the record of job %s cannot be read, the job fails (the record is missing or damaged)", id)


async def fail_unreadable(store: Store, session: str, broken: list[tuple[Held, str]], claim: Claim) -> None:
    """Fail the claimed jobs of a session whose records are damaged.

    If this fails, the store takes the jobs back at the next renewal, which does not name them.
    """
    try:
        await store.finish(session, [unreadable(held, problem) for held, problem in broken])
    except FairlaneError as exc:
        logger.warning("%d jobs whose records cannot be read could not be failed yet (%s)", len(broken), exc)
    # There may be more jobs after them: notify workers, so that one that got no other job claims again at once.
    store.wakeups.publish({queue_topic(ask.queue) for ask in claim.asks if ask.queue is not None})
