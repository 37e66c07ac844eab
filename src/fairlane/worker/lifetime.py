"""The start and stop hooks of a worker: start hooks run before its session is registered, stop hooks after its jobs
have ended.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from ..errors import FairlaneError
from ..hooks import Hooks, RunningWorker, WorkerHook, name_of
from .threads import RunsFunctions, Threads

logger = logging.getLogger("fairlane.worker")
STOP_SECONDS = 5.0
"""How long all `on_worker_stop` hooks together may take; after that they are left behind."""


class StoppedEarlyError(Exception):
    """The worker was stopped, and its grace period was over before its start hooks had ended."""


@asynccontextmanager
async def lifetime(
    hooks: Sequence[Hooks],
    threads: RunsFunctions | None = None,
    *,
    given_up: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[RunningWorker]:
    """Run the start hooks in the order of declaration, and at the end the stop hooks in reverse order.

    If a start hook raises, the block is not entered, no stop hook runs, and the error names the hook. If one has not
    ended when `given_up` returns, the same happens with `StoppedEarlyError`.
    """
    worker = RunningWorker()
    token = worker.enter()
    threads = threads or Threads(1)
    start = [hook for each in hooks for hook in each.start]
    try:
        if start:
            async with _bounded(given_up):
                for hook in start:
                    await _start(hook, worker, threads)
        try:
            yield worker
        finally:
            await _stop([hook for each in hooks for hook in each.stop][::-1], worker, threads)
    finally:
        worker.leave(token)


@asynccontextmanager
async def _bounded(given_up: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Cancel the block once `given_up` has returned."""
    if given_up is None:
        yield
        return
    limit = asyncio.timeout(None)

    async def watch() -> None:
        await given_up()
        limit.reschedule(asyncio.get_running_loop().time())

    watching = asyncio.ensure_future(watch())
    try:
        async with limit:
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        logger.warning("the worker was stopped before its on_worker_start hooks had ended")
        raise StoppedEarlyError from None


async def _start(hook: WorkerHook, worker: RunningWorker, threads: RunsFunctions) -> None:
    try:
        await _call(hook, worker, threads)
    except Exception as exc:
        logger.error("the worker does not start: its on_worker_start hook %s failed", name_of(hook), exc_info=exc)
        raise FairlaneError(
            f"the worker does not start: its on_worker_start hook {name_of(hook)} raised {type(exc).__name__}: {exc}"
        ) from exc


async def _stop(hooks: Sequence[WorkerHook], worker: RunningWorker, threads: RunsFunctions) -> None:
    ends = time.monotonic() + STOP_SECONDS
    for hook in hooks:
        stopping = asyncio.ensure_future(_call(hook, worker, threads))
        await asyncio.wait([stopping], timeout=max(0.0, ends - time.monotonic()))
        if not stopping.done():
            stopping.cancel()
            logger.error("the on_worker_stop hook %s took too long and was left behind", name_of(hook))
        elif stopping.cancelled():
            logger.error("the on_worker_stop hook %s was cancelled", name_of(hook))
        elif (exc := stopping.exception()) is not None:
            logger.error("the on_worker_stop hook %s failed", name_of(hook), exc_info=exc)


async def _call(hook: WorkerHook, worker: RunningWorker, threads: RunsFunctions) -> None:
    """Call a hook: a coroutine function here, a plain one in a thread."""
    if inspect.iscoroutinefunction(hook):
        await hook(worker)
        return
    answer = await threads.run(hook, worker)
    if inspect.isawaitable(answer):
        await answer
