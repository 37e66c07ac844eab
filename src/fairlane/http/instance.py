"""One complete instance: the HTTP service, a worker and a manager in one process and one event loop.

    app = Fairlane()
    web = serve_app(app)     # uvicorn shop:web

The worker starts and stops with the server. The first SIGTERM or SIGINT stops claiming, ends open streams and lets
running jobs finish within the grace period; the second returns the jobs that still run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..app import Fairlane
from ..config import RESERVED, SLOTS
from ..errors import InvalidInput
from ..model.names import check_count, shown
from ..model.slots import MOST_SLOTS, Reserved, Slots, default_reserved
from ..task import Seconds, Task
from .signals import before_server

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..worker.worker import Worker
    from .operation import Operations
    from .settings import HttpSettings

logger = logging.getLogger("fairlane.http")
BARE_SLOTS = "MAX_CONCURRENT_TASKS"
BARE_RESERVED = "HIGH_PRIORITY_RESERVED"
MOST_WORKERS = 64


def slots_from_env(usual: Slots, environ: Mapping[str, str]) -> Slots:
    """The slots of an instance. Variables with the prefix FAIRLANE_ take precedence. Errors name the variable."""
    total_name, total = _read(environ, SLOTS, BARE_SLOTS, least=1)
    high_name, high = _read(environ, RESERVED, BARE_RESERVED, least=0)
    if total is None and high is None:
        return usual
    slots = usual.total if total is None else total
    if high is None:
        return Slots(total=slots, reserved=default_reserved(slots))
    if high >= slots:
        named = f" ({total_name})" if total is not None else ""
        raise InvalidInput(high_name, f"{high} reserved of {slots} slots{named} leaves none for other jobs")
    return Slots(total=slots, reserved=Reserved(high=high))


def _read(environ: Mapping[str, str], name: str, bare: str, *, least: int) -> tuple[str, int | None]:
    # Shells and compose files unset a variable by making it empty.
    for found in (name, bare):
        text = environ.get(found, "").strip()
        if text:
            try:
                number = int(text)
            except ValueError:
                raise InvalidInput(found, f"{shown(text)} is not a whole number") from None
            return found, check_count(found, number, least=least, most=MOST_SLOTS)
    return name, None


class Instance:
    """The workers inside a web process. They share its event loop and its store."""

    def __init__(
        self, app: Fairlane, *, workers: int = 1, slots: Slots | None = None, grace: Seconds | None = None
    ) -> None:
        self._app = app
        self._count = check_count("workers", workers, least=0, most=MOST_WORKERS)
        self._slots = slots
        self._grace = grace
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = self._signalled_before = False
        self.workers: list[Worker] = []
        """The running workers."""

    async def start(self) -> None:
        """Start the workers and wait until they are ready. Raises the error of a worker that cannot start."""
        self._stopping = self._signalled_before = False
        self.workers = [self._app.worker(slots=self._slots, grace=self._grace) for _ in range(self._count)]
        self._tasks = [asyncio.create_task(worker.run()) for worker in self.workers]
        try:
            for worker, task in zip(self.workers, self._tasks, strict=True):
                ready = asyncio.create_task(worker.ready.wait())
                await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
                if task.done():
                    task.result()
        except BaseException:
            await self.join(now=True)
            raise
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def stop(self, *, now: bool = False) -> None:
        """Stop claiming. Running jobs finish within the grace period, or are returned at once with `now`."""
        self._stopping = True
        for worker in self.workers:
            worker.stop(now=now)

    async def join(self, *, now: bool = False) -> None:
        """Stop, and wait for the workers."""
        self.stop(now=now)
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self.workers = [], []
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                logger.error("a worker of this instance failed: %r", outcome)

    def unready(self) -> str | None:
        """The reason why a worker cannot claim; None if all can."""
        from ..worker.readiness import unready

        if len(self.workers) < self._count:
            return "the worker has not started"
        return next(filter(None, map(unready, self.workers)), None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._stopping or task.cancelled():
            return
        # Do not keep accepting jobs without a worker: exit, so that the service manager restarts the instance.
        logger.critical(
            "the worker of this instance stopped unexpectedly; stopping the instance", exc_info=task.exception()
        )
        if callable(signal.getsignal(signal.SIGTERM)):
            # Without a handler the signal would kill the program instead of stopping a server.
            signal.raise_signal(signal.SIGTERM)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the workers inside the block."""
        await self.start()
        with before_server(self._signalled):
            try:
                yield
            finally:
                await self.join()

    def _signalled(self) -> None:
        again, self._signalled_before = self._signalled_before, True
        if again:
            logger.info("second signal: returning running jobs")
        self.stop(now=again)


def serve_app(
    app: Fairlane,
    *,
    settings: HttpSettings | None = None,
    legacy_task: Task[..., Any] | str | None = None,
    workers: int = 1,
    slots: int | Slots | None = None,
    grace: Seconds | None = None,
    extra: Iterable[Operations] = (),
) -> FastAPI:
    """Create a complete instance of an application: ``web = serve_app(app)``, then ``uvicorn module:web``.

    The slots of each worker come from FAIRLANE_MAX_CONCURRENT_TASKS and FAIRLANE_HIGH_PRIORITY_RESERVED, or from the
    same names without the prefix, unless `slots` is given. `legacy_task` is the task that ``GET /task`` runs; without
    it, or with ``HttpSettings(legacy=False)``, that route does not exist. With ``workers=0`` it only serves HTTP.
    `extra` are operations of your own, as for `create_app`.
    """
    from .application import create_app, service_of
    from .routes.legacy import legacy_operations
    from .settings import HttpSettings

    if isinstance(slots, int):
        slots = app.settings.slots_for(slots)
    instance = Instance(
        app, workers=workers, slots=slots or slots_from_env(app.settings.slots, os.environ), grace=grace
    )
    chosen = settings or HttpSettings()
    more = [*extra]
    if legacy_task is not None and chosen.legacy:
        app.load_tasks()
        more.append(legacy_operations(app, legacy_task))
    web = create_app(app, settings=chosen, extra=more)
    service = service_of(web)
    service.lifespans.append(instance.running)
    service.on_stop.append(instance.stop)
    service.unready.append(instance.unready)
    return web
