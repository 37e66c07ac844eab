"""Workers of a pool: a Celery worker joins it by ``--index`` or by serving one of its queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from celery.exceptions import ImproperlyConfigured

from ...model.job import Claimed
from ...worker.settings import WorkerSettings
from ...worker.worker_index import choose_index

if TYPE_CHECKING:
    from .sticky import StickyRouter

AUTO = "auto"


class Membership:
    """The place of one Celery worker in the pool of a router."""

    def __init__(self, router: StickyRouter, requested: str) -> None:
        self._router = router
        self._requested = requested
        self.index: int | None = int(requested) if requested.isdecimal() else None
        """Its index; None until it is known."""

    async def settings(self, settings: WorkerSettings) -> WorkerSettings:
        """The settings of a worker, as a member of the pool."""
        fairlane = self._router.fair.fairlane
        mine = msgspec.structs.replace(settings, pool=self._router.org)
        index = self.index
        if index is None:
            index = await choose_index(fairlane.client, fairlane.settings.url, mine, self._requested)
        queues = {self._router.any_worker: 1, self._router.every_worker: 1, **settings.queues}
        if index is not None:
            queues[self._router.one_worker(index)] = 1
        return msgspec.structs.replace(mine, index=index, queues=queues)

    def queue_of(self, job: Claimed) -> str:
        """The queue that Celery sees: a task of a key comes from the queue of this worker."""
        if job.sticky is None or self.index is None:
            return job.queue
        return self._router.one_worker(self.index)


def join(router: StickyRouter, controller: Any) -> Membership | None:
    """Make a Celery worker that is starting a member of the pool; None if it does not serve it.

    It does so by ``--index``, or if it consumes one of the pool's queues. If these are neither in ``-Q`` nor in
    `task_queues`, ``--index`` makes it serve the pool alone.
    """
    queues = router.app.amqp.queues
    option = controller.options.get("index")
    listed = queues._consume_from is not None
    named = sorted(name for name in queues.consume_from if router.owns(name))
    if option is None and not named:
        return None
    # A list of all queues in the configuration says nothing about this worker.
    requested = _requested(router, option, named if listed else [])
    names = [router.any_worker]
    if requested.isdecimal():
        names.append(router.one_worker(int(requested)))
    kept = list(queues.consume_from) if listed or named else []
    queues.select([*kept, *names])
    return Membership(router, requested)


def _requested(router: StickyRouter, option: str | None, named: list[str]) -> str:
    """The index by the option, the queues or the environment; otherwise how to choose it."""
    by_queue = {index for name in named if (index := router.index_of(name)) is not None}
    if len(by_queue) > 1:
        raise ImproperlyConfigured(f"-Q: a worker has one index, not the queues {', '.join(named)}")
    if option is not None and option not in ("host", AUTO) and not option.isdecimal():
        raise ImproperlyConfigured(f"--index: must be a number, 'host' or 'auto', not {option!r}")
    if option is not None and option.isdecimal() and by_queue - {int(option)}:
        raise ImproperlyConfigured(f"--index {option} contradicts -Q {', '.join(named)}")
    if option is not None and option != AUTO:
        return option
    if by_queue:
        return str(by_queue.pop())
    configured = router.fair.fairlane.settings.index
    return AUTO if configured is None else str(configured)
