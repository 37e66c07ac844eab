"""The session under which a process waits for turns and holds them: registered at the first turn, with its own keeper.

One session serves every event loop and thread of the process. It is replaced after a fork and after it was lost. It
hosts a standby manager, so that a system that uses only turns still detects dead sessions. It also ends the turns that
their callers could not end themselves: a lane must not stay blocked because a caller left while the store was
unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from random import Random

import msgspec

from ..errors import FairlaneError, JobCancelled, NotFound, SessionLost, StoreError
from ..manager.service import FailureTracker
from ..model import states
from ..model.ids import new_id
from ..model.intervals import Intervals
from ..model.job import Held, JobState, Reason
from ..model.maintenance import Retention
from ..model.retry import Backoff
from ..model.session import NewSession, Renewal, SessionKind
from ..model.states import Transition
from ..store.per_process import PerProcess
from ..store.port import Store
from .connection import Connection, OpenStore
from .lease_keeper import Holdings, LeaseKeeper

logger = logging.getLogger("fairlane.turn")
Lose = Callable[[FairlaneError], None]
"""Called in the keeper's thread when a turn can no longer be trusted."""


class _Current:
    """The session of one process, once it is begun or being begun."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: Future[TurnSession] | None = None


class TurnSessions:
    """Provides the process's session for turns."""

    def __init__(
        self, connection: Connection, open_store: OpenStore, intervals: Intervals, retention: Retention
    ) -> None:
        self._connection = connection
        self._open_store = open_store
        self._intervals = intervals
        self._retention = retention
        self._current = PerProcess(_Current)

    async def current(self) -> TurnSession:
        """The session; registered at the first call, and again when the last one was lost."""
        current = self._current.get()
        with current.lock:
            last, beginning = current.session, None
            if last is None or (last.done() and last.result().over):
                beginning = current.session = Future()
                # A running future cannot be cancelled: a caller that stops waiting must not cancel it for others.
                beginning.set_running_or_notify_cancel()
        if beginning is not None:
            return await asyncio.shield(self._begin(current, beginning, last))
        assert last is not None
        return await asyncio.wrap_future(last)

    async def _begin(
        self, current: _Current, beginning: Future[TurnSession], last: Future[TurnSession] | None
    ) -> TurnSession:
        try:
            if last is not None:
                await last.result().end(await self._connection.store())
            session = TurnSession(self._open_store, self._intervals, self._retention)
            await session.begin(await self._connection.store())
        except BaseException as exc:
            with current.lock:
                current.session = None
            beginning.set_exception(exc if isinstance(exc, Exception) else ConnectionAbortedError("it was cancelled"))
            raise
        beginning.set_result(session)
        return session

    async def close(self) -> None:
        """End the session, which cancels its turns. The next turn begins another one."""
        current = self._current.get()
        with current.lock:
            beginning, current.session = current.session, None
        if beginning is not None:
            session = await asyncio.wrap_future(beginning)
            await session.end(await self._connection.store())


class UnendedTurn(msgspec.Struct, frozen=True):
    """A turn that its caller left: the transition that ends it, or None to cancel it."""

    id: str
    transition: Transition | None


