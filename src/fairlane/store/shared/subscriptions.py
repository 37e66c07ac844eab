"""The wake-ups of one store object, on a server that carries topics between processes.

Subscriptions of the same process get topics directly and at once; others get them through the server, by a
`ServerNotifier`, the only part that depends on the kind of server.

`publish` never blocks and never raises. Topics published after `subscribe` or `listen` has returned are delivered: both
wait until the server listens, for at most `LISTEN_SECONDS` and only if the channel is new to this process. If that was
too short, and whenever the connection was lost, a subscription gets all its topics.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

from ...errors import InvalidInput
from ..wakeups import Work
from ..work import TopicWork
from .notifier import TopicNotifier
from .topics import ABOUT_JOBS, EVERYTHING, KINDS

MOST_DELIVERED = 10_000
"""Topics kept between two waits; a subscription with a wildcard could otherwise be flooded."""
logger = logging.getLogger("fairlane.store.wakeups")


N = TypeVar("N", bound=TopicNotifier)


class Subscriptions:
    """The open subscriptions of one store object. They change rarely and are read often, without a lock."""

    def __init__(self) -> None:
        self._all: tuple[TopicSubscription, ...] = ()
        self._lock = threading.RLock()

    def add(self, subscription: TopicSubscription) -> None:
        """Add a subscription."""
        with self._lock:
            self._all = (*self._all, subscription)

    def discard(self, subscription: TopicSubscription) -> None:
        """Remove a subscription."""
        with self._lock:
            self._all = tuple(each for each in self._all if each is not subscription)

    def deliver(self, topics: Collection[str]) -> None:
        """Deliver topics to all subscriptions to them. May be called from any thread."""
        for subscription in self._all:
            subscription.deliver(topics)

    def wake(self, *, jobs: bool, others: bool) -> None:
        """Deliver all topics of these kinds to their subscriptions."""
        for subscription in self._all:
            subscription.wake(jobs=jobs, others=others)

    def wake_late(self) -> None:
        """Deliver all topics to subscriptions that began before the server listened."""
        for subscription in self._all:
            if subscription.late:
                subscription.late = False
                subscription.wake(jobs=True, others=True)

    def wants(self) -> tuple[bool, bool]:
        """Return whether there are subscriptions to jobs, and to other topics."""
        present = self._all
        return any(each.jobs for each in present), any(each.others for each in present)

    def all(self) -> tuple[TopicSubscription, ...]:
        """Return the present subscriptions."""
        return self._all


class NotifiedWakeups(Generic[N]):
    """`Wakeups` through a notifier. `publish` may be called from any thread, and after a fork.

    `make` creates the notifier, anew in each forked child. `listen=False` is for servers that cannot notify: then
    nothing leaves the process, and other processes rely on polling. `close` sends what is left for up to a second.
    `about_jobs` are the first letters of the topics on the channel of jobs.
    """

    def __init__(
        self,
        make: Callable[[Subscriptions], N],
        *,
        listen: bool = True,
        about_jobs: tuple[str, ...] = ABOUT_JOBS,
    ) -> None:
        self._make = make
        self._about_jobs = about_jobs
        self._listen = listen
        self._closed = False
        self._of_parent: list[object] = []
        self._door = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._subscriptions = Subscriptions()
        self._notifier = self._make(self._subscriptions)
        # For a store that was not closed when the process ends or the object is collected.
        self._ending = weakref.finalize(self, self._notifier.close)
        # Set pid last: a thread that reads its own pid must see the other fields reset.
        self._pid = os.getpid()

    def publish(self, topics: Iterable[str]) -> None:
        """Deliver topics, in this process at once and in others within milliseconds."""
        if self._closed:
            return
        try:
            sent = topics if isinstance(topics, list | tuple) else tuple(topics)
            if not sent:
                return
            self._notice_fork()
            self._subscriptions.deliver(sent)
            if self._listen:
                self._notifier.send(sent)
        except Exception:
            logger.debug("a wake-up was lost", exc_info=True)

    def deliver(self, topics: Collection[str]) -> None:
        """Deliver topics to the subscriptions of this object only."""
        self._subscriptions.deliver(topics)

    def has_subscriptions(self) -> bool:
        """Return whether this object has subscriptions to other topics than jobs."""
        return self._subscriptions.wants()[1]

    def subscribe(self, topics: Iterable[str], on_delivery: Callable[[], None] | None = None) -> TopicSubscription:
        """Subscribe in the running event loop. A topic that ends in ``*`` stands for all topics with this prefix."""
        if self._closed:
            raise RuntimeError("the wake-ups were closed; open the store again")
        self._notice_fork()
        notifier = self._notifier if self._listen else None
        return TopicSubscription(topics, self._subscriptions, notifier, on_delivery, self._about_jobs)

    def work(self, queues: Iterable[str], on_delivery: Callable[[], None]) -> Work:
        """Announce work to a worker of the running event loop."""
        return TopicWork(self, queues, on_delivery)

    def close(self) -> None:
        """Close every subscription, send waiting topics and end the connection. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._notice_fork()
        for subscription in self._subscriptions.all():
            subscription.close()
        self._ending()

    def _notice_fork(self) -> None:
        if self._pid == os.getpid():
            return
        with self._door:  # Only a child takes it, so it is never copied while it is held.
            if self._pid != os.getpid():
                # The thread, the subscriptions and the connection belong to the parent. The connection must not be
                # collected here: that would close it for both.
                self._ending.detach()
                self._of_parent += [self._notifier, self._subscriptions]
                self._begin()


