"""The session of a worker: how it joins, joins anew after it was declared dead, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from random import random

from ..errors import IndexTaken, SessionLost, StoreError
from ..ids import new_id
from ..session import NewSession, Session, SessionKind, SessionState
from ..store import Store
from .executor import Marks
from .settings import WorkerSettings

logger = logging.getLogger("fairlane.worker")
LONGEST_PAUSE = 5.0


class Membership:
    """Gives a worker its place in the fleet. `stopping` is set when it is not wanted any more."""

    def __init__(
        self,
        store: Store,
        settings: WorkerSettings,
        stopping: asyncio.Event,
        *,
        marks: Marks | None = None,
        registered: Callable[[Session], None] | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._stopping = stopping
        self._marks = marks
        self._registered = registered
        self.session: Session | None = None
        self._joining: NewSession | None = None

    async def join(self) -> bool:
        """Become known to the store; False when told to stop before that. Waits for an index that another host has."""
        # The same one until the store has answered: a lost answer must not leave a second session behind.
        new = self._joining = self._joining or self._new()
        while True:
            try:
                self.session = await self._store.register(new)
                self._joining = None
                break
            except SessionLost:
                # It was registered, the answer was lost, and the outage outlasted its lease.
                new = self._joining = self._new()
            except IndexTaken as exc:
                logger.warning("%s; waiting", exc)
                if await self._pause(min(exc.retry_after, self._settings.intervals.lease) + 0.1):
                    return False
        if self._registered is not None:
            self._registered(self.session)
        logger.info(
            "worker %s is ready: %d slots, queues %s",
            self.session.worker,
            self._settings.slots.total,
            ", ".join(self._settings.queues),
        )
        return True

    async def join_anew(self) -> bool:
        """The same after the session was lost, however long the store stays away. False also when it was replaced."""
        pause = 0.1
        while not self._stopping.is_set():
            try:
                if await self._replaced():
                    assert self.session is not None
                    logger.error("another worker was started as %s: this one ends", self.session.worker)
                    return False
                return await self.join()
            except StoreError as exc:
                logger.warning("could not register anew (%s); trying again", exc)
                await self._pause(pause * random())
                pause = min(LONGEST_PAUSE, 2 * pause)
        return False

    async def leave(self) -> None:
        """Say goodbye, so that nobody has to wait for the lease to end."""
        if self.session is None:
            return
        try:
            async with asyncio.timeout(self._settings.intervals.lease):
                await self._store.leave(self.session.id, begun=[])
        except Exception as exc:
            logger.warning("could not say goodbye to the store (%s); the session will expire", exc)

    def _new(self) -> NewSession:
        settings = self._settings
        new = NewSession(
            id=new_id(),
            kind=SessionKind.WORKER,
            lease=settings.intervals.lease,
            host=settings.host,
            pid=os.getpid(),
            pool=settings.pool,
            index=settings.index,
            queues=tuple(settings.queues),
            slots=settings.slots,
        )
        if self._marks is not None:
            self._marks.session(new.id)
        return new

    async def _replaced(self) -> bool:
        """Whether its named index was taken over. Taking it back would go on for ever."""
        if self._settings.index is None or self.session is None:
            return False
        mine = self.session
        return any(
            other.index == mine.index and other.pool == mine.pool and other.state is SessionState.LIVE
            for other in await self._store.sessions()
            if other.id != mine.id
        )

    async def _pause(self, seconds: float) -> bool:
        """Wait; answers whether it was told to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()
