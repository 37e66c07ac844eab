"""Deadlines of calls to a server: one timer for all calls of an event loop.

The timeouts of a driver use a timer for each call, which takes a tenth of the time of a short call (measured).
"""

from __future__ import annotations

import asyncio

CALL_SECONDS = 10.0
"""How long a call waits for its answer. A frozen server keeps its connections open, so only this detects it."""
SLOWEST_LINK = 128 * 1024
"""Bytes per second that a link must carry: the size of a call is added to its time."""
LONGEST_SECONDS = 60.0
"""Upper limit for repeated calls, unless sending them takes longer."""


class Deadlines:
    """How long each kind of call may take. After a call that timed out, the next of its kind has twice as long.

    Otherwise a call that takes slightly too long on a slow link would be repeated for ever.
    """

    def __init__(self) -> None:
        self._late: dict[object, int] = {}

    def seconds(self, kind: object, sent: int = 0) -> float:
        """Return the time for the next call of this kind, which sends `sent` bytes."""
        usual = CALL_SECONDS + sent / SLOWEST_LINK
        late = self._late.get(kind, 0) if self._late else 0
        return usual if not late else max(usual, min(LONGEST_SECONDS, usual * 2**late))

    def missed(self, kind: object) -> None:
        """Record that a call timed out."""
        self._late[kind] = min(self._late.get(kind, 0) + 1, 10)

    def kept(self, kind: object) -> None:
        """Record that a call was answered: the next one has the usual time."""
        if self._late:
            self._late.pop(kind, None)


class PendingCall:
    """A call that waits for its answer."""

    __slots__ = ("cancelling", "deadline", "expired", "task")

    def __init__(self, deadline: float, task: asyncio.Task[object]) -> None:
        self.deadline = deadline
        self.task = task
        self.cancelling = task.cancelling()
        self.expired = False

    def timed_out(self) -> bool:
        """Return whether only this deadline cancelled the task, and not its caller too. Call it once."""
        return self.expired and self.task.uncancel() <= self.cancelling


class DeadlineTimer:
    """Cancels the tasks of calls that take too long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: set[PendingCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> PendingCall:
        """Begin a call of the running task that may take `seconds`."""
        task = asyncio.current_task()
        assert task is not None
        call = PendingCall(self._loop.time() + seconds, task)
        self._calls.add(call)
        if self._timer is None or call.deadline < self._timer.when():
            self._set_timer(call.deadline)
        return call

    def end(self, call: PendingCall) -> None:
        """End a call."""
        self._calls.discard(call)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._cancel_expired)

    def _cancel_expired(self) -> None:
        self._timer = None
        now = self._loop.time()
        for call in self._calls:
            if call.deadline <= now and not call.expired:
                call.expired = True
                call.task.cancel()
        # The timer is reset only here: a call that ends in time does not touch it.
        left = [call.deadline for call in self._calls if not call.expired]
        if left:
            self._set_timer(min(left))

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
