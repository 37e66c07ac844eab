"""The wake-ups of one store object, on a server that carries topics between processes.

Who listens in this process is told directly and at once; others hear through the server, by a `ServerNotifier`,
which is all that differs from one kind of server to the next.

Promises: `publish` never blocks and never raises. What is published after `subscribe` or `listen` returned is heard:
both wait for the server to listen, at most for `LISTEN_SECONDS` and only when the channel is new to this process. Where
that was too short, and after each time the connection was lost, a subscription is told to look at everything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from ...errors import InvalidInput
from .notifier import ServerNotifier
from .topics import EVERYTHING, KINDS, is_about_a_job

MOST_HEARD = 10_000
"""Topics remembered between two waits; a listener with a wildcard could otherwise be flooded."""
logger = logging.getLogger("fairlane.store.wakeups")


N = TypeVar("N", bound=ServerNotifier[Any])


class Subscriptions:
    """The open subscriptions of one store object. They change rarely and are gone through often, without a lock."""

    def __init__(self) -> None:
        self._all: tuple[TopicSubscription, ...] = ()
        self._lock = threading.RLock()

    def add(self, ear: TopicSubscription) -> None:
        """One more."""
        with self._lock:
            self._all = (*self._all, ear)

    def discard(self, ear: TopicSubscription) -> None:
        """One less."""
        with self._lock:
            self._all = tuple(each for each in self._all if each is not ear)

    def tell(self, topics: Collection[str]) -> None:
        """Tell everybody who listens to one of `topics`. From any thread."""
        for ear in self._all:
            ear.hear(topics)

    def wake(self, *, jobs: bool, others: bool) -> None:
        """Tell everybody to look at all it listens to, of these kinds."""
        for ear in self._all:
            ear.wake(jobs=jobs, others=others)

    def wake_late(self) -> None:
        """Tell those to look at everything who began to listen before the server did."""
        for ear in self._all:
            if ear.late:
                ear.late = False
                ear.wake(jobs=True, others=True)

    def wants(self) -> tuple[bool, bool]:
        """Whether anybody listens to jobs, and to anything else."""
        everybody = self._all
        return any(ear.jobs for ear in everybody), any(ear.others for ear in everybody)

    def all(self) -> tuple[TopicSubscription, ...]:
        """Everybody, at this moment."""
        return self._all


class NotifiedWakeups(Generic[N]):
    """`Wakeups` through a notifier. `publish` may be called from any thread, and after a fork.

    `make` makes the notifier, once more in each forked child. `listen=False` is for servers that cannot be listened to:
    then nothing leaves the process, and other processes find out by polling. `close` sends what is still to be sent,
    for a second at most.
    """

    def __init__(self, make: Callable[[Subscriptions], N], *, listen: bool = True) -> None:
        self._make = make
        self._listen = listen
        self._closed = False
        self._left_behind: list[object] = []
        self._door = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._ears = Subscriptions()
        self._notifier = self._make(self._ears)
        # Nobody may have closed the store when the process ends, or when it is forgotten.
        self._ending = weakref.finalize(self, self._notifier.close)
        # Set pid last: a thread that reads its own pid must see the other fields reset.
        self._pid = os.getpid()

    def publish(self, topics: Iterable[str]) -> None:
        """Tell every listener, here at once and elsewhere within milliseconds."""
        if self._closed:
            return
        try:
            told = topics if isinstance(topics, list | tuple) else tuple(topics)
            if not told:
                return
            self._notice_fork()
            self._ears.tell(told)
            if self._listen:
                self._notifier.send(told)
        except Exception:
            logger.debug("a wake-up was lost", exc_info=True)

    def tell(self, topics: Collection[str]) -> None:
        """Tell the listeners of this object alone."""
        self._ears.tell(topics)

    def is_heard(self) -> bool:
        """Whether anybody of this object listens to anything but jobs."""
        return self._ears.wants()[1]

    def subscribe(self, topics: Iterable[str], ring: Callable[[], None] | None = None) -> TopicSubscription:
        """Listen from the running event loop. A topic ending in ``*`` stands for all that begin like it."""
        if self._closed:
            raise RuntimeError("the wake-ups were closed; open the store again")
        self._notice_fork()
        return TopicSubscription(topics, self._ears, self._notifier if self._listen else None, ring)

    def close(self) -> None:
        """Close every subscription, send what waits and end the connection. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._notice_fork()
        for ear in self._ears.all():
            ear.close()
        self._ending()

    def _notice_fork(self) -> None:
        if self._pid == os.getpid():
            return
        with self._door:  # Only a child takes it, so it was not copied while somebody held it.
            if self._pid != os.getpid():
                # The thread stayed with the parent, and the subscriptions are the parent's. So is the connection:
                # it must not be collected here, where it would close what both have.
                self._ending.detach()
                self._left_behind += [self._notifier, self._ears]
                self._begin()


