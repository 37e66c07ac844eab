"""Threads for plain functions: made on demand, reused, at most so many, and never waited for at exit.

They are daemons, so that a worker can stop although a body does not end. A thread cannot be stopped either: cancelling
the future of a call only says that nobody waits for it, and gives its place to another thread. The thread used last is
used first, so the others get to be idle, and an idle thread ends after a while.
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
    """A function on its way through a thread and back to its event loop."""

    __slots__ = ("_error", "_loop", "_result", "_work", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> None:
        self._loop = loop
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self.future: asyncio.Future[Any] = loop.create_future()

    def make(self) -> None:
        if self.future.cancelled():
            return
        try:
            self._result = self._work()
        except BaseException as exc:
            self._error = exc

    def tell(self) -> None:
        # A closed loop: nobody is left to be told.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self.future.cancelled():
            return
        if self._error is None:
            self.future.set_result(self._result)
        elif isinstance(self._error, StopIteration):
            # A future cannot hold one: it would end the generator that waits.
            self.future.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            self.future.set_exception(self._error)


class _Member:
    """A thread of the pool: the call it makes, and where it waits for the next one."""

    __slots__ = ("call", "inbox")

    def __init__(self, call: _Call) -> None:
        self.call: _Call | None = call
        self.inbox: SimpleQueue[_Call] = SimpleQueue()

    def give(self, call: _Call) -> None:
        self.call = call
        self.inbox.put(call)


class Threads:
    """Runs plain functions for event loops, at most `most` at once; more of them wait their turn."""

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
                self._hire(call)
            else:
                self._waiting.append(call)
        return call.future

    def __len__(self) -> int:
        """How many threads there are."""
        return len(self._members)

    def _has_room(self) -> bool:
        """Whether fewer than `most` threads are idle or do something that anybody waits for."""
        if len(self._members) < self._most:
            return True
        left_behind = sum(member.call is not None and member.call.future.cancelled() for member in self._members)
        return len(self._members) - left_behind < self._most

    def _hire(self, call: _Call) -> None:
        member = _Member(call)
        thread = threading.Thread(target=self._work, args=(member,), name="fairlane-body", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system gives no more threads; whoever is there already comes round.
            if not self._members:
                raise
            self._waiting.append(call)
        else:
            self._members.add(member)

    def _work(self, member: _Member) -> None:
        call = member.call
        while call is not None:
            call.make()
            # First free, then told: so the next call of whoever waited finds this thread, and makes no other.
            needed = self._free(member)
            call.tell()
            # Neither arguments nor result may live on in a thread that waits.
            del call
            call = self._next(member) if needed else None

    def _free(self, member: _Member) -> bool:
        """Give a thread the next call that waits, or let it be idle; whether it is needed at all."""
        with self._lock:
            self._members.discard(member)
            if not self._has_room():
                # Somebody took its place while nobody waited for it.
                return False
            self._members.add(member)
            member.call = None
            if self._waiting:
                member.give(self._waiting.popleft())
            else:
                self._idle.append(member)
            return True

    def _next(self, member: _Member) -> _Call | None:
        """The next call of a thread, None when none came for so long that it may end."""
        try:
            return member.inbox.get(timeout=self._idle_seconds)
        except Empty:
            with self._lock:
                if member in self._idle:
                    self._idle.remove(member)
                    self._members.discard(member)
                    return None
            # A call came in just as the wait was over.
            return member.inbox.get()
