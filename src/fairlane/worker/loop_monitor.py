"""Detects and names a job that blocks the event loop, on which everything else in the process waits.

It runs in the lease keeper's thread, which a blocked loop does not stop. The job is found through the stack of the
main thread, which contains the executor's frame while a job runs.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from types import FrameType

from .executor import Executor
from .run import Run

logger = logging.getLogger("fairlane.worker")


class LoopMonitor:
    """Schedules callbacks on the loop, and logs a warning when one does not run in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int, threshold: float) -> None:
        self._loop = loop
        self._thread = thread
        self._threshold = threshold
        self._answered = time.monotonic()
        self.longest = 0.0
        """The longest time the loop was blocked, in seconds."""

    def _answer(self) -> None:
        self._answered = time.monotonic()

    async def run(self, _store: object = None) -> None:
        """Watch until cancelled."""
        while True:
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return  # the loop is closed
            reported = False
            while self._answered < asked:
                await asyncio.sleep(min(0.1, self._threshold / 2))
                held = time.monotonic() - asked
                if held > self._threshold and self._answered < asked and not reported:
                    reported = True
                    self._report(held)
            if reported:
                self.longest = max(self.longest, self._answered - asked)
                logger.warning("the event loop runs again; it was blocked for %.1f s", self._answered - asked)
            await asyncio.sleep(self._threshold / 2)

    def _report(self, held: float) -> None:
        frame = sys._current_frames().get(self._thread)
        where, run = _blocking_run(frame)
        culprit = "something" if run is None else f"task {run.claimed.task} (job {run.claimed.id})"
        logger.warning(
            "%s has blocked the event loop for %.1f s%s: nothing else runs in this process meanwhile. "
            "Await something, or make it a plain function, or give the task isolate=True",
            culprit,
            held,
            where,
        )


def _blocking_run(frame: FrameType | None) -> tuple[str, Run | None]:
    """Where the thread is, and the run whose function it is in."""
    where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None:
        if frame.f_code is Executor._run.__code__:
            run = frame.f_locals.get("run")
            return where, run if isinstance(run, Run) else None
        frame = frame.f_back
    return where, None
