"""The manager stands for election, and runs the services while it leads.

It assumes nothing about other managers: two that lead at once are harmless, because the store rejects a term that is
over and every pass is idempotent. Its services have stopped before `on_change` reports that it no longer leads, and a
manager that is cancelled resigns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn

from ..errors import Stale
from ..model.intervals import Intervals
from ..model.maintenance import Retention
from ..store.port import Store
from ..store.wakeups import Wakeups
from .admitter import Admitter
from .election import Election
from .leader_context import COUNTED, Contact, LeaderContext, Monotonic, StoreClock, log
from .promoter import Promoter
from .pruner import Pruner
from .rescuer import Rescuer
from .scheduler import Scheduler
from .service import Loop, Service

USUAL_INTERVALS = Intervals()
USUAL_RETENTION = Retention()

Run = Callable[[], Coroutine[Any, Any, NoReturn]]
OnChange = Callable[[int | None], None]
"""Called with the term when the manager begins to lead, and with None when it has stopped leading."""


class Manager:
    """One candidate for leadership. Its `session` is only a name here: it need not be registered.

    `wakeups` replaces the store's own: a process that already subscribes through one store needs no second one.
    """

    def __init__(
        self,
        store: Store,
        *,
        session: str,
        intervals: Intervals = USUAL_INTERVALS,
        retention: Retention = USUAL_RETENTION,
        on_change: OnChange | None = None,
        wakeups: Wakeups | None = None,
        monotonic: Monotonic = time.monotonic,
    ) -> None:
        self._store = store
        self._intervals = intervals
        self._retention = retention
        self._on_change = on_change
        self._monotonic = monotonic
        # Counts from the first call as a standby, so a standby that takes over need not wait again.
        self._contact = Contact(monotonic)
        self._election = Election(store, session, intervals, self._contact, wakeups=wakeups, monotonic=monotonic)
        self.counts = dict.fromkeys(COUNTED, 0)
        """What the services have done in this process, in all its terms."""

    @property
    def term(self) -> int | None:
        """The term in which it leads, None when it does not lead."""
        return self._election.term

    @property
    def leads(self) -> bool:
        """Whether it leads, and trusts its term."""
        return self.term is not None

    async def run(self) -> NoReturn:
        """Stand for election and lead, again and again, until cancelled; then resign."""
        while True:
            term = await self._election.win()
            await self._lead(term)
            # After a lost term, the other candidates try first.
            await asyncio.sleep(self._election.pause())

    async def _lead(self, term: int) -> None:
        """Run the services for one term. Returns when the term is lost."""
        log.info("leading from term %d", term)
        self._report(term)
        try:
            why = await self._serve(term)
        except BaseException:
            await self._election.resign(term)
            log.info("resigned from term %d", term)
            raise
        else:
            self._election.step_down()
            log.warning("stepped down from term %d: %s", term, why)
        finally:
            self._report(None)

    async def _serve(self, term: int) -> str:
        """Run the services until the term is lost. Returns the reason; the services have ended then."""
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        parts: dict[str, Run] = {service.name: Loop(service, log).run for service in self._services(term)}
        parts["election"] = partial(self._election.keep, term)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run_part(run, lost), name=f"fairlane-{name}") for name, run in parts.items()]
            why = await lost
            for task in tasks:
                task.cancel()
        return why

    def _services(self, term: int) -> list[Service]:
        context = LeaderContext(
            store=self._store,
            term=term,
            intervals=self._intervals,
            contact=self._contact,
            clock=StoreClock(self._monotonic),
            counts=self.counts,
        )
        return [
            Rescuer(context),
            Promoter(context),
            Admitter(context),
            Scheduler(context),
            Pruner(context, self._retention),
        ]

    def _report(self, term: int | None) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(term)
        except Exception:
            log.exception("the on_change callback of the manager failed")


async def _run_part(run: Run, lost: asyncio.Future[str]) -> None:
    """Run one part, and report a lost term through `lost` instead of raising `Stale`.

    A task group whose task fails while the group itself is being cancelled hides the cancellation, and a cancelled
    manager must not continue.
    """
    try:
        await run()
    except Stale as exc:
        if not lost.done():
            lost.set_result(str(exc))
