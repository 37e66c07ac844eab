"""Callers that enqueue at the same time share a call: one round trip, one commit, one taking of the locks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ...errors import FairlaneError, StoreError
from ...model.job import MOST_JOBS_PER_CALL, Enqueued, NewJob

Send = Callable[[Sequence[NewJob], float], Awaitable[list[Enqueued]]]
"""Stores jobs; the second argument says how long to wait for another open transaction that stores one of their ids."""
ALONE_SECONDS = 2.0
SHARED_SECONDS = 0.02
"""A call for several is not held up by one of them: then each goes alone."""
MOST_SHARED = 100
"""A call that carries more goes alone: it has little to gain, and the others would wait for it."""


class _Caller:
    __slots__ = ("answer", "jobs")

    def __init__(self, jobs: Sequence[NewJob], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = jobs
        self.answer: asyncio.Future[list[Enqueued]] = loop.create_future()


class EnqueueBatcher:
    """Joins calls of one event loop. The first goes at once; what comes while it is under way goes together."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Caller] = []
        self._busy = False
        self._task: asyncio.Task[None] | None = None

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Store jobs, perhaps together with those of others."""
        if len(jobs) > MOST_SHARED:
            return await self._send(jobs, ALONE_SECONDS)
        if not self._busy:
            # No call is under way: this one goes alone, without a task of its own, which costs as much as all the rest.
            self._busy = True
            try:
                return await self._send(jobs, ALONE_SECONDS)
            finally:
                self._go_on()
        caller = _Caller(jobs, asyncio.get_running_loop())
        self._waiting.append(caller)
        return await caller.answer

    def _go_on(self) -> None:
        """The call that was under way is over: those that came meanwhile go together."""
        self._busy = bool(self._waiting)
        if self._busy:
            # A task of its own: a caller that is cancelled must not cancel the call of the others.
            self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            while self._waiting:
                await self._send_some(self._next())
        finally:
            self._go_on()

    def _next(self) -> list[_Caller]:
        """As many callers as fit into one call."""
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
                # One of them is refused, and nothing was stored: each for itself now.
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
