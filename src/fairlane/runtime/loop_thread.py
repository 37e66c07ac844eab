"""An event loop in a thread, for code that has none. It is made at the first call, and again after a fork."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..errors import FairlaneError
from ..store.per_process import PerProcess

T = TypeVar("T")


class _Running:
    """The loop and the thread of one process; both None while there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None


class LoopThread:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._running = PerProcess(_Running)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` in the loop and wait for it here. It sees the caller's context variables."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise FairlaneError(
                "a blocking call inside an event loop would stop the loop: use the async version, with await"
            )
        return self.wait(work)

    def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Like `run`, but also inside an event loop, which stands still meanwhile.

        For integrations whose own blocking calls are made there anyway.
        """
        running = self._running.get()
        with running.lock:
            # Under the lock: a loop that was stopped meanwhile may never finish the work, and the wait would not end.
            future = asyncio.run_coroutine_threadsafe(_awaited(work), _started(running))
        try:
            return future.result()
        except BaseException:
            # The wait itself was interrupted, for example by Ctrl-C. After an error of the work this changes nothing.
            future.cancel()
            raise

    def post(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work` in the loop without waiting for it. Does nothing when there is no running loop."""
        running = self._running.existing()
        loop = None if running is None else running.loop
        if loop is not None and loop.is_running():
            asyncio.run_coroutine_threadsafe(_awaited(work), loop)

    def stop(self) -> None:
        """End the thread. The next call starts another one."""
        running = self._running.get()
        with running.lock:
            # Both under the lock: another caller may start a new pair as soon as it is released.
            loop, thread = running.loop, running.thread
            running.loop = running.thread = None
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(loop.stop)
            thread.join()


def _started(running: _Running) -> asyncio.AbstractEventLoop:
    """The loop, started if there is none. The caller holds the lock."""
    if running.loop is None:
        # Not uvloop: programs without an event loop of their own are those that fork.
        loop = running.loop = asyncio.new_event_loop()
        running.thread = threading.Thread(target=_serve, args=(loop,), name="fairlane-blocking", daemon=True)
        running.thread.start()
    return running.loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
