"""Notices a body that holds the event loop, and says which one: everything else in the process waits for it.

Runs beside the keeper, in another thread, so it sees what the loop itself cannot. The job is found through the frames
of the main thread: the executor's own frame is among them while a body runs.
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
    """Asks the loop for a sign of life, and reports when none comes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int, patience: float) -> None:
        self._loop = loop
        self._thread = thread
        self._patience = patience
        self._answered = time.monotonic()
        self.longest = 0.0
        """The longest time the loop was held, in seconds."""

    def _answer(self) -> None:
        self._answered = time.monotonic()

    async def run(self, _store: object = None) -> None:
        """Watch until cancelled."""
        while True:
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return  # the loop has ended
            reported = False
            while self._answered < asked:
                await asyncio.sleep(min(0.1, self._patience / 2))
                held = time.monotonic() - asked
                if held > self._patience and self._answered < asked and not reported:
                    reported = True
                    self._report(held)
            if reported:
                self.longest = max(self.longest, self._answered - asked)
                logger.warning("the event loop runs again; it was held for %.1f s", self._answered - asked)
            await asyncio.sleep(self._patience / 2)

    def _report(self, held: float) -> None:
        frame = sys._current_frames().get(self._thread)
        where, run = _look(frame)
        who = "something" if run is None else f"task {run.claimed.task} (job {run.claimed.id})"
        logger.warning(
            "%s has held the event loop for %.1f s%s: nothing else runs in this process meanwhile. "
            "Await something, or make it a plain function, or give the task isolate=True",
            who,
            held,
            where,
        )


def _look(frame: FrameType | None) -> tuple[str, Run | None]:
    """Where the thread is, and the run whose body it is in."""
    where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None:
        if frame.f_code is Executor._run.__code__:
            run = frame.f_locals.get("run")
            return where, run if isinstance(run, Run) else None
        frame = frame.f_back
    return where, None
