"""The command ``manager``: promotes, rescues, schedules and prunes, and runs no job.

Its session is kept like a worker's, so that everybody sees who is there to lead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

import click

from ..model.ids import new_id
from ..model.session import NewSession, Renewal, SessionKind
from ..runtime.lease_keeper import Holdings, LeaseKeeper
from ..runtime.logs import configure
from .command import Command, log_options, run, store_options
from .context import Target, Use

if TYPE_CHECKING:
    from ..store.port import Store

logger = logging.getLogger("fairlane.manager")


@click.command("manager", cls=Command)
@log_options
@store_options
def manager_command(app_name: str | None, url: str | None, log_level: str, log_format: str) -> None:
    """Lead the fleet, or stand by to: due jobs, retries, schedules, rescues. Needs none of your code."""
    target = Target(app_name, url, Use.MAKE)
    configure(log_level, log_format)
    run(_lead(target))


async def _lead(target: Target) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    store = await target.connection.store()
    session = ManagerSession(target, store)
    await session.begin()
    try:
        await stopped.wait()
    finally:
        await session.end()
        await target.app.close()


class ManagerSession:
    """The session of a manager that runs alone. It holds no jobs; a session that is lost is replaced by a new one."""

    def __init__(self, target: Target, store: Store) -> None:
        self._settings = target.app.settings
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._session = ""
        self._renewing: asyncio.Task[None] | None = None
        self._open_store = target.app.open_store

    async def begin(self) -> None:
        """Register, and stand for leadership."""
        await self._register()
        self._keeper = LeaseKeeper(self._open_store, self._settings.intervals, self, background_tasks=[self._manage])
        await self._keeper.start()
        logger.info("the manager is ready")

    async def end(self) -> None:
        """Resign, and leave."""
        self._stopping = True
        if self._renewing is not None:
            self._renewing.cancel()
        await self._keeper.stop()
        try:
            await asyncio.wait_for(self._store.leave(self._session, begun=[]), self._settings.intervals.lease)
        except Exception as exc:
            logger.warning("could not end the session (%s); it will expire", exc)
        logger.info("the manager has stopped")

    async def _register(self) -> None:
        session = NewSession(
            id=new_id(),
            kind=SessionKind.MANAGER,
            lease=self._settings.intervals.lease,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._session = (await self._store.register(session)).id

    async def _manage(self, store: Store) -> None:
        from ..manager.manager import Manager

        await Manager(
            store, session=self._session, intervals=self._settings.intervals, retention=self._settings.retention
        ).run()

    async def _begin_anew(self) -> None:
        while True:
            try:
                await self._register()
            except Exception as exc:
                logger.warning("could not register anew (%s); trying again", exc)
                await asyncio.sleep(self._settings.intervals.poll)
            else:
                self._keeper.nudge()
                return

    def _lose_session(self) -> None:
        logger.warning("the session was declared dead; registering anew")
        self._renewing = self._loop.create_task(self._begin_anew())

    # -- called by the keeper, from its thread -----------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """It never holds a job."""
        return Holdings(self._session, [], 0, self._stopping)

    def renewed(self, renewal: Renewal) -> None:
        """There is nothing to compare."""

    def session_lost(self, session: str) -> None:
        """Leadership does not hang on the session, so nothing has to end; only the name was lost."""
        self._loop.call_soon_threadsafe(self._lose_session)

    def contact_lost(self) -> None:
        """The term has a lease of its own, which the manager watches."""
