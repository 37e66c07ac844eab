"""Keeps a session alive from a thread of its own, with a store and an event loop of its own.

A body that computes for an hour, or holds the main event loop, does not stop the renewals: whoever runs in this
process is alive as long as the interpreter switches threads. The manager and the watch over the main loop run here too,
as companions, for the same reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from random import random
from typing import NamedTuple, Protocol

from .connection import OpenStore
from .errors import SessionLost
from .intervals import Intervals
from .job import Held
from .session import Renewal
from .store import Store
from .wakeups import session_topic

logger = logging.getLogger("fairlane.keeper")
Companion = Callable[[Store], Awaitable[None]]
CLOSEST_RENEWALS = 0.05
"""Seconds between two renewals however often somebody asks for one."""


class Holdings(NamedTuple):
    """What a session believes it holds."""

    held: list[Held]
    claim: int
    """The number of the last claim whose reply it has: all of that claim's jobs are in `held`, or have ended."""
    stopping: bool


class Holder(Protocol):
    """Whose session is kept. Everything here is called from the keeper's thread."""

    def holdings(self) -> Holdings:
        """What to name in the next renewal."""

    def renewed(self, renewal: Renewal) -> None:
        """The store answered."""

    def session_lost(self) -> None:
        """The session has ended or was declared dead: drop the bodies, register anew and call `adopt`."""

    def contact_lost(self) -> None:
        """The lease is about to end without contact. Called once until there is contact again."""


class Keeper:
    """Renews one session until it is stopped."""

    def __init__(
        self,
        open_store: OpenStore,
        session: str,
        intervals: Intervals,
        holder: Holder,
        *,
        companions: Sequence[Companion] = (),
    ) -> None:
        self._open_store = open_store
        self._session = session
        self._intervals = intervals
        self._holder = holder
        self._companions = companions
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = asyncio.Event()
        self._lost = False
        self._stopping = False
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        for future in (self._started, self._ended):
            # Whoever waits for one of them and gives up must not cancel it under the thread that sets it.
            future.set_running_or_notify_cancel()

    async def start(self) -> None:
        """Start the thread; returns when its store is open, and raises what kept it from opening."""
        threading.Thread(target=self._run, name="fairlane-keeper", daemon=True).start()
        await asyncio.wrap_future(self._started)

    def nudge(self) -> None:
        """Renew soon, instead of at the next heartbeat. From any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the keeper has stopped
                loop.call_soon_threadsafe(self._due.set)

    def adopt(self, session: str) -> None:
        """Keep another session from now on, after the last one was lost."""
        self._session = session
        self._lost = False
        self.nudge()

    async def stop(self) -> None:
        """End the companions and the renewals, and close the store. The session is not ended."""
        self._stopping = True
        self.nudge()
        await asyncio.wrap_future(self._ended)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as exc:
            logger.exception("the keeper's thread has ended; the session will expire")
            if not self._started.done():
                self._started.set_exception(exc)
        finally:
            self._ended.set_result(None)

    async def _keep(self) -> None:
        store = await self._open_store()
        self._loop = asyncio.get_running_loop()
        self._started.set_result(None)
        try:
            companions = [asyncio.ensure_future(companion(store)) for companion in self._companions]
            for companion in companions:
                companion.add_done_callback(_log_end)
            listener = asyncio.ensure_future(self._listen(store))
            try:
                await self._renewals(store)
            finally:
                for task in (*companions, listener):
                    task.cancel()
                await asyncio.gather(*companions, listener, return_exceptions=True)
        finally:
            await store.close()

    async def _listen(self, store: Store) -> None:
        heard_for, ear = self._session, store.wakeups.subscribe([session_topic(self._session)])
        while True:
            if heard_for != self._session:
                heard_for = self._session
                ear.listen([session_topic(heard_for)])
            if await ear.wait(self._intervals.heartbeat):
                self._due.set()

    async def _renewals(self, store: Store) -> None:
        loop = asyncio.get_running_loop()
        contact: asyncio.TimerHandle | None = None
        failing = False
        while not self._stopping:
            self._due.clear()
            asked = time.monotonic()
            wait = self._intervals.heartbeat
            if not self._lost:
                if contact is None:
                    contact = loop.call_later(self._patience(), self._holder.contact_lost)
                try:
                    held, claim, stopping = self._holder.holdings()
                    renewal = await store.renew(self._session, held, claim=claim, stopping=stopping)
                except SessionLost:
                    self._lost = True
                    self._holder.session_lost()
                except Exception as exc:
                    if not failing:
                        logger.warning("the session could not be renewed (%s); trying again", exc)
                    failing = True
                    wait = min(wait, 0.2 + random())
                else:
                    if failing:
                        logger.warning("the session is renewed again")
                    failing = False
                    # Counted from before the call: the store may have renewed it at any moment since.
                    contact.cancel()
                    contact = loop.call_at(asked + self._patience(), self._holder.contact_lost)
                    self._holder.renewed(renewal)
            await self._sleep(wait)
        if contact is not None:
            contact.cancel()

    def _patience(self) -> float:
        return self._intervals.lease - self._intervals.trust_margin

    async def _sleep(self, wait: float) -> None:
        if not self._stopping:
            await asyncio.sleep(CLOSEST_RENEWALS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), max(0.0, wait - CLOSEST_RENEWALS))


def _log_end(companion: asyncio.Future[None]) -> None:
    if not companion.cancelled() and companion.exception() is not None:
        logger.error("a companion of the keeper has ended", exc_info=companion.exception())
