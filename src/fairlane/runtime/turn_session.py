"""The session that a process waits and holds turns by: registered at the first turn, kept by a keeper of its own.

One serves every event loop and thread of the process, and is made anew after a fork and after it was lost. It hosts a
standby manager, so that a system of turns alone still notices the dead. It also ends the turns that their callers could
not end themselves: a lane must not stay taken because somebody went away while the store was out of reach.
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

import msgspec

from ..errors import FairlaneError, JobCancelled, NotFound, SessionLost, StoreError
from ..model import states
from ..model.ids import new_id
from ..model.intervals import Intervals
from ..model.job import Held, JobState, Reason
from ..model.maintenance import Retention
from ..model.session import NewSession, Renewal, SessionKind
from ..model.states import Transition
from ..store.port import Store
from .connection import Connection, OpenStore
from .lease_keeper import Holdings, LeaseKeeper

logger = logging.getLogger("fairlane.turn")
Lose = Callable[[FairlaneError], None]
"""Called in the keeper's thread when a turn is not to be trusted any more."""


class Waiter:
    """Gives turns a session to wait by."""

    def __init__(
        self, connection: Connection, open_store: OpenStore, intervals: Intervals, retention: Retention
    ) -> None:
        self._connection = connection
        self._open_store = open_store
        self._intervals = intervals
        self._retention = retention
        self._forget()

    def _forget(self) -> None:
        self._door = threading.Lock()
        self._beginning: Future[TurnSession] | None = None
        # Set pid last: a thread that reads its own pid must see the other fields reset.
        self._pid = os.getpid()

    async def vigil(self) -> TurnSession:
        """The session with its keeper; begun at the first call, and anew when the last one is over."""
        if self._pid != os.getpid():
            # The keeper's thread and even the lock as it was held stayed with the parent.
            self._forget()
        with self._door:
            last, beginning = self._beginning, None
            if last is None or (last.done() and last.result().over):
                beginning = self._beginning = Future()
                # One that runs cannot be cancelled: whoever stops waiting for it must not end it for the others.
                beginning.set_running_or_notify_cancel()
        if beginning is not None:
            return await asyncio.shield(self._begin(beginning, last))
        assert last is not None
        return await asyncio.wrap_future(last)

    async def _begin(self, beginning: Future[TurnSession], last: Future[TurnSession] | None) -> TurnSession:
        try:
            if last is not None:
                await last.result().end(await self._connection.store())
            vigil = TurnSession(self._open_store, self._intervals, self._retention)
            await vigil.begin(await self._connection.store())
        except BaseException as exc:
            with self._door:
                self._beginning = None
            beginning.set_exception(exc if isinstance(exc, Exception) else ConnectionAbortedError("it was cancelled"))
            raise
        beginning.set_result(vigil)
        return vigil

    async def close(self) -> None:
        """End the session: its turns are cancelled. The next turn begins another one."""
        if self._pid != os.getpid():
            self._forget()
        with self._door:
            beginning, self._beginning = self._beginning, None
        if beginning is not None:
            vigil = await asyncio.wrap_future(beginning)
            await vigil.end(await self._connection.store())


class Unended(msgspec.Struct, frozen=True):
    """A turn that somebody left: how it ended, or None when it is only to be cancelled."""

    id: str
    transition: Transition | None


