"""The command ``manager``: promotes, rescues, schedules and prunes, and runs no jobs.

It renews a session like a worker, so that `fairlane workers --all` and `fairlane status` show it.
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
from .context import CommandContext, StoreAccess

if TYPE_CHECKING:
    from ..store.port import Store

logger = logging.getLogger("fairlane.manager")


@click.command("manager", cls=Command)
@log_options
@store_options
def manager_command(app_name: str | None, url: str | None, log_level: str, log_format: str | None) -> None:
    """Run a manager without a worker: due jobs, retries, schedules, rescues. Needs none of your code."""
    context = CommandContext(app_name, url, StoreAccess.CREATE)
    configure(log_level, log_format)
    run(_lead(context))


async def _lead(context: CommandContext) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    store = await context.connection.store()
    session = ManagerSession(context, store)
    await session.begin()
    try:
        await stopped.wait()
    finally:
        await session.end()
        await context.app.close()


class ManagerSession:
    """The session of a manager that runs alone. It owns no jobs. A lost session is replaced by a new one."""

    def __init__(self, context: CommandContext, store: Store) -> None:
        self._settings = context.app.settings
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._session = ""
        self._renewing: asyncio.Task[None] | None = None
        self._open_store = context.app.open_store

    async def begin(self) -> None:
        """Register the session and stand for election."""
        await self._register()
        self._keeper = LeaseKeeper(self._open_store, self._settings.intervals, self, background_tasks=[self._manage])
        await self._keeper.start()
        logger.info("the manager is ready")

    async def end(self) -> None:
        """Resign and end the session."""
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

    async def _register_again(self) -> None:
        while True:
            try:
                await self._register()
            except Exception as exc:
                logger.warning("could not register again (%s); retrying", exc)
                await asyncio.sleep(self._settings.intervals.poll)
            else:
                self._keeper.nudge()
                return

    def _lose_session(self) -> None:
        logger.warning("the session was declared dead; registering again")
        self._renewing = self._loop.create_task(self._register_again())

    # -- called by the lease keeper, in its thread --------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """Report that the session owns no jobs."""
        return Holdings(self._session, [], 0, self._stopping)

    def renewed(self, renewal: Renewal) -> None:
        """Nothing to do: there are no jobs to compare."""

    def session_lost(self, session: str) -> None:
        """Register again. Leadership does not depend on the session, so no work stops."""
        self._loop.call_soon_threadsafe(self._lose_session)

    def contact_lost(self) -> None:
        """Nothing to do: the manager watches the lease of its own term."""
