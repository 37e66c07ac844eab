"""Hooks of an application: what runs when a worker starts and stops, and what stands around every body.

An `around_job` hook is a generator that takes the job and yields once: what stands before the ``yield`` runs before the
body, the ``yield`` evaluates to the body's result or raises the body's exception, and the rest runs after it. A plain
generator stands around coroutines and plain functions alike; an async one too, with its steps on the event loop.

A hook can make a run fail, by raising. It cannot make a failed run succeed: an exception that a hook catches and does
not raise again goes on all the same, so that a hook which only looks cannot lose a failure.
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
    """The worker whose bodies run here. It begins before the first body and ends after the last one.

    `state` is a place for what they share: ``worker.state.pool = await connect()``. A child process for isolated bodies
    has a state of its own, filled by the same hooks; `isolated` is True there.
    """

    __slots__ = ("isolated", "state")

    def __init__(self, *, isolated: bool = False) -> None:
        self.state = SimpleNamespace()
        self.isolated = isolated

    def enter(self) -> Token[RunningWorker | None]:
        """Called where the worker begins: makes it the current one of this context, and of all that it starts."""
        return _current.set(self)

    def leave(self, token: Token[RunningWorker | None]) -> None:
        """Called where the worker has ended, with what `enter` returned."""
        _current.reset(token)


_current: ContextVar[RunningWorker | None] = ContextVar("fairlane_worker", default=None)


def current_worker() -> RunningWorker:
    """The worker that runs the code here: in hooks and bodies, also in threads and child processes."""
    worker = _current.get()
    if worker is None:
        raise FairlaneError(
            "current_worker() is called outside of a worker: only hooks and bodies that a worker runs have one "
            "(in tests, those that the lab of fairlane.testing runs)"
        )
    return worker


WorkerHook = Callable[[RunningWorker], object]
"""A function or coroutine function; what it returns is not used."""
AroundHook = Callable[[RunningJob], Iterator[None] | AsyncIterator[None]]
"""A generator function or an async one that yields once."""
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
        """Let `hook` stand around every body, inside those that are there already."""
        if not (inspect.isgeneratorfunction(hook) or inspect.isasyncgenfunction(hook)):
            raise InvalidInput(
                "around_job",
                f"{name_of(hook)} must be a generator that yields once, where the body runs: "
                "`def name(job): …; result = yield; …`, or the same with `async def`",
            )
        self.around.append(_checked("around_job", hook, "the job"))


H = TypeVar("H", bound=Callable[..., Any])


def _checked(field: str, hook: H, argument: str) -> H:
    if not callable(hook):
        raise InvalidInput(field, f"decorates a function, not a {type(hook).__name__}")
    try:
        inspect.signature(hook).bind(None)
    except TypeError:
        raise InvalidInput(field, f"{name_of(hook)} must take one argument, {argument}") from None
    except ValueError:
        # A builtin without a signature: nothing to compare with.
        pass
    return hook


def name_of(hook: object) -> str:
    """What a message calls a hook."""
    return getattr(hook, "__qualname__", None) or repr(hook)


# -- around a body ---------------------------------------------------------------------------------------------------


async def run_around(hooks: Sequence[AroundHook], job: RunningJob, body: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine inside hooks, the first of them outermost; returns or raises as it did, or as a hook did."""
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
        # The event loop is gone: nothing can be awaited any more.
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
    """Run a plain function inside hooks, all in this thread but for the steps of async ones, which `step` runs.

    All of it shares one context of its own, so that the body sees a context variable that any hook sets.
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
    """Runs coroutines on `loop`, for a thread that waits for them."""

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
    """Let a hook see how the body ended. Returns the error that goes on, if there is one."""
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
    """What a hook raised. The body's own exception passes without a trace of the hooks it went through."""
    wrapped = isinstance(exc, RuntimeError) and isinstance(error, StopIteration | StopAsyncIteration)
    if error is not None and (exc is error or (wrapped and exc.__cause__ is error)):
        error.__traceback__ = trace
        return error
    return exc


def _never_yielded(around: _Entered) -> FairlaneError:
    return FairlaneError(f"the around_job hook {name_of(around)} ended without a yield, so the body did not run")


def _yielded_twice(around: _Entered) -> FairlaneError:
    return FairlaneError(f"the around_job hook {name_of(around)} yielded twice; a body runs once")