class TurnSession:
    """One session of a waiter, from its registration until it has ended or was lost."""

    def __init__(self, open_store: OpenStore, intervals: Intervals, retention: Retention) -> None:
        self.session = new_id()
        self._pid = os.getpid()
        self.over = False
        """Whether the session was lost: no turn can wait by it any more."""
        self._lock = threading.Lock()
        self._held: dict[Held, Lose] = {}
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
        """Where the code behind each turn runs, from its request to its end."""
        self._untrusted: str | None = None
        """Why no place that is held can be trusted; None while all is well."""
        self._unended: deque[Unended] = deque()
        self._work: Callable[[], object] | None = None
        self._intervals = intervals
        self._retention = retention
        self._keeper = LeaseKeeper(open_store, intervals, self, companions=[self._manage, self._end_turns])

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
        # The places are given away only when nobody is inside any more, or the lease would have ended anyway.
        ends = time.monotonic() + self._intervals.lease - self._intervals.trust_margin
        while self._held and not self.elsewhere and time.monotonic() < ends:  # noqa: ASYNC110 - other loops and threads
            await asyncio.sleep(0.01)
        await self._keeper.stop()
        with contextlib.suppress(NotFound, StoreError):
            # What cannot be told now is found out when the lease has ended.
            await store.leave(self.session, begun=())

    @property
    def elsewhere(self) -> bool:
        """Whether this is a copy in a fork: the turns belong to the parent, whatever unwinds here."""
        return self._pid != os.getpid()

    # -- turns ---------------------------------------------------------------------------------------------------

    def expect(self, id: str) -> None:
        """A turn is about to be asked for by code in the running loop."""
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
        """See to it that a turn ends, as soon as the store can be told. Never waits; from any thread."""
        if self.elsewhere:
            return
        with self._lock:
            self._loops.pop(id, None)
        self._unended.append(Unended(id, transition))
        if self._work is not None:
            with contextlib.suppress(RuntimeError):  # the keeper has stopped, and the session with all its turns ends
                self._work()

    # -- called by the keeper, in its thread ---------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """What the next renewal names. A turn whose loop was closed under it is ended: nobody is left to do that."""
        with self._lock:
            alone = {id for id, loop in self._loops.items() if loop.is_closed()}
            for held in [held for held in self._held if held.id in alone]:
                del self._held[held]
        for id in alone:
            self.end_turn(id)
        with self._lock:
            return Holdings(self.session, list(self._held), 0, False)

    def renewed(self, renewal: Renewal) -> None:
        """Stop the bodies whose turns are lost, or were asked to stop."""
        with self._lock:
            # A renewal that was on its way when the session was given up makes nothing trusted again.
            if not self.over:
                self._untrusted = None
        for held in renewal.lost:
            self._lose(held, SessionLost(f"turn {held.id} was lost: the store has given its place to another"))
        with self._lock:
            cancelled = [held for held in self._held if held.id in renewal.cancel]
        for held in cancelled:
            self._lose(held, JobCancelled(held.id, Reason.BY_USER.value))

    def session_lost(self, session: str) -> None:
        """Stop all bodies: the places they held belong to others."""
        self.over = True
        self._lose_all("its session was declared dead, and its place belongs to another")

    def contact_lost(self) -> None:
        """Stop all bodies: soon the places they hold may belong to others."""
        self._lose_all("the store was out of reach until its lease had almost ended")

    def _lose_all(self, why: str) -> None:
        with self._lock:
            self._untrusted = why
            everything = list(self._held)
        for held in everything:
            self._lose(held, SessionLost(f"turn {held.id} was lost, and its body was stopped: {why}"))

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
        self._work = lambda: loop.call_soon_threadsafe(work.set)
        while True:
            work.clear()
            while self._unended:
                if not await self._end_one(store, self._unended[0]):
                    await asyncio.sleep(self._intervals.poll)
                    continue
                self._unended.popleft()
            await work.wait()

    async def _end_one(self, store: Store, turn: Unended) -> bool:
        """Whether that is settled. An unknown turn was never stored, and a stale one has ended without us."""
        try:
            transition = turn.transition
            if transition is None:
                [state] = await store.cancel([turn.id])
                if state is not JobState.RUNNING:
                    return True
                [job] = await store.get([turn.id])
                if job is None:
                    return True
                transition = states.cancel(Held(job.id, job.fence))
            await store.finish(self.session, [transition])
        except NotFound:
            return True
        except StoreError as exc:
            logger.warning("turn %s could not be ended (%s); trying again", turn.id, exc)
            return False
        except Exception:
            logger.exception("turn %s could not be ended; it ends with its session", turn.id)
        return True