class TurnSession:
    """One session, from its registration until it has ended or was lost."""

    def __init__(self, open_store: OpenStore, intervals: Intervals, retention: Retention) -> None:
        self.session = new_id()
        self._pid = os.getpid()
        self.over = False
        """Whether the session was lost: no turn can wait under it any more."""
        self._lock = threading.Lock()
        self._held: dict[Held, Lose] = {}
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
        """The event loop of the code behind each turn, from its request to its end."""
        self._untrusted: str | None = None
        """Why held turns cannot be trusted; None while they can."""
        self._unended: deque[UnendedTurn] = deque()
        self._wake_ender: Callable[[], object] | None = None
        self._intervals = intervals
        self._retention = retention
        self._keeper = LeaseKeeper(open_store, intervals, self, background_tasks=[self._manage, self._end_turns])

    async def begin(self, store: Store) -> None:
        """Register the session and start its keeper."""
        await store.register(
            NewSession(
                id=self.session,
                kind=SessionKind.WAITER,
                lease=self._intervals.lease,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )
        await self._keeper.start()

    async def end(self, store: Store) -> None:
        """Stop the keeper and end the session."""
        self.over = True
        self._lose_all("the application was closed")
        # Places are given away only when the code inside has ended, or when the lease would have ended anyway.
        ends = time.monotonic() + self._intervals.lease - self._intervals.trust_margin
        while self._held and not self.belongs_to_parent and time.monotonic() < ends:  # noqa: ASYNC110 - other loops and threads
            await asyncio.sleep(0.01)
        await self._keeper.stop()
        with contextlib.suppress(NotFound, StoreError):
            # If this fails, the session ends when its lease expires.
            await store.leave(self.session, begun=())

    @property
    def belongs_to_parent(self) -> bool:
        """Whether this object is a copy in a fork: the turns belong to the parent process, whatever unwinds here."""
        return self._pid != os.getpid()

    # -- turns ---------------------------------------------------------------------------------------------------

    def expect(self, id: str) -> None:
        """Code in the running loop is about to request a turn."""
        with self._lock:
            self._loops[id] = asyncio.get_running_loop()

    def hold(self, held: Held, lose: Lose) -> None:
        """A turn was granted; `lose` is called if it is lost."""
        with self._lock:
            self._held[held] = lose
            why = self._untrusted
        if why is not None:
            self._lose_all(why)

    def drop(self, held: Held) -> None:
        """A turn has ended, or is being ended."""
        with self._lock:
            self._held.pop(held, None)
            self._loops.pop(held.id, None)

    def end_turn(self, id: str, transition: Transition | None = None) -> None:
        """End a turn in the background, as soon as the store can be reached. Never waits; from any thread."""
        if self.belongs_to_parent:
            return
        with self._lock:
            self._loops.pop(id, None)
        self._unended.append(UnendedTurn(id, transition))
        if self._wake_ender is not None:
            with contextlib.suppress(RuntimeError):  # the keeper has stopped: the session ends with all its turns
                self._wake_ender()

    # -- called by the keeper, in its thread ---------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """What the next renewal names. A turn whose event loop was closed is ended here: its caller cannot do that."""
        with self._lock:
            orphaned = {id for id, loop in self._loops.items() if loop.is_closed()}
            for held in [held for held in self._held if held.id in orphaned]:
                del self._held[held]
        for id in orphaned:
            self.end_turn(id)
        with self._lock:
            return Holdings(self.session, list(self._held), 0, False)

    def renewed(self, renewal: Renewal) -> None:
        """Stop the code whose turns were lost or cancelled."""
        with self._lock:
            # A renewal that was in flight when the session ended does not restore trust.
            if not self.over:
                self._untrusted = None
        for held in renewal.lost:
            self._lose(held, SessionLost(f"turn {held.id} was lost: the store has given its place to another holder"))
        with self._lock:
            cancelled = [held for held in self._held if held.id in renewal.cancel]
        for held in cancelled:
            self._lose(held, JobCancelled(held.id, Reason.BY_USER.value))

    def session_lost(self, session: str) -> None:
        """Stop all code that holds a turn: the places belong to other holders now."""
        self.over = True
        self._lose_all("its session was declared dead, and its place belongs to another holder")

    def contact_lost(self) -> None:
        """Stop all code that holds a turn: the store may soon give its place away."""
        self._lose_all("the store was unreachable until its lease had almost ended")

    def _lose_all(self, why: str) -> None:
        with self._lock:
            self._untrusted = why
            everything = list(self._held)
        for held in everything:
            self._lose(held, SessionLost(f"turn {held.id} was lost, and its code was stopped: {why}"))

    def _lose(self, held: Held, error: FairlaneError) -> None:
        with self._lock:
            lose = self._held.get(held)
        if lose is not None:
            lose(error)

    async def _manage(self, store: Store) -> None:
        from ..manager.manager import Manager

        await Manager(store, session=self.session, intervals=self._intervals, retention=self._retention).run()

    async def _end_turns(self, store: Store) -> None:
        loop, work = asyncio.get_running_loop(), asyncio.Event()
        self._wake_ender = lambda: loop.call_soon_threadsafe(work.set)
        every_poll = Backoff(base=self._intervals.poll, most=self._intervals.poll, factor=1, jitter=False)
        failures = FailureTracker("ending turns", logger, Random(), every_poll)
        while True:
            work.clear()
            while self._unended:
                try:
                    await self._end_one(store, self._unended[0])
                except StoreError as exc:
                    await asyncio.sleep(failures.failed(exc))
                    continue
                failures.worked()
                self._unended.popleft()
            await work.wait()

    async def _end_one(self, store: Store, turn: UnendedTurn) -> None:
        """End a turn. An unknown one was never stored; a stale one was ended by another process."""
        try:
            transition = turn.transition
            if transition is None:
                [state] = await store.cancel([turn.id])
                if state is not JobState.RUNNING:
                    return
                [job] = await store.get([turn.id])
                if job is None:
                    return
                transition = states.cancel(Held(job.id, job.fence))
            await store.finish(self.session, [transition])
        except NotFound:
            return
        except StoreError:
            raise
        except Exception:
            logger.exception("turn %s could not be ended; it ends with its session", turn.id)
