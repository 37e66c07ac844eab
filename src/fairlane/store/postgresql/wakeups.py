"""Wake-ups between processes that share a schema, by LISTEN and NOTIFY.

Each schema has two channels: one for ``job:`` and ``place:`` topics, which are many, and one for all others. Topics are
sent and received on a connection that is used for nothing else (`notifier.py`); `shared/subscriptions.py` states the
guarantees. The store that the lease keeper's thread opens borrows the connection of the store that its process already
has open.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from ... import event_loops
from ..shared.subscriptions import NotifiedWakeups, TopicSubscription
from ..wakeups import Wakeups
from ..work import TopicWork
from .address import Address
from .notifier import Channels, Notifier


class ServerWakeups(Wakeups, Protocol):
    """The wake-ups of this store, and the channels on which statements send some of them."""

    @property
    def enqueue_channel(self) -> str | None:
        """The channel of a NOTIFY that an enqueue sends with its commit; None: it sends none."""

    @property
    def transaction_channel(self) -> str | None:
        """The same for jobs stored in a user's transaction."""

    def was_sent(self, topics: Collection[str]) -> None:
        """Called with topics that a committed transaction has sent itself."""

    def close(self) -> None:
        """Close every subscription and the connection. Closing twice is harmless."""


class NotifyWakeups(NotifiedWakeups[Notifier]):
    """The `Wakeups` of one schema. `listen=False` is for servers behind a pooler that cannot LISTEN."""

    def __init__(self, dsn: str, schema: str, *, listen: bool = True) -> None:
        channels = Channels.of(schema)
        self.enqueue_channel = channels.others
        self.transaction_channel = channels.others if listen else None
        super().__init__(partial(Notifier, dsn, channels), listen=listen)

    @property
    def is_open(self) -> bool:
        """Whether it is not closed, and was made by this process and not before a fork."""
        return not self._closed and self._pid == os.getpid()

    def was_sent(self, topics: Collection[str]) -> None:
        """Deliver topics that a transaction has sent itself here too, unless the server delivers them here."""
        if not self._closed and not (self._listen and self._notifier.listens(jobs=False, others=True)):
            self._notice_fork()
            self._subscriptions.deliver(topics)


class BorrowedWakeups:
    """Uses the wake-ups of another store object while those are open, and after that its own."""

    def __init__(self, lender: NotifyWakeups, make: Callable[[], NotifyWakeups]) -> None:
        self.enqueue_channel = lender.enqueue_channel
        self.transaction_channel = lender.transaction_channel
        self._lender = lender
        self._make = make
        self._own: NotifyWakeups | None = None
        self._subscriptions: WeakSet[TopicSubscription] = WeakSet()
        self._closed = False

    def _wakeups(self) -> NotifyWakeups:
        if self._own is None and not self._lender.is_open and not self._closed:
            self._own = self._make()
        return self._own or self._lender

    def publish(self, topics: Iterable[str]) -> None:
        """Notify every listener, in this process at once and in others within milliseconds."""
        if not self._closed:
            self._wakeups().publish(topics)

    def was_sent(self, topics: Collection[str]) -> None:
        """Called with topics that a committed transaction has sent itself."""
        if not self._closed:
            self._wakeups().was_sent(topics)

    def subscribe(self, topics: Iterable[str], on_delivery: Callable[[], None] | None = None) -> TopicSubscription:
        """Subscribe in the running event loop."""
        if self._closed:
            raise RuntimeError("the wake-ups were closed; open the store again")
        subscription = self._wakeups().subscribe(topics, on_delivery)
        self._subscriptions.add(subscription)
        return subscription

    def work(self, queues: Iterable[str], on_delivery: Callable[[], None]) -> TopicWork:
        """Announce work to a worker of the running event loop."""
        return TopicWork(self, queues, on_delivery)

    def close(self) -> None:
        """Close the subscriptions made here. The connection stays with the lender. Closing twice is harmless."""
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription.close()
        if self._own is not None:
            self._own.close()


_lenders: WeakValueDictionary[tuple[str, str, bool], NotifyWakeups] = WeakValueDictionary()
_door = threading.Lock()


def wakeups_for(address: Address) -> NotifyWakeups | BorrowedWakeups:
    """The wake-ups of a new store object; in a background thread, those of another store object if possible."""
    key = (address.dsn, address.schema, address.listen)

    def make() -> NotifyWakeups:
        return NotifyWakeups(address.dsn, address.schema, listen=address.listen)

    with _door:
        lender = _lenders.get(key)
        if lender is not None and lender.is_open and _in_a_loop_beside():
            return BorrowedWakeups(lender, make)
        made = _lenders[key] = make()
    return made


def _in_a_loop_beside() -> bool:
    try:
        return event_loops.is_beside(asyncio.get_running_loop())
    except RuntimeError:
        return False