class TopicSubscription:
    """One listener's ear. After a fork it belongs to the parent alone: the child can only close its copy."""

    def __init__(
        self,
        topics: Iterable[str],
        siblings: Subscriptions,
        notifier: ServerNotifier[Any] | None,
        ring: Callable[[], None] | None = None,
    ) -> None:
        self._siblings = siblings
        self._bell = ring
        self._notifier = notifier
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._closed = False
        # Guards what was heard: it is added to from any thread. Reentrant, because a signal handler may publish too.
        self._lock = threading.RLock()
        self._heard: set[str] = set()
        self._rung = False
        self._news = asyncio.Event()
        self._topics: frozenset[str] = frozenset()
        self._prefixes: tuple[str, ...] = ()
        self.jobs = self.others = False
        """Whether it listens to jobs, and to anything else."""
        self.late = False
        """Whether something may have been published before the server listened."""
        wanted = _checked(topics)
        siblings.add(self)
        self._listen(wanted)

    async def wait(self, timeout: float | None = None) -> frozenset[str]:
        """The topics heard since the last call.

        What may have been missed counts as all topics: then a topic with ``*`` is among them as it was given. After
        `close` nothing is heard: the call returns when `timeout` has passed, and at once without one.
        """
        if self._closed:
            await asyncio.sleep(timeout or 0.0)
            return frozenset()
        if not self._heard:
            try:
                async with asyncio.timeout(timeout):
                    # More than once, because a ring can come after what it rang for was already taken.
                    while not self._heard and not self._closed:
                        self._news.clear()
                        await self._news.wait()
            except TimeoutError:
                pass
        with self._lock:
            heard = frozenset(self._heard)
            self._heard.clear()
            self._rung = False
        return heard

    def listen(self, topics: Iterable[str]) -> None:
        """Hear these topics, instead of those before. What was heard of the topics that stay is kept."""
        self._listen(_checked(topics))

    def close(self) -> None:
        """Hear nothing more. Other threads than the event loop's may call it too."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return
        self._siblings.discard(self)
        self._ring()

    def hear(self, topics: Collection[str]) -> None:
        """Take in what was published, from any thread."""
        found: Iterable[str] = self._topics.intersection(topics)
        if self._prefixes:
            found = {*found, *(topic for topic in topics if topic.startswith(self._prefixes))}
        if found:
            self._take_in(found)

    def wake(self, *, jobs: bool, others: bool) -> None:
        """Take in that anything of these kinds may have been published."""
        self._take_in(
            [t for t in self._topics if t[0] == EVERYTHING or (jobs if is_about_a_job(t) else others)],
        )

    def _take_in(self, found: Iterable[str]) -> None:
        with self._lock:
            self._heard.update(found)
            if len(self._heard) > MOST_HEARD:
                self._heard = set(self._topics)
            if self._rung or not self._heard:
                return
            self._rung = True
        self._ring()

    def _ring(self) -> None:
        if _running_loop() is self._loop:
            self._announce()
            return
        try:
            self._loop.call_soon_threadsafe(self._announce)
        except RuntimeError:
            # In a loop that is gone nobody waits any more.
            self._siblings.discard(self)

    def _announce(self) -> None:
        if self._bell is not None and not self._closed:
            with self._lock:
                # Whoever waits may take what was heard before or after: what comes from now on rings again.
                self._rung = False
            self._bell()
        self._news.set()

    def _listen(self, wanted: frozenset[str]) -> None:
        with self._lock:
            self._topics = wanted
            self._prefixes = tuple(topic[:-1] for topic in wanted if topic.endswith("*"))
            self._heard = {topic for topic in self._heard if topic in wanted or topic.startswith(self._prefixes)}
            self._rung = bool(self._heard)
        self.jobs = any(is_about_a_job(topic) or topic[0] == EVERYTHING for topic in wanted)
        self.others = any(not is_about_a_job(topic) for topic in wanted)
        if self._notifier is None or self._closed or self._pid != os.getpid():
            return
        if not self._notifier.listen(jobs=self.jobs, others=self.others):
            self.late = True
            if self._notifier.listens(jobs=self.jobs, others=self.others):
                # Since just now, so that nobody may have seen the mark.
                self._siblings.wake_late()


def _checked(topics: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(topics)
    for topic in wanted:
        if not topic or topic[0] not in KINDS + EVERYTHING:
            raise InvalidInput("topics", f"{topic!r} is no topic; fairlane.store.wakeups makes them")
    return wanted


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
