"""Claimed jobs out of what a store has recorded, one by one: a record that cannot be read fails alone.

A disk, an operator or another version's bug can damage any record. Its job is ended as `bad_payload`, by its id, fence
and session alone, and the others of the same claim start as if it were not there.
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
"""The payload of a job whose identity was lost. It is no JSON, so such a job fails when it is claimed."""


def checked(job: Claimed) -> Claimed:
    """The same job, if its fields are what an enqueue can have stored; else `InvalidInput`, which names one."""
    timeout = job.timeout
    # One condition for nearly all jobs: this is on the hot path of every claim.
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
    """What is wrong with a record that could not be read, naming the field where that is known."""
    return str(exc) if isinstance(exc, InvalidInput) else f"{field}: {type(exc).__name__}: {exc}"


def unreadable(held: Held, problem: str) -> Transition:
    """How the job of a damaged record ends."""
    logger.error("the record of job %s cannot be read and the job is failed (%s)", held.id, problem)
    return fail(held, Reason.BAD_PAYLOAD, f"the stored record cannot be read ({problem})")


def tell_lost(ids: Sequence[str]) -> None:
    """Jobs have failed whose records not even the store could read."""
    for id in ids:
        logger.error("the record of job %s cannot be read and the job is failed (it is missing or damaged)", id)


async def fail_unreadable(store: Store, session: str, broken: list[tuple[Held, str]], claim: Claim) -> None:
    """End the jobs of damaged records that a session has claimed.

    If the store does not take it, they are taken back at the next renewal, which does not name them.
    """
    try:
        await store.finish(session, [unreadable(held, problem) for held, problem in broken])
    except FairlaneError as exc:
        logger.warning("%d jobs whose records cannot be read are still to be failed (%s)", len(broken), exc)
    # They came first, and there may be more behind them: a worker that got nothing else looks again at once.
    store.wakeups.publish({queue_topic(ask.queue) for ask in claim.asks if ask.queue is not None})
