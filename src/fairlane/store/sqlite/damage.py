"""Jobs whose records were damaged: they get back as much of an identity as it takes to end them like any other."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.job import Held, JobState, Reason
from ...model.states import Move
from ..shared.claimed_jobs import LOST_PAYLOAD, logger, unreadable
from . import endings
from .job_record import Entry
from .step import Step

MOST_ADOPTED = 1_000


def fail(step: Step, seq: int, problem: str) -> None:
    """End a running job whose record cannot be read."""
    e = step.entry(seq)
    if e is None:
        _adopt(step, seq)
        e = step.entry(seq)
        assert e is not None
    if type(e.id) is not str:
        # Its true id is not to be read any more, and everybody names it from now on as follows.
        e.id = lost_id(seq)
        step.run("id_repair", e.id, seq)
    ending = unreadable(Held(e.id, e.fence), problem)
    endings.end(
        step, e, JobState.FAILED, Reason.BAD_PAYLOAD, error=ending.error, group=ending.error_group, move=Move.FAIL
    )


def adopt(step: Step) -> list[str]:
    """Give every live job that has lost its identity one under which it can be found and ended; the new ids."""
    return _adopt_all(step, step.all("identities_missing", MOST_ADOPTED))


def adopt_held(step: Step, session: int) -> None:
    """The same for what a session runs."""
    _adopt_all(step, step.all("identities_missing_of", session))


def adopted(step: Step, seq: int) -> Entry:
    """A job that is live and has lost its identity, with another one."""
    _adopt_all(step, [(seq,)])
    e = step.entry(seq)
    assert e is not None
    return e


def _adopt_all(step: Step, seqs: Sequence[tuple[int]]) -> list[str]:
    found = [_adopt(step, seq) for (seq,) in seqs]
    if found:
        logger.error(
            "the identities of %d jobs were missing; they are known as %s now", len(found), ", ".join(found[:5])
        )
    return found


def _adopt(step: Step, seq: int) -> str:
    id = lost_id(seq)
    step.run("identity_lost", seq, id, LOST_PAYLOAD, step.now)
    return id


def lost_id(seq: int) -> str:
    """The id of a job whose own is lost."""
    return f"lost-{seq}"
