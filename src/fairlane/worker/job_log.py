"""The log record of each run: its outcome and duration on one line, and the traceback of an error.

Arguments and results are never logged. The traceback is the stored one: from the user's first frame on, and bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from types import TracebackType

from ..error_text import error_summary
from ..model.job import JobState, Verdict
from ..model.names import plural
from ..model.retry import counted
from ..model.states import Move, Transition
from .body import users_frames
from .run import Run

logger = logging.getLogger("fairlane.worker.jobs")
worker_logger = logging.getLogger("fairlane.worker")
LONGEST = 300
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def log_runs(endings: Iterable[tuple[Run, Transition | None]], verdicts: Sequence[Verdict]) -> None:
    """Log how runs have ended, once the store has confirmed it."""
    cancelled = {verdict.id for verdict in verdicts if verdict.state is JobState.CANCELLED}
    for run, transition in endings:
        log_run(run, transition, cancelled=run.claimed.id in cancelled)
    if stale := [verdict.id for verdict in verdicts if not verdict.accepted]:
        worker_logger.warning(
            "%s %s stale and discarded: other workers own these jobs (%s)",
            plural(len(stale), "result"),
            "was" if len(stale) == 1 else "were",
            ", ".join(stale[:5]),
        )


def log_run(run: Run, transition: Transition | None, *, cancelled: bool = False) -> None:
    """Log how a run has ended. With `cancelled` the job is cancelled, whatever its transition was: a cancel was
    requested while it ran.
    """
    # A run that is kept alive must not keep the frames of its function alive.
    error, run.error = run.error, None
    if transition is None:
        return
    move = transition.move
    overruled = cancelled and move is not Move.CANCEL
    error_level = logging.WARNING if overruled or move is Move.RETRY else logging.ERROR
    level = error_level if move in (Move.FAIL, Move.RETRY) else logging.INFO
    if move is Move.DECLINE:
        # The executor has logged a warning for the task; the job itself may be declined any number of times.
        level = logging.DEBUG
    # Checked first: making a record takes longer than a job that does nothing.
    if not logger.isEnabledFor(level):
        return
    if overruled:
        ended = "" if level <= logging.INFO else f"; the run ended with: {_summary(transition)}"
        _log(level, run, f"cancelled, as was requested meanwhile{ended}", transition, error, Move.CANCEL)
    elif level <= logging.INFO:
        _log(level, run, move.value.replace("_", " "), transition)
    elif move is Move.FAIL:
        again = "no retry is left" if run.claimed.attempt > run.claimed.retries else "it is not retried"
        _log(level, run, f"failed, {again}: {_summary(transition)}", transition, error)
    else:
        _log(level, run, f"runs again in {transition.delay:.1f} s: {_summary(transition)}", transition, error)


def _log(
    level: int,
    run: Run,
    words: str,
    transition: Transition,
    error: Exception | None = None,
    outcome: Move | None = None,
) -> None:
    job = run.claimed
    about = {
        "job": job.id,
        "task": job.task,
        "attempt": job.attempt,
        "queue": job.queue,
        "lane": job.lane,
        "outcome": (outcome or transition.move).value,
        "wait": _rounded(job.waited),
        "run": _rounded(run.seconds),
    }
    where = job.queue if job.lane is None else f"{job.queue}, lane {job.lane}"
    times = "".join(
        f", {word} {value:.3f} s"
        for word, value in (("waited", about["wait"]), ("ran", about["run"]))
        if value is not None
    )
    message = "%s %s, attempt %s in queue %s%s: %s"
    args = (job.task, job.id, counted(job.attempt, job.retries), where, times, words)
    record = logger.makeRecord(logger.name, level, __file__, 0, message, args, _exc_info(error), "log_run", about)
    if transition.error and level > logging.INFO:
        # The stored text: formatters use it instead of formatting the traceback, so it is bounded.
        record.exc_text = transition.error.rstrip()
    logger.handle(record)


def _exc_info(error: Exception | None) -> ExcInfo | None:
    return None if error is None else (type(error), error, users_frames(error.__traceback__))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _summary(transition: Transition) -> str:
    summary = error_summary(transition.error) or str(transition.reason)
    return summary if len(summary) <= LONGEST else summary[:LONGEST] + "…"
