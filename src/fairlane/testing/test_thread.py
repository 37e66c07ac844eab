"""The thread of a test without an event loop: plain functions run in it, while the lab works in a loop of its own.

So a function sees what is bound to the test's thread, such as the database connection of a web framework, and a
debugger stops where one expects it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ..errors import FairlaneError
from ..runtime.loop_thread import LoopThread
from ..worker.threads import RunsFunctions

T = TypeVar("T")


class ThreadCall:
    """A call for another thread, with the context of its caller, and its outcome.

    Not a future, because that would put its own frames into the traceback, before the user's.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._context = copy_context()
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call."""
        try:
            self._result = self._context.run(self._function)
        except BaseException as exc:
            self._error = exc
            if isinstance(exc, KeyboardInterrupt):
                raise
        finally:
            self._done.set()

    def outcome(self) -> Any:
        """Wait for the call; return or raise what it did."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class TestThread:
    """Waits for work in a loop's thread, and makes the calls here that the work requests."""

    __test__ = False  # for pytest, where a test imports it

    def __init__(self) -> None:
        self._loop = LoopThread()
        self._calls: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._busy = threading.Lock()

    def wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` in the loop's thread, and meanwhile the calls it requests."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise FairlaneError("a blocking lab would block this event loop: use testing.embedded, with await")
        # A new queue: calls of earlier work that was interrupted must not be made now.
        calls: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._calls = calls
        done: Future[T] = Future()
        threading.Thread(target=self._follow, args=(work, done, calls), name="fairlane-lab", daemon=True).start()
        try:
            while (call := calls.get()) is not None:
                call.run()
        except BaseException:
            # Ctrl-C: the work is given up.
            self._loop.stop()
            raise
        return done.result()

    def _follow(self, work: Callable[[], Awaitable[T]], done: Future[T], calls: SimpleQueue[ThreadCall | None]) -> None:
        try:
            done.set_result(self._loop.run(work))
        except BaseException as exc:
            done.set_exception(exc)
        calls.put(None)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the test's thread, or here if that thread already runs one, which waits for this one."""
        if not self._busy.acquire(blocking=False):
            return function()
        try:
            call = ThreadCall(function)
            self._calls.put(call)
            return call.outcome()
        finally:
            self._busy.release()

    def threads(self, usual: RunsFunctions) -> RunsFunctions:
        """A runner that runs functions in the test's thread, while threads of `usual` wait for them."""
        return _InTestThread(self, usual)

    def close(self) -> None:
        """End the loop's thread."""
        self._loop.stop()


class _InTestThread:
    """Runs functions in the thread of a test."""

    def __init__(self, test_thread: TestThread, usual: RunsFunctions) -> None:
        self._test_thread = test_thread
        self._usual = usual

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._usual.run(self._test_thread.call, partial(function, *args))
