"""How a worker stops: it claims nothing more, waits for its jobs, and then hands back those that still run.

A worker that is asked to stop gives its jobs a grace period. When that is over, running job functions are cancelled and
get `UNWIND_SECONDS` to end; those that do not are left behind. A store that fails gets `LAST_TRIES` seconds more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from enum import Enum

from ..model.names import plural
from .executor import RunsJobs
from .run import Run, Stop

logger = logging.getLogger("fairlane.worker")
UNWIND_SECONDS = 3.0
"""How long cancelled job functions may take to end before they are left behind."""
LAST_TRIES = 5.0
"""How long a stopping worker goes on writing results to a store that fails."""


class Phase(Enum):
    """What a worker is doing; the value is the reason that `/readyz` reports."""

    STARTING = "the worker is not registered yet"
    SERVING = "the worker claims jobs"
    SESSION_LOST = "the session was lost; the worker is registering again"
    OUT_OF_CONTACT = "the store has not renewed the session in time"
    STOPPING = "the worker is stopping"


class Shutdown:
    """The deadlines of a stop, once it is requested."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self.requested = asyncio.Event()
        self._grace_ends = 0.0
        self.next_step_at = 0.0
        """When `hand_back` is to be called next, by the monotonic clock."""
        self._unwinding = False

    def request(self, *, now: bool) -> None:
        """Stop after the grace period, or, with `now`, at once. A repeated request can only end the grace earlier."""
        if now or not self.requested.is_set():
            self._grace_ends = self.next_step_at = time.monotonic() + (0 if now else self._grace)
        self.requested.set()

    def hand_back(self, executor: RunsJobs, runs: Iterable[Run], now: float) -> None:
        """Cancel the job functions that still run; called again, leave them behind."""
        left = [run for run in runs if not run.ended]
        if left:
            still = "still runs" if len(left) == 1 else "still run"
            logger.warning("handing back %s that %s", plural(len(left), "job"), still)
        for run in left:
            if self._unwinding:
                executor.abandon(run)
            else:
                executor.stop(run, Stop.HAND_BACK)
        self._unwinding = True
        self.next_step_at = now + UNWIND_SECONDS

    async def end_all(self, executor: RunsJobs, runs: Iterable[Run]) -> None:
        """End every job function that still runs, in at most `UNWIND_SECONDS`."""
        left = [run for run in runs if not run.ended]
        for run in left:
            executor.stop(run, Stop.HAND_BACK)
        tasks = [run.body for run in left if run.body is not None and not run.ended]
        if tasks:
            await asyncio.wait(tasks, timeout=UNWIND_SECONDS)
        for run in left:
            executor.abandon(run)

    def may_retry(self) -> bool:
        """Whether to try again when the store fails: always before a stop, and for a short time after its grace."""
        return not self.requested.is_set() or time.monotonic() < self._grace_ends + LAST_TRIES

    async def grace_over(self, more: float = 0.0) -> None:
        """Return when a stop was requested, and its grace period and `more` seconds are over."""
        await self.requested.wait()
        while (left := self._grace_ends + more - time.monotonic()) > 0:  # noqa: ASYNC110 - see below
            # In short steps: a second request may end the grace period earlier.
            await asyncio.sleep(min(left, 0.5))

    async def overdue(self) -> None:
        """Return when a worker that was asked to stop should have ended."""
        await self.grace_over(UNWIND_SECONDS + LAST_TRIES + 1.0)
