"""The session of a worker: it is registered, registered again after it was declared dead, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from random import Random

from ..errors import IndexTaken, SessionLost, StoreError
from ..manager.service import FailureTracker
from ..model.ids import new_id
from ..model.session import NewSession, Session, SessionKind, SessionState
from ..store.port import Store
from .executor import RecordsCrashState
from .settings import WorkerSettings

logger = logging.getLogger("fairlane.worker")
REDECLARE_SECONDS = 3_600.0
"""A schedule that was not declared for a day stops, so a running worker repeats its declarations."""


def runs(pid: int) -> bool:
    """Whether another process of this machine has this id. Our own id does not count: in a container it is always 1."""
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
    """Registers and ends the session of one worker. `stopping` is set when the worker is asked to stop."""

    def __init__(
        self,
        store: Store,
        settings: WorkerSettings,
        stopping: asyncio.Event,
        tasks: Callable[[], tuple[str, ...]],
        *,
        declare: Callable[[Store], Awaitable[None]] | None = None,
        crash_state: RecordsCrashState | None = None,
        registered: Callable[[Session], None] | None = None,
    ) -> None:
        self._store = store
        self._declare = declare
        self._settings = settings
        self._stopping = stopping
        self._tasks = tasks
        self._crash_state = crash_state
        self._registered = registered
        self.session: Session | None = None
        self._joining: NewSession | None = None

    async def join(self) -> bool:
        """Register the session; False when asked to stop before that. Waits for an index that another host has."""
        # The same session until the store has answered: a lost answer must not leave a second one behind.
        new = self._joining = self._joining or self._new()
        while True:
            if await self._wait_for_index():
                return False
            try:
                self.session = await self._store.register(new)
                self._joining = None
                if self._crash_state is not None:
                    # A job may block the interpreter before the first renewal: from here on the supervisor can renew.
                    self._crash_state.beat()
                break
            except SessionLost:
                # It was registered, but the answer was lost and the outage lasted longer than its lease.
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

    async def join_again(self) -> bool:
        """Register again after the session was lost, however long an outage lasts. False also when it was replaced."""
        failures = FailureTracker("registering again", logger, Random())
        while not self._stopping.is_set():
            try:
                if await self._replaced():
                    assert self.session is not None
                    logger.error("another worker was started as %s: this one stops", self.session.worker)
                    return False
                # A store that has lost its data has lost the declared queues too. Declare them before registering:
                # jobs are claimed from then on, and no limit may be exceeded.
                await self._declare_again()
                return await self.join()
            except StoreError as exc:
                await self._pause(failures.failed(exc))
        return False

    async def redeclare(self) -> None:
        """Repeat the declarations every hour until cancelled."""
        while True:
            await asyncio.sleep(REDECLARE_SECONDS)
            try:
                await self._declare_again()
            except StoreError as exc:
                logger.warning("could not declare queues and schedules again (%s)", exc)

    async def _declare_again(self) -> None:
        try:
            if self._declare is not None:
                await self._declare(self._store)
        except StoreError:
            raise
        except Exception:
            logger.exception("could not declare queues and schedules again")

    async def leave(self) -> None:
        """End the session, so that its jobs need not wait for the lease to end."""
        if self.session is None:
            return
        if self._crash_state is not None:
            self._crash_state.leave()
        try:
            async with asyncio.timeout(self._settings.intervals.lease):
                await self._store.leave(self.session.id, begun=[])
        except Exception as exc:
            logger.warning("could not end the session (%s); it will expire", exc)

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
            tasks=self._tasks(),
        )
        if self._crash_state is not None:
            self._crash_state.session(new.id)
        return new

    async def _wait_for_index(self) -> bool:
        """Wait until no other running process of this host has the index; True when asked to stop meanwhile.

        The store lets a worker take over the index of another session of its host. That is meant for a process that
        has died and whose session is still alive, not for one that runs.
        """
        logged = False
        while (other := await self._index_owner()) is not None:
            if not logged:
                logger.warning("worker %s is taken by process %d of this host; waiting", other.worker, other.pid)
            logged = True
            if await self._pause(min(1.0, self._settings.intervals.heartbeat)):
                return True
        return False

    async def _index_owner(self) -> Session | None:
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
        """Whether another worker has taken over the index. Two workers that take it back in turn would never stop."""
        if self._settings.index is None or self.session is None:
            return False
        mine = self.session
        return any(
            other.index == mine.index and other.pool == mine.pool and other.state is SessionState.LIVE
            for other in await self._store.sessions()
            if other.id != mine.id
        )

    async def _pause(self, seconds: float) -> bool:
        """Wait. True when asked to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()
