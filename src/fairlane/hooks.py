"""Hooks of an application: functions that run when a worker starts and stops, and around every task function.

An `around_job` hook is a generator that takes the job and yields once: the code before the ``yield`` runs before the
task function, the ``yield`` evaluates to its result or raises its exception, and the rest runs after it. A plain
generator wraps coroutines and plain functions alike; so does an async one, whose steps run on the event loop.

A hook can make a run fail by raising. It cannot make a failed run succeed: an exception that a hook catches and does
not raise again still propagates, so that a hook that only observes cannot hide a failure.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextvars import Context, ContextVar, Token, copy_context
from types import SimpleNamespace
from typing import Any, TypeVar

from .errors import FairlaneError, InvalidInput
from .runtime.running_job import RunningJob

T = TypeVar("T")


class RunningWorker:
    """The worker that runs the current code. It exists from before its first job until after its last one.

    `state` is a namespace for what its jobs share: ``worker.state.pool = await connect()``. A child process for
    isolated tasks has its own state, filled by the same hooks; `isolated` is True there.
    """

    __slots__ = ("isolated", "state")

    def __init__(self, *, isolated: bool = False) -> None:
        self.state = SimpleNamespace()
        self.isolated = isolated

    def enter(self) -> Token[RunningWorker | None]:
        """Make this the current worker of this context and of every task started from it. Called by the worker."""
        return _current.set(self)

    def leave(self, token: Token[RunningWorker | None]) -> None:
        """Undo `enter`, given the token that it returned. Called by the worker when it has ended."""
        _current.reset(token)


_current: ContextVar[RunningWorker | None] = ContextVar("fairlane_worker", default=None)


def current_worker() -> RunningWorker:
    """The worker that runs the calling code: in hooks and task functions, also in threads and child processes."""
    worker = _current.get()
    if worker is None:
        raise FairlaneError(
            "current_worker() was called outside a worker; it works in hooks and task functions that a worker runs "
            "(in tests, that the lab of fairlane.testing runs)"
        )
    return worker


WorkerHook = Callable[[RunningWorker], object]
"""A function or coroutine function; its return value is ignored."""
AroundHook = Callable[[RunningJob], Iterator[None] | AsyncIterator[None]]
"""A generator function, plain or async, that yields once."""
Step = Callable[[Coroutine[Any, Any, Any], Context], Any]
"""Runs a coroutine to its end in an event loop and returns its result, for code that has no loop of its own."""
_Entered = Generator[None, Any, None] | AsyncGenerator[None, Any]


class Hooks:
    """The hooks of one application, each kind in the order of declaration."""

    __slots__ = ("around", "start", "stop")

    def __init__(self) -> None:
        self.start: list[WorkerHook] = []
        self.stop: list[WorkerHook] = []
        self.around: list[AroundHook] = []

    def add_start(self, hook: WorkerHook) -> None:
        """Run `hook` before a worker begins."""
        self.start.append(_checked("on_worker_start", hook, "the worker"))

    def add_stop(self, hook: WorkerHook) -> None:
        """Run `hook` after a worker has ended."""
        self.stop.append(_checked("on_worker_stop", hook, "the worker"))

    def add_around(self, hook: AroundHook) -> None:
        """Wrap `hook` around every task function, inside the hooks added before."""
        if not (inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook)):
            raise InvalidInput(
                "around_job",
                f"{name_of(hook)} must be a generator that yields once, where the task function runs: "
                "`def name(job): …; result = yield; …`, or the same with `async def`",
            )
        self.around.append(_checked("around_job", hook, "the job"))


H = TypeVar("H", bound=Callable[..., Any])


def _checked(field: str, hook: H, argument: str) -> H:
    if not callable(hook):
        raise InvalidInput(field, f"must decorate a function, not a {type(hook).__name__}")
    try:
        inspect.signature(hook).bind(None)
    except TypeError:
        raise InvalidInput(field, f"{name_of(hook)} must take one argument, {argument}") from None
    except ValueError:
        # A builtin without a signature cannot be checked.
        pass
    return hook


def name_of(hook: object) -> str:
    """The name of a hook in messages."""
    return getattr(hook, "__qualname__", None) or repr(hook)


# -- around a task function ------------------------------------------------------------------------------------------


async def run_around(hooks: Sequence[AroundHook], job: RunningJob, body: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine inside hooks, the first of them outermost. Returns or raises what it or a hook does."""
    entered: list[_Entered] = []
    result: Any = None
    error: BaseException | None = None
    try:
        for hook in hooks:
            around = _make(hook, job)
            await _enter(around) if isinstance(around, AsyncGenerator) else _enter_plain(around)
            entered.append(around)
        result = await body()
    except GeneratorExit:
        # The event loop is closed: nothing can be awaited any more.
        raise
    except BaseException as exc:
        error = exc
    while entered:
        around = entered.pop()
        if isinstance(around, AsyncGenerator):
            try:
                error = await _leave(around, result, error)
            except asyncio.CancelledError as exc:
                error = exc
        else:
            error = _leave_plain(around, result, error)
    if error is not None:
        raise error
    return result


