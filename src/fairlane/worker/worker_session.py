"""The session of a worker: how it joins, joins anew after it was declared dead, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from random import random

from ..errors import IndexTaken, SessionLost, StoreError
from ..model.ids import new_id
from ..model.session import NewSession, Session, SessionKind, SessionState
from ..store.port import Store
from ..task import Registry
from .executor import CrashMarks
from .settings import WorkerSettings

logger = logging.getLogger("fairlane.worker")
LONGEST_PAUSE = 5.0
REDECLARE_SECONDS = 3_600.0
"""Schedules that nobody declares for a day stop, so a living worker repeats itself."""


def runs(pid: int) -> bool:
    """Whether another process of this machine has this id. One's own is what a container's first process always has."""
    if pid in (0, os.getpid()):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class WorkerSession:
    """Gives a worker its place in the fleet. `stopping` is set when it is not wanted any more."""

    def __init__(
        self,
        store: Store,
        settings: WorkerSettings,
        stopping: asyncio.Event,
        registry: Registry,
        *,
        declare: Callable[[Store], Awaitable[None]] | None = None,
        marks: CrashMarks | None = None,
        registered: Callable[[Session], None] | None = None,
    ) -> None:
        self._store = store
        self._declare = declare
        self._settings = settings
        self._stopping = stopping
        self._registry = registry
        self._marks = marks
        self._registered = registered
        self.session: Session | None = None
        self._joining: NewSession | None = None

    async def join(self) -> bool:
        """Become known to the store; False when told to stop before that. Waits for an index that another host has."""
        # The same one until the store has answered: a lost answer must not leave a second session behind.
        new = self._joining = self._joining or self._new()
        while True:
            if await self._still_here():
                return False
            try:
                self.session = await self._store.register(new)
                self._joining = None
                if self._marks is not None:
                    # A body may hold the interpreter before the first renewal: from here on the supervisor renews.
                    self._marks.beat()
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
            "worker %s is ready: %s; queues %s",
            self.session.worker,
            self._settings.slots,
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
                # A store that has lost its data has lost the session too, and what was declared. That comes first: from
                # the registration on jobs are claimed, and no limit may be passed.
                await self._declare_again()
                return await self.join()
            except StoreError as exc:
                logger.warning("could not register anew (%s); trying again", exc)
                await self._pause(pause * random())
                pause = min(LONGEST_PAUSE, 2 * pause)
        return False

    async def redeclare(self) -> None:
        """Declare once more from time to time, until cancelled."""
        while True:
            await asyncio.sleep(REDECLARE_SECONDS)
            try:
                await self._declare_again()
            except StoreError as exc:
                logger.warning("queues and schedules could not be declared again (%s)", exc)

    async def _declare_again(self) -> None:
        try:
            if self._declare is not None:
                await self._declare(self._store)
        except StoreError:
            raise
        except Exception:
            logger.exception("queues and schedules could not be declared again")

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
            tasks=tuple(sorted(task.name for task in self._registry)),
        )
        if self._marks is not None:
            self._marks.session(new.id)
        return new

    async def _still_here(self) -> bool:
        """Wait for a process of this host that has the index by name and still runs; True when told to stop meanwhile.

        Taking its place is meant for one that has died and whose session lives on, not for one that works.
        """
        told = False
        while (holder := await self._holder()) is not None:
            if not told:
                logger.warning("worker %s is taken by process %d of this host; waiting", holder.worker, holder.pid)
            told = True
            if await self._pause(min(1.0, self._settings.intervals.heartbeat)):
                return True
        return False

    async def _holder(self) -> Session | None:
        settings = self._settings
        if settings.index is None:
            return None
        for other in await self._store.sessions():
            mine = (other.host, other.pool, other.index) == (settings.host, settings.pool, settings.index)
            present = other.state in (SessionState.LIVE, SessionState.STOPPING) and other.remaining > 0
            if mine and present and other.kind is SessionKind.WORKER and runs(other.pid):
                return other
        return None

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
