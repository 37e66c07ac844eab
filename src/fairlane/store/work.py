"""Work announced by topics: every worker of a queue is notified of every job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..model.job import Claimed, Priority
from ..model.session import Claim
from .wakeups import Subscription, queue_topic, worker_topic


class _Subscribes(Protocol):
    def subscribe(self, topics: Iterable[str], on_delivery: Callable[[], None] | None = None) -> Subscription:
        """As `Wakeups.subscribe`."""


class TopicWork:
    """Implements `fairlane.store.wakeups.Work` by one subscription."""

    patience = 1.0

    def __init__(self, wakeups: _Subscribes, queues: Iterable[str], on_delivery: Callable[[], None]) -> None:
        self._queues = [queue_topic(queue) for queue in queues]
        self._subscription = wakeups.subscribe(self._queues, on_delivery)

    def listen(self, worker: str) -> None:
        self._subscription.listen([*self._queues, worker_topic(worker)])

    def offer(self, classes: frozenset[Priority]) -> None:
        """Topics reach every worker, whatever it has room for."""

    def claiming(self) -> None:
        """The same."""

    def claimed(self, claim: Claim, jobs: Sequence[Claimed]) -> None:
        """The same."""

    async def wait(self, timeout: float) -> None:
        await self._subscription.wait(timeout)

    def close(self) -> None:
        self._subscription.close()
