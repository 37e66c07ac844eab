"""The thread of a test without an event loop: plain bodies run in it, while the lab works in a loop of its own.

So a body sees what is bound to the test's thread, such as the database connection of a web framework, and a debugger
stops where one expects it.
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


class Errand:
    """A function on its way to another thread, with the context it is called in, and its outcome on the way back.

    No future, because that would put its own lines into the traceback of the body, before the user's.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._context = copy_context()
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function."""
        try:
            self._result = self._context.run(self._function)
        except BaseException as exc:
            self._error = exc
            if isinstance(exc, KeyboardInterrupt):
                raise
        finally:
            self._done.set()

    def outcome(self) -> Any:
        """Wait until it was called; return or raise as it did."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Caller:
    """Waits for work in a loop's thread, and runs here what that work hands over."""

    def __init__(self) -> None:
        self._loop = LoopThread()
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._busy = threading.Lock()

    def wait_for(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` in the loop's thread, and meanwhile what it hands over."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise FairlaneError("a blocking lab would stop this event loop: use testing.embedded, with await")
        # Nothing of a call that was interrupted may reach this one.
        errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._errands = errands
        done: Future[T] = Future()
        threading.Thread(target=self._follow, args=(work, done, errands), name="fairlane-lab", daemon=True).start()
        try:
            while (errand := errands.get()) is not None:
                errand.run()
        except BaseException:
            # Ctrl-C: nobody waits for the work any more.
            self._loop.stop()
            raise
        return done.result()

    def _follow(self, work: Callable[[], Awaitable[T]], done: Future[T], errands: SimpleQueue[Errand | None]) -> None:
        try:
            done.set_result(self._loop.run(work))
        except BaseException as exc:
            done.set_exception(exc)
        errands.put(None)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the waiting thread. If that is in a body already, which waits for this one, here."""
        if not self._busy.acquire(blocking=False):
            return function()
        try:
            errand = Errand(function)
            self._errands.put(errand)
            return errand.outcome()
        finally:
            self._busy.release()

    def threads(self, usual: RunsFunctions) -> RunsFunctions:
        """What runs functions in the waiting thread; those of `usual` wait for them."""
        return _InCaller(self, usual)

    def close(self) -> None:
        """End the loop's thread."""
        self._loop.stop()


class _InCaller:
    """Hands functions over to the thread of a test."""

    def __init__(self, caller: Caller, usual: RunsFunctions) -> None:
        self._caller = caller
        self._usual = usual

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._usual.run(self._caller.call, partial(function, *args))
