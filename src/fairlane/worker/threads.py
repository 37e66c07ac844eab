"""A pool of threads for plain functions: started on demand, reused, limited in number, and not waited for at exit.

They are daemon threads, so that a worker can stop although a function does not end. A thread cannot be stopped:
cancelling the future of a call only means that its result is not needed, and lets another thread take its place in the
pool. The thread used last is used first, so that the others become idle; an idle thread ends after a while.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
IDLE_SECONDS = 30.0


class RunsFunctions(Protocol):
    """What runs plain functions for an event loop: `Threads`, or a test's own thread."""

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call `function` outside of the loop, in the context of the caller."""


class _Call:
    """A call in a thread, whose outcome goes back to its event loop."""

    __slots__ = ("_error", "_loop", "_result", "_work", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> None:
        self._loop = loop
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self.future: asyncio.Future[Any] = loop.create_future()

    def run(self) -> None:
        if self.future.cancelled():
            return
        try:
            self._result = self._work()
        except BaseException as exc:
            self._error = exc

    def deliver(self) -> None:
        # RuntimeError: the loop is closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_outcome)

    def _set_outcome(self) -> None:
        if self.future.cancelled():
            return
        if self._error is None:
            self.future.set_result(self._result)
        elif isinstance(self._error, StopIteration):
            # A future cannot hold StopIteration, which would end the coroutine that awaits it.
            self.future.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            self.future.set_exception(self._error)


class _Member:
    """A thread of the pool: its current call, and the queue of its next one."""

    __slots__ = ("call", "inbox")

    def __init__(self, call: _Call) -> None:
        self.call: _Call | None = call
        self.inbox: SimpleQueue[_Call] = SimpleQueue()

    def give(self, call: _Call) -> None:
        self.call = call
        self.inbox.put(call)


class Threads:
    """Runs plain functions for event loops, at most `most` at once; further calls wait."""

    def __init__(self, most: int, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._most = most
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._members: set[_Member] = set()
        self._idle: list[_Member] = []
        self._waiting: deque[_Call] = deque()

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call `function` in a thread, in the context of the caller."""
        context = copy_context()
        call = _Call(asyncio.get_running_loop(), lambda: context.run(function, *args))
        with self._lock:
            if self._idle:
                self._idle.pop().give(call)
            elif self._has_room():
                self._start(call)
            else:
                self._waiting.append(call)
        return call.future

    def __len__(self) -> int:
        """The number of threads."""
        return len(self._members)

    def _has_room(self) -> bool:
        """Whether fewer than `most` threads are idle or run a call whose result is needed."""
        if len(self._members) < self._most:
            return True
        cancelled = sum(member.call is not None and member.call.future.cancelled() for member in self._members)
        return len(self._members) - cancelled < self._most

    def _start(self, call: _Call) -> None:
        member = _Member(call)
        thread = threading.Thread(target=self._work, args=(member,), name="fairlane-body", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system allows no more threads: one of the existing ones will take the call.
            if not self._members:
                raise
            self._waiting.append(call)
        else:
            self._members.add(member)

    def _work(self, member: _Member) -> None:
        call = member.call
        while call is not None:
            call.run()
            # First free the thread, then deliver: the caller's next call can then reuse this thread.
            needed = self._free(member)
            call.deliver()
            # An idle thread must not keep arguments or results alive.
            del call
            call = self._next(member) if needed else None

    def _free(self, member: _Member) -> bool:
        """Give a thread the next waiting call, or make it idle. False when the pool does not need it any more."""
        with self._lock:
            self._members.discard(member)
            if not self._has_room():
                # Another thread took its place while its call was cancelled.
                return False
            self._members.add(member)
            member.call = None
            if self._waiting:
                member.give(self._waiting.popleft())
            else:
                self._idle.append(member)
            return True

    def _next(self, member: _Member) -> _Call | None:
        """The next call of a thread, None when it was idle for so long that it may end."""
        try:
            return member.inbox.get(timeout=self._idle_seconds)
        except Empty:
            with self._lock:
                if member in self._idle:
                    self._idle.remove(member)
                    self._members.discard(member)
                    return None
            # A call arrived just as the wait timed out.
            return member.inbox.get()