def run_around_plain(hooks: Sequence[AroundHook], job: RunningJob, body: Callable[[], Any], step: Step) -> Any:
    """Run a plain function inside hooks, all in this thread except the steps of async hooks, which `step` runs.

    All of them share a copy of the context, so that the function sees context variables that a hook sets.
    """
    context = copy_context()
    entered: list[_Entered] = []
    result: Any = None
    error: BaseException | None = None
    try:
        for hook in hooks:
            around = context.run(_make, hook, job)
            if isinstance(around, AsyncGenerator):
                step(_enter(around), context)
            else:
                context.run(_enter_plain, around)
            entered.append(around)
        result = context.run(body)
    except BaseException as exc:
        error = exc
    while entered:
        around = entered.pop()
        if isinstance(around, AsyncGenerator):
            try:
                error = step(_leave(around, result, error), context)
            except BaseException as exc:
                error = exc
        else:
            error = context.run(_leave_plain, around, result, error)
    if error is not None:
        raise error
    return result


def steps_on(loop: asyncio.AbstractEventLoop) -> Step:
    """A `Step` that runs coroutines on `loop` and blocks the calling thread until they end."""

    def step(coroutine: Coroutine[Any, Any, Any], context: Context) -> Any:
        done: Future[Any] = Future()

        def ended(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                done.set_exception(asyncio.CancelledError())
            elif (exc := task.exception()) is not None:
                done.set_exception(exc)
            else:
                done.set_result(task.result())

        def begin() -> None:
            loop.create_task(coroutine, context=context).add_done_callback(ended)

        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:
            coroutine.close()
            raise
        return done.result()

    return step


def _make(hook: AroundHook, job: RunningJob) -> _Entered:
    made: Any = hook(job)
    around: _Entered = made
    return around


def _enter_plain(around: Generator[None, Any, None]) -> None:
    try:
        next(around)
    except StopIteration:
        raise _never_yielded(around) from None


async def _enter(around: AsyncGenerator[None, Any]) -> None:
    try:
        await around.asend(None)
    except StopAsyncIteration:
        raise _never_yielded(around) from None


def _leave_plain(around: Generator[None, Any, None], result: Any, error: BaseException | None) -> BaseException | None:
    """Resume a hook with the result or the error. Returns the error that propagates, if there is one."""
    trace = None if error is None else error.__traceback__
    try:
        if error is None:
            around.send(result)
        else:
            around.throw(error)
    except StopIteration:
        return error
    except BaseException as exc:
        return _raised(exc, error, trace)
    around.close()
    return _yielded_twice(around)


async def _leave(around: AsyncGenerator[None, Any], result: Any, error: BaseException | None) -> BaseException | None:
    trace = None if error is None else error.__traceback__
    try:
        if error is None:
            await around.asend(result)
        else:
            await around.athrow(error)
    except StopAsyncIteration:
        return error
    except GeneratorExit:
        raise
    except BaseException as exc:
        return _raised(exc, error, trace)
    await around.aclose()
    return _yielded_twice(around)


def _raised(exc: BaseException, error: BaseException | None, trace: Any) -> BaseException:
    """The error that a hook raised. The function's own exception gets its traceback back, without frames of hooks."""
    wrapped = isinstance(exc, RuntimeError) and isinstance(error, StopIteration | StopAsyncIteration)
    if error is not None and (exc is error or (wrapped and exc.__cause__ is error)):
        error.__traceback__ = trace
        return error
    return exc


def _never_yielded(around: _Entered) -> FairlaneError:
    return FairlaneError(
        f"the around_job hook {name_of(around)} ended without a yield, so the task function did not run"
    )


def _yielded_twice(around: _Entered) -> FairlaneError:
    return FairlaneError(f"the around_job hook {name_of(around)} yielded twice; the task function runs once")
