"""How long calls wait for an answer: one timer for all calls of an event loop.

The driver can end a call by itself, with a timer for each: that costs a tenth of a short call (measured).
"""

from __future__ import annotations

import asyncio

CALL_SECONDS = 10.0
"""For the answer to a call. A server that is frozen keeps its connections open, so only this notices it."""
SLOWEST_LINK = 128 * 1024
"""Bytes that a link must carry in a second: what a call sends adds to its time."""
LONGEST_SECONDS = 60.0
"""What repetitions do not exceed, unless what they send takes longer."""


class Deadlines:
    """How long each kind of call may take: one that was not answered in time gives the next of its kind twice as long.

    Else a call that takes a little longer than it may, because the link is slow, would be repeated for ever.
    """

    def __init__(self) -> None:
        self._late: dict[object, int] = {}

    def seconds(self, kind: object, sent: int = 0) -> float:
        """For the next call of this kind, which sends so many bytes."""
        usual = CALL_SECONDS + sent / SLOWEST_LINK
        late = self._late.get(kind, 0) if self._late else 0
        return usual if not late else max(usual, min(LONGEST_SECONDS, usual * 2**late))

    def missed(self, kind: object) -> None:
        """A call was not answered in time."""
        self._late[kind] = min(self._late.get(kind, 0) + 1, 10)

    def kept(self, kind: object) -> None:
        """A call was answered. The next may take as long as usual."""
        if self._late:
            self._late.pop(kind, None)


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