class TopicSubscription:
    """One subscription. After a fork it belongs to the parent: the child can only close its copy."""

    def __init__(
        self,
        topics: Iterable[str],
        siblings: Subscriptions,
        notifier: TopicNotifier | None,
        on_delivery: Callable[[], None] | None = None,
        about_jobs: tuple[str, ...] = ABOUT_JOBS,
    ) -> None:
        self._about_jobs = about_jobs
        self._siblings = siblings
        self._on_delivery = on_delivery
        self._notifier = notifier
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._closed = False
        # Guards the deliveries, which come from any thread. Reentrant, because a signal handler may publish too.
        self._lock = threading.RLock()
        self._delivered: set[str] = set()
        self._announced = False
        self._arrived = asyncio.Event()
        self._topics: frozenset[str] = frozenset()
        self._prefixes: tuple[str, ...] = ()
        self.jobs = self.others = False
        """Whether it subscribes to jobs, and to other topics."""
        self.late = False
        """Whether topics may have been published before the server listened."""
        wanted = _checked(topics)
        siblings.add(self)
        self._listen(wanted)

    async def wait(self, timeout: float | None = None) -> frozenset[str]:
        """Wait for topics and return those delivered since the last call.

        If topics may have been missed, all are returned: then a topic with ``*`` is among them as it was given. After
        `close` nothing is delivered: the call returns after `timeout`, or at once without one.
        """
        if self._closed:
            await asyncio.sleep(timeout or 0.0)
            return frozenset()
        if not self._delivered:
            try:
                async with asyncio.timeout(timeout):
                    # Repeated, because the event can be set for topics that were already returned.
                    while not self._delivered and not self._closed:
                        self._arrived.clear()
                        await self._arrived.wait()
            except TimeoutError:
                pass
        with self._lock:
            delivered = frozenset(self._delivered)
            self._delivered.clear()
            self._announced = False
        return delivered

    @property
    def receives(self) -> bool:
        """Whether the server delivers its topics at the moment."""
        return self._notifier is not None and self._notifier.listens(jobs=self.jobs, others=self.others)

    def listen(self, topics: Iterable[str]) -> None:
        """Replace the topics of the subscription. Deliveries of topics that stay are kept."""
        self._listen(_checked(topics))

    def close(self) -> None:
        """End the subscription. May be called from any thread."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        self._siblings.discard(self)
        self._notify()

    def deliver(self, topics: Collection[str]) -> None:
        """Deliver published topics. May be called from any thread."""
        found: Iterable[str] = self._topics.intersection(topics)
        if self._prefixes:
            found = {*found, *(topic for topic in topics if topic.startswith(self._prefixes))}
        if found:
            self._add(found)

    def wake(self, *, jobs: bool, others: bool) -> None:
        """Deliver all topics of these kinds: any of them may have been published."""
        self._add(
            [t for t in self._topics if t[0] == EVERYTHING or (jobs if t.startswith(self._about_jobs) else others)],
        )

    def _add(self, found: Iterable[str]) -> None:
        with self._lock:
            self._delivered.update(found)
            if len(self._delivered) > MOST_DELIVERED:
                self._delivered = set(self._topics)
            if self._announced or not self._delivered:
                return
            self._announced = True
        self._notify()

    def _notify(self) -> None:
        if _running_loop() is self._loop:
            self._announce()
            return
        try:
            self._loop.call_soon_threadsafe(self._announce)
        except RuntimeError:
            # Nothing waits in a loop that is closed.
            self._siblings.discard(self)

    def _announce(self) -> None:
        if self._on_delivery is not None and not self._closed:
            with self._lock:
                # The callback may take the deliveries now or later, so the next delivery must announce itself again.
                self._announced = False
            self._on_delivery()
        self._arrived.set()

    def _listen(self, wanted: frozenset[str]) -> None:
        with self._lock:
            self._topics = wanted
            self._prefixes = tuple(topic[:-1] for topic in wanted if topic.endswith("*"))
            self._delivered = {
                topic for topic in self._delivered if topic in wanted or topic.startswith(self._prefixes)
            }
            self._announced = bool(self._delivered)
        self.jobs = any(topic.startswith((*self._about_jobs, EVERYTHING)) for topic in wanted)
        self.others = any(not topic.startswith(self._about_jobs) for topic in wanted)
        if self._notifier is None or self._closed or self._pid != os.getpid():
            return
        if not self._notifier.listen(jobs=self.jobs, others=self.others):
            self.late = True
            if self._notifier.listens(jobs=self.jobs, others=self.others):
                # It began to listen just now, and may have missed the mark.
                self._siblings.wake_late()


def _checked(topics: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(topics)
    for topic in wanted:
        if not topic or topic[0] not in KINDS + EVERYTHING:
            raise InvalidInput("topics", f"{topic!r} is not a topic; create topics with fairlane.store.wakeups")
    return wanted


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
