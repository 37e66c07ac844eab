"""Combines calls that enqueue at the same time: one round trip, one commit, and the locks are taken once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ...errors import FairlaneError, StoreError
from ...model.job import MOST_JOBS_PER_CALL, Enqueued, NewJob

Send = Callable[[Sequence[NewJob], float], Awaitable[list[Enqueued]]]
"""Stores jobs. The second argument: how long to wait for another open transaction that stores one of their ids."""
ALONE_SECONDS = 2.0
SHARED_SECONDS = 0.02
"""A combined call waits only this long for such a transaction. Then the jobs of each caller are sent alone, so that the
others are not delayed."""
MOST_SHARED = 100
"""A call with more jobs is sent alone: it would gain little, and the others would wait for it."""


class _Caller:
    __slots__ = ("answer", "jobs")

    def __init__(self, jobs: Sequence[NewJob], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = jobs
        self.answer: asyncio.Future[list[Enqueued]] = loop.create_future()


class EnqueueBatcher:
    """Combines calls of one event loop. The first is sent at once; calls made while it is in progress are combined."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Caller] = []
        self._busy = False
        self._task: asyncio.Task[None] | None = None

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs, possibly in one call with those of other callers."""
        if len(jobs) > MOST_SHARED:
            return await self._send(jobs, ALONE_SECONDS)
        if not self._busy:
            # No call is in progress: send this one alone, and without a task, which would cost as much as all the rest.
            self._busy = True
            try:
                return await self._send(jobs, ALONE_SECONDS)
            finally:
                self._go_on()
        caller = _Caller(jobs, asyncio.get_running_loop())
        self._waiting.append(caller)
        return await caller.answer

    def _go_on(self) -> None:
        """Send the calls that were made while the last one was in progress."""
        self._busy = bool(self._waiting)
        if self._busy:
            # In a task of its own: a caller that is cancelled must not cancel the call for the others.
            self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            while self._waiting:
                await self._send_some(self._next())
        finally:
            self._go_on()

    def _next(self) -> list[_Caller]:
        """Remove and return as many waiting callers as fit into one call."""
        taken: list[_Caller] = []
        room = MOST_JOBS_PER_CALL
        while self._waiting and len(self._waiting[0].jobs) <= room:
            caller = self._waiting.pop(0)
            if not caller.answer.cancelled():
                taken.append(caller)
                room -= len(caller.jobs)
        return taken

    async def _send_some(self, callers: list[_Caller]) -> None:
        patience = ALONE_SECONDS if len(callers) == 1 else SHARED_SECONDS
        try:
            answers = await self._send([job for caller in callers for job in caller.jobs], patience) if callers else []
        except FairlaneError as exc:
            if len(callers) == 1 or isinstance(exc, StoreError):
                _fail(callers, exc)
            else:
                # The jobs of one caller were rejected, and nothing was stored: send those of each caller alone.
                await asyncio.gather(*(self._send_some([caller]) for caller in callers))
        except BaseException as exc:
            _fail(callers, exc if isinstance(exc, Exception) else StoreError("the event loop of the call has ended"))
            raise
        else:
            for caller in callers:
                count = len(caller.jobs)
                if not caller.answer.done():
                    caller.answer.set_result(answers[:count])
                answers = answers[count:]


def _fail(callers: list[_Caller], exc: Exception) -> None:
    for caller in callers:
        if not caller.answer.done():
            caller.answer.set_exception(exc)
