"""How long calls wait for an answer: one timer for all calls of an event loop.

The driver can end a call by itself, with a timer for each: that costs a tenth of a short call (measured).
"""

from __future__ import annotations

import asyncio


class Wait:
    """One call under way."""

    __slots__ = ("cancelling", "deadline", "over", "task")

    def __init__(self, deadline: float, task: asyncio.Task[object]) -> None:
        self.deadline = deadline
        self.task = task
        self.cancelling = task.cancelling()
        self.over = False

    def is_why(self) -> bool:
        """Whether the task was cancelled because of this wait, and by nobody else. To be asked once."""
        return self.over and self.task.uncancel() <= self.cancelling


class Patience:
    """Cancels the tasks of calls that take too long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waits: set[Wait] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> Wait:
        """The running task begins a call that may take so long."""
        task = asyncio.current_task()
        assert task is not None
        wait = Wait(self._loop.time() + seconds, task)
        self._waits.add(wait)
        if self._timer is None or wait.deadline < self._timer.when():
            self._look_at(wait.deadline)
        return wait

    def end(self, wait: Wait) -> None:
        """The call is over."""
        self._waits.discard(wait)

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for wait in self._waits:
            if wait.deadline <= now and not wait.over:
                wait.over = True
                wait.task.cancel()
        # Set anew only here: a call that ends in time leaves the timer as it is.
        left = [wait.deadline for wait in self._waits if not wait.over]
        if left:
            self._look_at(min(left))

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
