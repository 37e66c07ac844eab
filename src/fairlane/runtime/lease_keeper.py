"""Keeps a session alive from a thread of its own, with a store and an event loop of its own.

A body that computes for an hour, or holds the main event loop, does not stop the renewals: whoever runs in this
process is alive as long as the interpreter switches threads. The manager and the watch over the main loop run here too,
as background_tasks, for the same reason.
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

from .. import event_loops
from ..errors import SessionLost
from ..model.intervals import Intervals
from ..model.job import Held
from ..model.session import Renewal
from ..store.port import Store
from ..store.wakeups import Subscription, session_topic
from .connection import OpenStore

logger = logging.getLogger("fairlane.runtime.lease_keeper")
BackgroundTask = Callable[[Store], Awaitable[None]]
CLOSEST_RENEWALS = 0.05
"""Seconds between two renewals however often somebody asks for one."""
SECONDS_TO_STOP = 5.0
"""A store that does not answer must not hold up a process that wants to end; the thread ends with the process."""


class Holdings(NamedTuple):
    """What a process believes: its session, and the claims of it."""

    session: str
    held: list[Held]
    claim: int
    """The number of the last claim whose reply it has: all of that claim's jobs are in `held`, or have ended."""
    stopping: bool


class SessionOwner(Protocol):
    """Whose session is kept. Everything here is called from the keeper's thread."""

    def holdings(self) -> Holdings:
        """What to name in the next renewal. After a loss, another session is what is to be kept from then on."""

    def renewed(self, renewal: Renewal) -> None:
        """The store answered."""

    def session_lost(self, session: str) -> None:
        """The session has ended or was declared dead: drop its bodies and register anew. Told once for each."""

    def contact_lost(self) -> None:
        """The lease is about to end without contact. Called once until there is contact again."""


class LeaseKeeper:
    """Renews a session until it is stopped, or until the event loop of its `owner` is closed."""

    def __init__(
        self,
        open_store: OpenStore,
        intervals: Intervals,
        holder: SessionOwner,
        *,
        background_tasks: Sequence[BackgroundTask] = (),
        owner: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._open_store = open_store
        self._intervals = intervals
        self._holder = holder
        self._background_tasks = background_tasks
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = asyncio.Event()
        self._contact: asyncio.TimerHandle | None = None
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

    async def stop(self) -> None:
        """End the background_tasks and the renewals, and close the store. The session is not ended."""
        self._stopping = True
        self.nudge()
        try:
            async with asyncio.timeout(SECONDS_TO_STOP):
                await asyncio.wrap_future(self._ended)
        except TimeoutError:
            logger.warning("the keeper is left behind: the store does not answer")

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            event_loops.run_beside(self._keep())
        except BaseException as exc:
            if self._started.done():
                logger.exception("the keeper's thread has ended; the session will expire")
            else:
                self._started.set_exception(exc)
        finally:
            self._ended.set_result(None)

    async def _keep(self) -> None:
        store = await self._open_store()
        self._loop = asyncio.get_running_loop()
        self._started.set_result(None)
        try:
            ear = store.wakeups.subscribe(())
            beside = [asyncio.ensure_future(companion(store)) for companion in self._background_tasks]
            for companion in beside:
                companion.add_done_callback(_log_end)
            beside.append(asyncio.ensure_future(self._listen(ear)))
            try:
                await self._renewals(store, ear)
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                ear.close()
        finally:
            await store.close()

    async def _listen(self, ear: Subscription) -> None:
        while True:
            if await ear.wait(self._intervals.heartbeat):
                self._due.set()

    async def _renewals(self, store: Store, ear: Subscription) -> None:
        listening = lost = ""
        failing = False
        while not self._stopping:
            if self._owner is not None and self._owner.is_closed():
                logger.error("the event loop that this session was kept for is closed; the session will expire")
                break
            self._due.clear()
            wait = self._intervals.heartbeat
            holdings = self._holder.holdings()
            if holdings.session != listening:
                listening = holdings.session
                ear.listen([session_topic(listening)])
            if holdings.session != lost:
                try:
                    await self._renew(store, holdings)
                except SessionLost:
                    lost = holdings.session
                    self._expect_contact(None)
                    self._holder.session_lost(lost)
                except Exception as exc:
                    if not failing:
                        logger.warning("the session could not be renewed (%s); trying again", exc)
                    failing = True
                    wait = min(wait, 0.2 + random())
                else:
                    if failing:
                        logger.warning("the session is renewed again")
                    failing = False
            await self._sleep(wait)
        self._expect_contact(None)

    async def _renew(self, store: Store, holdings: Holdings) -> None:
        asked = time.monotonic()
        if self._contact is None:
            self._expect_contact(asked)
        renewal = await store.renew(holdings.session, holdings.held, claim=holdings.claim, stopping=holdings.stopping)
        # Counted from before the call: the store may have renewed it at any moment since.
        self._expect_contact(asked)
        if time.monotonic() - asked > (self._intervals.lease - self._intervals.trust_margin) / 2:
            # An answer that took so long says little of now: whoever began something because there is contact again
            # might have to stop it at once. Asked again, and what it says is said again.
            self._due.set()
            return
        self._holder.renewed(renewal)

    def _expect_contact(self, since: float | None) -> None:
        """Tell the holder if there is no contact for a lease less its margin; None: there is no lease to lose."""
        if self._contact is not None:
            self._contact.cancel()
            self._contact = None
        if since is not None:
            patience = self._intervals.lease - self._intervals.trust_margin
            self._contact = asyncio.get_running_loop().call_at(since + patience, self._holder.contact_lost)

    async def _sleep(self, wait: float) -> None:
        if not self._stopping:
            await asyncio.sleep(CLOSEST_RENEWALS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, wait - CLOSEST_RENEWALS)):
                await self._due.wait()


def _log_end(companion: asyncio.Future[None]) -> None:
    if not companion.cancelled() and companion.exception() is not None:
        logger.error("a companion of the keeper has ended", exc_info=companion.exception())
