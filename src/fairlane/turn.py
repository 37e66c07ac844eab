"""A turn: permission for the caller's own code to proceed, in the order of a lane, without a worker.

The turn is a job that the store starts itself when the lane has a free place. The code inside ``async with`` holds the
place. It is cancelled as soon as the place may be lost, so that two holders of one place never run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import msgspec

from .errors import FairlaneError, JobCancelled, NotFound, SessionLost, StoreError
from .handle import Position, position_of, refuse_deadlock
from .model import states
from .model.ids import new_id
from .model.job import Held, JobKind, JobState, NewJob, Priority, Reason
from .model.names import check_seconds
from .model.session import Finished
from .model.states import Transition
from .runtime.connection import Connection
from .runtime.job_watcher import Watch
from .runtime.running_job import HeldPlace
from .runtime.turn_session import TurnSession, TurnSessions
from .task import PriorityWord, Seconds, seconds

TASK = "turn"
"""The task name in the job record of a turn."""
OnPosition = Callable[[Position], Awaitable[None] | None]


class Turn:
    """One place in a lane, for ``async with``. Used once."""

    def __init__(
        self,
        connection: Connection,
        sessions: TurnSessions,
        lane: str,
        *,
        queue: str = "default",
        on_position: OnPosition | None = None,
        priority: PriorityWord | Priority = "normal",
        expires: Seconds | None = None,
        timeout: Seconds | None = None,
    ) -> None:
        self._connection = connection
        self._sessions = sessions
        self._on_position = on_position
        self._timeout = None if timeout is None else check_seconds("timeout", seconds("timeout", timeout))
        self._request = NewJob(
            id=new_id(),
            task=TASK,
            queue=queue,
            lane=lane,
            priority=priority if isinstance(priority, Priority) else Priority.parse(priority),
            expires=None if expires is None else seconds("expires", expires),
            retries=0,
            kind=JobKind.TURN,
            waiter="unassigned",
        )
        self._place = HeldPlace(queue, lane)
        self._held: Held | None = None
        self._turn_session: TurnSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._body: asyncio.Task[object] | None = None
        self._cancels = 0
        self._error: FairlaneError | None = None
        self._leaving = False

    @property
    def id(self) -> str:
        """The id of the turn's job."""
        return self._request.id

    @property
    def lane(self) -> str:
        """The lane it waits in."""
        return str(self._request.lane)

    @property
    def queue(self) -> str:
        """The queue the lane belongs to."""
        return self._request.queue

    @property
    def fence(self) -> int:
        """The number of the grant, for external systems that reject an older one."""
        if self._held is None:
            raise FairlaneError("a turn has no fence before it is granted; read it inside `with`")
        return self._held.fence

    @property
    def lost(self) -> bool:
        """Whether the place may be lost. Code that cannot be cancelled must check this."""
        return self._error is not None

    async def __aenter__(self) -> Turn:
        task = asyncio.current_task()
        assert task is not None
        await self.begin(body=task)
        self._place.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ValueError):
            # An exit stack may exit in another context than it was entered in; the entered context has ended anyway.
            self._place.__exit__()
        await self.end(exc)

    # -- waiting -------------------------------------------------------------------------------------------------

    async def begin(self, body: asyncio.Task[object] | None) -> None:
        """Wait in line until the lane grants a place. `body` is the task to cancel if the place is lost later."""
        if self._turn_session is not None:
            raise FairlaneError("a turn can be used only once; create another with app.turn(…)")
        self._turn_session = turn_session = await self._sessions.current()
        turn_session.expect(self.id)
        try:
            async with asyncio.timeout(self._timeout) as limit:
                await self._ask(turn_session)
                held = await self._granted()
        except TimeoutError:
            turn_session.end_turn(self.id)
            if not limit.expired() or self._timeout is None:
                raise
            raise TimeoutError(
                f"lane {self.lane} of queue {self.queue} had no free place within {self._timeout:g} s"
            ) from None
        except BaseException:
            # Whatever failed, the place must not stay reserved. Ending a turn that was never stored does nothing.
            turn_session.end_turn(self.id)
            raise
        self._held, self._body, self._loop = held, body, asyncio.get_running_loop()
        self._cancels = 0 if body is None else body.cancelling()
        turn_session.hold(held, self._lose_later)

    async def abandon(self) -> None:
        """Release a place that was granted after its caller was interrupted."""
        if self._turn_session is not None:
            if self._held is not None:
                self._turn_session.drop(self._held)
            self._turn_session.end_turn(self.id)

    async def _ask(self, turn_session: TurnSession) -> None:
        store = await self._connection.store()
        request = msgspec.structs.replace(self._request, waiter=turn_session.session)
        asking = asyncio.ensure_future(store.enqueue([request]))
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            # Cancelled while the request is in flight: it must not stay in line, so withdraw it once it was stored.
            asking.add_done_callback(lambda done: self._withdraw(turn_session, done))
            raise

    def _withdraw(self, turn_session: TurnSession, asked: asyncio.Future[Any]) -> None:
        if not asked.cancelled():
            asked.exception()
        turn_session.end_turn(self.id)

    async def _granted(self) -> Held:
        reported: Position | None = None
        async with Watch(self._connection, self.id, places=self._on_position is not None) as watch:
            while True:
                look = await watch.snapshot()
                job = look.job
                if job is None:
                    raise NotFound(f"turn {self.id} does not exist in the store; was the store emptied?")
                if job.state is JobState.RUNNING:
                    return Held(job.id, job.fence)
                if job.state.final:
                    raise JobCancelled(job.id, str(job.reason))
                await refuse_deadlock(self._connection, job)
                position = position_of(look.position)
                if self._on_position is not None and position is not None and not position.same_place(reported):
                    reported = position
                    answer = self._on_position(position)
                    if inspect.isawaitable(answer):
                        await answer

    # -- holding -------------------------------------------------------------------------------------------------

    def _lose_later(self, error: FairlaneError) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the code inside has ended
            self._loop.call_soon_threadsafe(self._lose, error)

    def _lose(self, error: FairlaneError) -> None:
        if self._leaving or self._error is not None:
            return
        self._error = error
        if self._body is not None:
            self._body.cancel()

    async def end(self, exc: BaseException | None) -> None:
        """Release the place: the turn is completed, or failed if the code inside raised."""
        assert self._held is not None
        assert self._turn_session is not None
        self._leaving = True
        error = self._error
        if error is not None and self._body is not None:
            # Undo our own cancellation. If another cancellation was requested as well, that one must propagate.
            others = self._body.uncancel() > self._cancels
            if others and isinstance(exc, asyncio.CancelledError):
                error = None
        try:
            accepted = await self._release(self._turn_session, _ending(self._held, self._error or exc))
        finally:
            self._turn_session.drop(self._held)
        if error is not None:
            raise error from exc
        if not accepted and exc is None:
            raise SessionLost(
                f"turn {self.id} was lost before its code ended: another turn may have held its place at the same time"
            )

    async def _release(self, turn_session: TurnSession, transition: Transition) -> bool:
        """Whether the store accepted it. During an outage it counts as accepted: the place was held to the end, and
        the session releases it later.
        """
        if turn_session.over or turn_session.belongs_to_parent:
            return False
        finishing: asyncio.Future[Any] | None = None
        try:
            store = await self._connection.store()
            finishing = asyncio.ensure_future(store.finish(turn_session.session, [transition]))
            finished: Finished = await asyncio.shield(finishing)
        except StoreError:
            turn_session.end_turn(self.id, transition)
            return True
        except BaseException as exc:
            # Whatever failed, the place must not stay taken.
            if finishing is None or not isinstance(exc, asyncio.CancelledError):
                turn_session.end_turn(self.id, transition)
            else:
                finishing.add_done_callback(lambda done: self._release_later(turn_session, transition, done))
            raise
        return finished.verdicts[0].accepted

    def _release_later(self, turn_session: TurnSession, transition: Transition, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            turn_session.end_turn(self.id, transition)


def _ending(held: Held, exc: BaseException | None) -> Transition:
    if exc is None:
        return states.complete(held)
    if isinstance(exc, asyncio.CancelledError):
        return states.cancel(held)
    text = "".join(traceback.format_exception(exc))
    return states.fail(held, Reason.ERROR, text, group=type(exc).__name__)
