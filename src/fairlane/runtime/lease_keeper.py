"""Keeps a session alive from a thread of its own, with a store and an event loop of its own.

A job function that computes for an hour, or blocks the main event loop, does not stop the renewals, as long as the
interpreter switches threads. The manager and the monitor of the main event loop run here for the same reason, as
background tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from random import Random, random
from typing import NamedTuple, Protocol

from .. import event_loops
from ..errors import SessionLost
from ..manager.service import FailureTracker
from ..model.intervals import Intervals
from ..model.job import Held
from ..model.session import Renewal
from ..store.port import Store
from ..store.wakeups import Subscription, session_topic
from .connection import OpenStore

logger = logging.getLogger("fairlane.runtime.lease_keeper")
BackgroundTask = Callable[[Store], Awaitable[None]]
CLOSEST_RENEWALS = 0.05
"""The shortest time between two renewals, in seconds, however often `nudge` is called."""
SECONDS_TO_STOP = 5.0
"""How long `stop` waits. After that the thread is left behind; as a daemon it ends with the process."""


class Holdings(NamedTuple):
    """The session to renew, and the claims that its owner holds under it."""

    session: str
    held: list[Held]
    claim: int
    """The number of the last claim that was answered: all of that claim's jobs are in `held`, or have ended."""
    stopping: bool


class SessionOwner(Protocol):
    """The part whose session is kept alive. Every method is called from the keeper's thread."""

    def holdings(self) -> Holdings:
        """What the next renewal names. After a loss, the keeper goes on when this returns another session."""

    def renewed(self, renewal: Renewal) -> None:
        """The store has renewed the session."""

    def session_lost(self, session: str) -> None:
        """The session has ended or was declared dead: drop its jobs and register again. Called once for each."""

    def contact_lost(self) -> None:
        """The lease is about to end without a renewal. Called once until the next renewal."""


class LeaseKeeper:
    """Renews a session until it is stopped, or until `owner_loop`, the event loop of its owner, is closed."""

    def __init__(
        self,
        open_store: OpenStore,
        intervals: Intervals,
        owner: SessionOwner,
        *,
        background_tasks: Sequence[BackgroundTask] = (),
        owner_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._open_store = open_store
        self._intervals = intervals
        self._owner = owner
        self._background_tasks = background_tasks
        self._owner_loop = owner_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = asyncio.Event()
        self._contact: asyncio.TimerHandle | None = None
        self._stopping = False
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        for future in (self._started, self._ended):
            # A running future cannot be cancelled: a caller that stops waiting must not cancel it under the thread.
            future.set_running_or_notify_cancel()

    async def start(self) -> None:
        """Start the thread. Returns when its store is open, or raises the error that prevented that."""
        threading.Thread(target=self._run, name="fairlane-keeper", daemon=True).start()
        await asyncio.wrap_future(self._started)

    def nudge(self) -> None:
        """Renew soon, instead of at the next heartbeat. From any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the keeper has stopped
                loop.call_soon_threadsafe(self._due.set)

    async def stop(self) -> None:
        """End the background tasks and the renewals, and close the store. The session itself is not ended."""
        self._stopping = True
        self.nudge()
        try:
            async with asyncio.timeout(SECONDS_TO_STOP):
                await asyncio.wrap_future(self._ended)
        except TimeoutError:
            logger.warning("the lease keeper did not stop in time and is left behind: the store does not answer")

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            event_loops.run_beside(self._keep())
        except BaseException as exc:
            if self._started.done():
                logger.exception("the lease keeper failed; the session will expire")
            else:
                self._started.set_exception(exc)
        finally:
            self._ended.set_result(None)

    async def _keep(self) -> None:
        store = await self._open_store()
        self._loop = asyncio.get_running_loop()
        self._started.set_result(None)
        try:
            subscription = store.wakeups.subscribe(())
            tasks = [asyncio.ensure_future(task(store)) for task in self._background_tasks]
            for task in tasks:
                task.add_done_callback(_log_failure)
            tasks.append(asyncio.ensure_future(self._listen(subscription)))
            try:
                await self._renewals(store, subscription)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                subscription.close()
        finally:
            await store.close()

    async def _listen(self, subscription: Subscription) -> None:
        while True:
            if await subscription.wait(self._intervals.heartbeat):
                self._due.set()

    async def _renewals(self, store: Store, subscription: Subscription) -> None:
        subscribed = lost = ""
        failures = FailureTracker("renewing the session", logger, Random())
        while not self._stopping:
            if self._owner_loop is not None and self._owner_loop.is_closed():
                logger.error("the event loop of the session's owner is closed; the session will expire")
                break
            self._due.clear()
            wait = self._intervals.heartbeat
            holdings = self._owner.holdings()
            if holdings.session != subscribed:
                subscribed = holdings.session
                subscription.listen([session_topic(subscribed)])
            if holdings.session != lost:
                try:
                    await self._renew(store, holdings)
                except SessionLost:
                    lost = holdings.session
                    self._expect_contact(None)
                    self._owner.session_lost(lost)
                except Exception as exc:
                    failures.failed(exc)
                    # Sooner than after other failures: the lease goes on running out.
                    wait = min(wait, 0.2 + random())
                else:
                    failures.worked()
            await self._sleep(wait)
        self._expect_contact(None)

    async def _renew(self, store: Store, holdings: Holdings) -> None:
        asked = time.monotonic()
        if self._contact is None:
            self._expect_contact(asked)
        renewal = await store.renew(holdings.session, holdings.held, claim=holdings.claim, stopping=holdings.stopping)
        # From the time before the call: the store may have renewed the lease at any moment since.
        self._expect_contact(asked)
        if time.monotonic() - asked > (self._intervals.lease - self._intervals.trust_margin) / 2:
            # So slow an answer does not show that there is contact now: work begun because of it might have to stop at
            # once. Renew again instead; the next answer repeats what this one contained.
            self._due.set()
            return
        self._owner.renewed(renewal)

    def _expect_contact(self, since: float | None) -> None:
        """Call `contact_lost` when the lease, less its margin, has passed since then; None stops the timer."""
        if self._contact is not None:
            self._contact.cancel()
            self._contact = None
        if since is not None:
            trusted = self._intervals.lease - self._intervals.trust_margin
            self._contact = asyncio.get_running_loop().call_at(since + trusted, self._owner.contact_lost)

    async def _sleep(self, wait: float) -> None:
        if not self._stopping:
            await asyncio.sleep(CLOSEST_RENEWALS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, wait - CLOSEST_RENEWALS)):
                await self._due.wait()


def _log_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a background task of the lease keeper failed", exc_info=task.exception())
