"""Wake-ups by PUBLISH and SUBSCRIBE on every Redis of the deployment, and work by tokens.

A topic is published on the first server that answers, and on all of them while none is known to. Every
process listens to all of them, so that watchers, turns and elections notice the loss of one server as little as jobs
do. ``queue:`` topics go with those about jobs: workers, which are many and get tokens, do not listen to that channel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ..redis.wakeups import Notifier, connector
from ..shared.notifier import Listeners
from ..shared.subscriptions import NotifiedWakeups
from ..shared.topics import Channels
from ..wakeups import queue_topic
from .dispatcher import Dispatcher
from .shard import Shard
from .work import TokenWork

ABOUT_JOBS = ("j", "p", "q")


class Notifiers:
    """The notifiers of all servers as one."""

    def __init__(self, shards: Sequence[Shard], listeners: Listeners) -> None:
        self._shards = shards
        self._all = [
            Notifier(connector(shard.address), Channels(shard.keys.jobs, shard.keys.topics), listeners, ABOUT_JOBS)
            for shard in shards
        ]

    def send(self, topics: Collection[str]) -> None:
        """Send topics through the first server that answers; through all while none is known to answer."""
        # `is_well` too: calls have short deadlines, so they detect a frozen server long before the notifier.
        there = [each for shard, each in zip(self._shards, self._all, strict=True) if each.is_there and shard.is_well]
        for each in there[:1] or self._all:
            each.send(topics)

    def listens(self, *, jobs: bool, others: bool) -> bool:
        """Return whether every server listens."""
        return all(each.listens(jobs=jobs, others=others) for each in self._all)

    def listen(self, *, jobs: bool, others: bool) -> bool:
        """Listen by all servers."""
        listening = [each.listen(jobs=jobs, others=others) for each in self._all]
        return all(listening)

    def close(self) -> None:
        """Close all notifiers."""
        for each in self._all:
            each.close()


class TokenWakeups(NotifiedWakeups[Notifiers]):
    """The `Wakeups` of one schema. No statement sends a NOTIFY."""

    enqueue_channel = None
    transaction_channel = None

    def __init__(self, shards: Sequence[Shard], dispatcher: Callable[[], Dispatcher]) -> None:
        self._shards = shards
        self._dispatcher = dispatcher
        self._works: tuple[TokenWork, ...] = ()
        super().__init__(lambda listeners: Notifiers(shards, listeners), about_jobs=ABOUT_JOBS)

    def publish(self, topics: Iterable[str]) -> None:
        """Deliver topics, and have the workers of this process claim if there is one of their queues among them."""
        sent = list(topics)
        for work in self._works:
            if any(queue_topic(queue) in sent for queue in work.queues):
                work.deliver_from_anywhere()
        self.notify(sent)

    def notify(self, topics: Collection[str]) -> None:
        """Deliver topics to subscriptions only: workers get tokens."""
        super().publish(topics)

    def was_sent(self, topics: Collection[str]) -> None:
        """Do nothing: no transaction sends topics itself."""

    def work(self, queues: Iterable[str], on_delivery: Callable[[], None]) -> TokenWork:
        """Announce work to a worker of the running event loop, by tokens."""
        subscription = self.subscribe((), on_delivery)
        work = TokenWork(self._shards, queues, on_delivery, self._dispatcher(), subscription, self._forget)
        subscription.listen(work.topics())
        self._works = (*self._works, work)
        return work

    def _forget(self, work: TokenWork) -> None:
        self._works = tuple(each for each in self._works if each is not work)
