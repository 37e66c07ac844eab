"""What the log says of each run: a line for everything that went wrong, and, for those who look closely, for the rest.

Never the arguments or the result. Of an error only its last line, which has the message.
"""

from __future__ import annotations

import logging

from ..states import Move, Transition
from .run import Run

logger = logging.getLogger("fairlane.worker.jobs")
LONGEST = 300


def tell(run: Run, transition: Transition | None) -> None:
    """Tell how a run has ended, once the store knows it."""
    if transition is None:
        return
    move = transition.move
    if move is Move.COMPLETE:
        # Asked first: a job that does nothing takes less time than a line about it.
        if logger.isEnabledFor(logging.DEBUG):
            _log(logging.DEBUG, run, "completed")
    elif move is Move.FAIL:
        _log(logging.ERROR, run, f"failed, no retry is left: {_last(transition)}")
    elif move is Move.RETRY:
        _log(logging.WARNING, run, f"runs again in {transition.delay:.1f} s: {_last(transition)}")
    else:
        _log(logging.INFO, run, move.value.replace("_", " "))


def _log(level: int, run: Run, words: str) -> None:
    job = run.claimed
    about = {"job": job.id, "task": job.task, "attempt": job.attempt}
    logger.log(level, "%s %s, attempt %d of %d: %s", job.task, job.id, job.attempt, job.retries + 1, words, extra=about)


def _last(transition: Transition) -> str:
    last = (transition.error or "").rstrip().rpartition("\n")[2] or str(transition.reason)
    return last if len(last) <= LONGEST else last[:LONGEST] + "…"
