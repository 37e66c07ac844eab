"""The reconciler: compares pending leases with the messages that the broker has, and corrects differences.

A message may be on its way between two lists while it is looked for, so a difference counts only if two passes in a row
find it. Reading a queue is expensive, and in a busy one the numbers of messages and leases differ in most passes, each
time by another amount. So a queue is read if they differ by the same amount as in the last pass, to confirm what that
pass has found, and now and then. Brokers other than Redis do not list their messages: there, old leases of an empty
queue are closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from .broker import Broker, open_broker
from .leases import Lease, LeaseStore, id_of
from .publishing import Publisher

log = logging.getLogger(__name__)

DEEP_EVERY = 10
"""After this many looks, queues are read even if their numbers agree."""
DEEP_LIMIT = 10_000
"""Queues with more messages are not read while their numbers agree."""
REST_FACTOR = 50
"""The rest after a look, as a multiple of its CPU time: at most 2 % of a core, however long the queues are."""
LOCK_INTERVALS = 3
"""After this many intervals of silence the reconciling worker is replaced by another one."""
STALE_SECONDS = 3_600.0
"""Age from which a lease of an empty queue is closed where messages cannot be listed."""

Differences = tuple[set[tuple[int, str]], dict[tuple[int, str], Lease]]
"""Leases without a message, and messages without a lease."""


class Reconciler:
    """Looks at the broker of an application."""

    def __init__(self, app: Any, publisher: Publisher, interval: float) -> None:
        self._app = app
        self._publisher = publisher
        self._interval = interval
        self._broker: Broker | None = None
        self._lock = threading.Lock()
        self._looks = 0
        self._last: Differences = (set(), {})
        self._surplus: dict[int, int] = {}
        """By how many messages each queue exceeded its leases at the last look."""
        self._failing = False
        self._rest_until = 0.0

    def run_if_due(self, store: LeaseStore, host: str) -> None:
        """Close the runs of dead workers; look at the broker if no other worker does at present."""
        _, granted = store.reap(host, self._interval * LOCK_INTERVALS)
        if not granted:
            self._last = (set(), {})
            return
        if time.monotonic() < self._rest_until:
            return
        began = time.thread_time()
        try:
            self.look(store)
        except Exception as exc:
            self.close()
            if not self._failing:
                log.warning("the load balancer cannot read the broker (%s); counts are not checked", type(exc).__name__)
            self._failing = True
        else:
            self._failing = False
        self._rest_until = time.monotonic() + REST_FACTOR * (time.thread_time() - began)

    def look(self, store: LeaseStore, queues: Sequence[int] | None = None, *, deep: bool = False) -> int:
        """Compare once, and correct what the last look has found too. Returns the number of corrections."""
        with self._lock:
            self._looks += 1
            lost, uncounted = self._last
            confirms = bool(lost or uncounted)
            found = self._compare(store, queues, deep or confirms or self._looks % DEEP_EVERY == 0)
            # What a confirming look finds first is not confirmed next: a busy queue would be read all the time.
            self._last = (set(), {}) if confirms else found
            return self._correct(store, lost & found[0], {key: found[1][key] for key in uncounted.keys() & found[1]})

    def recount(self, store: LeaseStore, queues: Sequence[int] | None, pause: float) -> int:
        """Compare twice, `pause` seconds apart, and correct. Returns the number of corrections."""
        store.reap("", 0)
        self.look(store, queues, deep=True)
        time.sleep(pause)
        return self.look(store, queues, deep=True)

    def close(self) -> None:
        """Close the connection to the broker."""
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()

    def _compare(self, store: LeaseStore, queues: Sequence[int] | None, deep: bool) -> Differences:
        broker = self._broker = self._broker or open_broker(self._app)
        names = self._publisher.names
        chosen = range(store.queues) if queues is None else queues
        lost: set[tuple[int, str]] = set()
        uncounted: dict[tuple[int, str], Lease] = {}
        sizes = broker.sizes([names[queue] for queue in chosen])
        delivered = broker.delivered()
        loads, _ = store.loads()
        for queue, size in zip(chosen, sizes, strict=True):
            held = delivered.get(names[queue], {})
            pending = loads[queue].pending
            if not broker.lists_messages:
                if size == 0 and pending:
                    lost |= {(queue, name) for name in store.stale(queue, STALE_SECONDS)}
                continue
            running = store.running(queue) if held else set()
            surplus = size + len(held.keys() - running) - pending
            stays = surplus and surplus == self._surplus.get(queue)
            self._surplus[queue] = surplus
            if not stays and not (deep and (surplus or size <= DEEP_LIMIT)):
                continue
            messages = {**broker.messages(names[queue]), **held}
            # Read after the broker: a message that was published meanwhile has its lease already, and is not seen.
            leases, running = store.pending(queue), store.running(queue)
            lost |= {(queue, name) for name in leases - messages.keys()}
            uncounted |= {(queue, name): messages[name] for name in messages.keys() - leases - running}
        gone = store.gone(list(uncounted.values()))
        return lost, {
            key: lease
            for key, lease in uncounted.items()
            if lease.name not in gone and (lease.expires_in is None or lease.expires_in > 0)
        }

    def _correct(self, store: LeaseStore, lost: set[tuple[int, str]], uncounted: dict[tuple[int, str], Lease]) -> int:
        store.drop([(queue, Lease(name, id_of(name))) for queue, name in lost])
        for queue in {queue for queue, _ in uncounted}:
            store.open([lease for (of, _), lease in uncounted.items() if of == queue], queue)
        if lost or uncounted:
            log.info("the load balancer closed %d leases and opened %d", len(lost), len(uncounted))
        return len(lost) + len(uncounted)
