"""An event loop in a thread, for code that has none. It is made at the first call, and anew after a fork."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..errors import FairlaneError

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._door = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Set pid last: a thread that reads its own pid must see the other fields reset.
        self._pid = os.getpid()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` in the loop, and wait for it here. The caller's context variables are seen there."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise FairlaneError(
                "a blocking call inside an event loop would stop the loop: use the async one, with await"
            )
        running = asyncio.run_coroutine_threadsafe(_awaited(work), self._started())
        try:
            return running.result()
        except BaseException:
            # Nobody waits any more, say after Ctrl-C; after an error of the work itself this changes nothing.
            running.cancel()
            raise

    def post(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work` in the loop, if it is still there, without waiting for it."""
        loop = self._loop
        if loop is not None and self._pid == os.getpid() and loop.is_running():
            asyncio.run_coroutine_threadsafe(_awaited(work), loop)

    def stop(self) -> None:
        """End the thread. The next call makes another one."""
        if self._pid != os.getpid():
            self._forget()
        with self._door:
            # Together: a caller may make another pair as soon as the door is open.
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            # The thread, and even the lock as it was held, stayed with the parent.
            self._forget()
        with self._door:
            if self._loop is None:
                # Not uvloop: programs without an event loop of their own are those that fork.
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="fairlane-blocking", daemon=True
                )
                self._thread.start()
            return self._loop


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
