"""Runs the function of one job: arguments in, an ending out, whatever happens. Used in the worker and in its children.

An ending can be encoded as JSON, so that a child process can send it to its worker.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import random
from types import TracebackType
from typing import Any

import msgspec

from ..errors import Cancel, Control, Fail, InvalidInput, Retry, Snooze
from ..hooks import Step, run_around, run_around_plain
from ..model import codec, states
from ..model.job import Claimed, Held, Reason
from ..model.names import RESULT_BYTES
from ..model.origin import class_names
from ..model.states import Transition
from ..runtime.running_job import RunningJob
from ..store.transactions import RunTransaction
from ..task import Task

PACKAGE = str(Path(__file__).parent.parent)
INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
LIBRARIES = (PACKAGE, "<frozen ", *INSTALLED)
"""Where code is that is not the application's."""


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The function returned; `result` is JSON."""

    result: bytes
    committed: bool = False
    """The job was completed in the transaction of its function; writing the completion again is a repetition."""


class Raised(msgspec.Struct, frozen=True, tag="raised", kw_only=True):
    """The run failed."""

    reason: Reason
    error: str
    group: str
    delay: float | None = None
    """How long to wait before the retry, if the function decided that."""
    final: bool = False
    """The job is not retried."""
    kinds: tuple[str, ...] = ()
    """The names of the exception's classes, from a process that does not know which of them are retried."""


class Snoozed(msgspec.Struct, frozen=True, tag="snoozed"):
    """The function asked to be run later, uncharged."""

    delay: float


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """The function cancelled its job."""


Ending = Returned | Raised | Snoozed | Withdrawn


def read_arguments(task: Task[..., Any], job: Claimed) -> tuple[list[Any], dict[str, Any]] | Raised:
    """The arguments of a job, or its ending if they do not fit the task."""
    try:
        return task.arguments.read(job.payload)
    except InvalidInput as exc:
        return Raised(reason=Reason.BAD_PAYLOAD, error=str(exc), group="bad_payload", final=True)


def returned(value: Any) -> Ending:
    """The ending of a function that returned `value`. A result that cannot be JSON is not retried."""
    if value is None:
        return _NOTHING
    try:
        return Returned(codec.encode("result", value, RESULT_BYTES))
    except InvalidInput as exc:
        error = str(exc)
    except Exception as exc:
        # A custom encoder may raise anything.
        error = f"result: {_text(exc)}"
    if inspect.iscoroutine(value):
        value.close()
        error = (
            "result: the function returned a coroutine that was not awaited; a decorator around an `async def` "
            "must be an `async def` itself"
        )
    return Raised(reason=Reason.ERROR, error=error, group="result", final=True)


_NOTHING = Returned(b"null")


def raised(exc: BaseException, task: Task[..., Any] | None = None) -> Ending:
    """The ending of a function of `task` that raised `exc`."""
    if isinstance(exc, Control):
        try:
            return _controlled(exc)
        except InvalidInput as bad:
            exc = bad
    final = task is not None and not task.allows_retry(exc)
    kinds = class_names(type(exc)) if task is not None and task.bare else ()
    return Raised(reason=Reason.ERROR, error=_text(exc), group=_group(exc), final=final, kinds=kinds)


def run_plain(task: Task[..., Any], job: Claimed, running: RunningJob, step: Step) -> Ending:
    """Run a plain function in this thread; `step` runs the coroutines of its hooks."""
    arguments = read_arguments(task, job)
    if isinstance(arguments, Raised):
        return arguments
    args, kwargs = arguments
    try:
        if task.hooks is not None and task.hooks.around:
            value = run_around_plain(task.hooks.around, running, partial(task.function, *args, **kwargs), step)
        else:
            value = task.function(*args, **kwargs)
    except Exception as exc:
        running.failed(exc)
        return raised(exc, task)
    except GeneratorExit as exc:
        return raised(exc, task)
    return returned(value)


async def run_coroutine(task: Task[..., Any], job: Claimed, running: RunningJob) -> Ending:
    """Run a coroutine function in this asyncio task. A transaction that it opened ends with it."""
    arguments = read_arguments(task, job)
    if isinstance(arguments, Raised):
        return arguments
    args, kwargs = arguments
    try:
        if task.hooks is not None and task.hooks.around:
            ending = returned(await run_around(task.hooks.around, running, partial(task.function, *args, **kwargs)))
        else:
            ending = returned(await task.function(*args, **kwargs))
    except Exception as exc:
        running.failed(exc)
        ending = raised(exc, task)
    except BaseException:
        if (transaction := running.asked()) is not None:
            await transaction.roll_back()
        raise
    transaction = running.asked()
    if transaction is None:
        return ending
    ended = await _end_transaction(transaction, ending, job.held)
    if not (isinstance(ended, Returned) and ended.committed):
        running.rolled_back()
    return ended


async def _end_transaction(transaction: RunTransaction, ending: Ending, held: Held) -> Ending:
    """Commit or roll back the transaction of a function. Only a commit makes the job completed."""
    if not isinstance(ending, Returned):
        broken = await transaction.roll_back()
        return ending if broken is None else raised(broken)
    try:
        committed = await transaction.commit(states.complete(held, ending.result))
    except Exception as exc:
        return raised(exc)
    return Returned(ending.result, committed)


def transition_of(ending: Ending, job: Claimed, draw: Callable[[], float] = random) -> Transition:
    """The transition of a job that ended so, as the model decides."""
    held = job.held
    if isinstance(ending, Returned):
        return states.complete(held, ending.result)
    if isinstance(ending, Snoozed):
        return states.snooze(held, ending.delay)
    if isinstance(ending, Withdrawn):
        return states.cancel(held)
    if ending.final:
        return states.fail(held, ending.reason, ending.error, group=ending.group)
    after = states.after_error(
        held,
        attempt=job.attempt,
        retries=job.retries,
        backoff=job.backoff,
        draw=draw(),
        reason=ending.reason,
        error=ending.error,
        group=ending.group,
    )
    if ending.delay is not None and after.move is states.Move.RETRY:
        return states.retry(held, ending.delay, ending.reason, ending.error, group=ending.group)
    return after


def _controlled(exc: Control) -> Ending:
    if isinstance(exc, Snooze):
        delay = getattr(exc, "delay", 0.0)
        states.snooze(_NO_JOB, delay)
        return Snoozed(delay)
    if isinstance(exc, Cancel):
        return Withdrawn()
    # A subclass may not have called `super().__init__`.
    delay = getattr(exc, "delay", None) if isinstance(exc, Retry) else None
    if delay is not None:
        states.snooze(_NO_JOB, delay)
    return Raised(reason=Reason.ERROR, error=_text(exc), group=_group(exc), delay=delay, final=isinstance(exc, Fail))


_NO_JOB = Held("none", 0)


def _text(exc: BaseException) -> str:
    """The traceback from the user's first frame on, or only the class name if formatting it fails."""
    try:
        return "".join(traceback.format_exception(type(exc), exc, users_frames(exc.__traceback__)))
    except Exception:
        return f"{type(exc).__name__} (it cannot be formatted)"


def users_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the user's first frame on."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(PACKAGE):
        first = first.tb_next
    return first or frames


def _group(exc: BaseException) -> str:
    """The class of the error and where it was raised, without the parts of its message that vary.

    Of the frames, the innermost of the application counts: errors of all callers of a library are not one group.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(users_frames(exc.__traceback__))]
    own = [code for code in codes if not code.co_filename.startswith(LIBRARIES)] or codes
    return f"{type(exc).__name__} in {own[-1].co_name}" if own else type(exc).__name__
