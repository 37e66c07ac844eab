"""The heartbeat of a worker: a thread of its main process that reports what the worker consumes and runs.

It closes running leases whose end no signal has reported, and opens those whose start was lost while the store was
down. A start is believed lost when two heartbeats in a row miss it: one may just be on its way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ....errors import StoreUnavailable
from .leases import LeaseStore, Run
from .reconciler import Reconciler

log = logging.getLogger(__name__)

JOIN_SECONDS = 5.0


class Snapshot(msgspec.Struct):
    """What a worker does at one moment."""

    consumed: list[int]
    """The queues it consumes."""
    newest: int
    """The number of its last delivery."""
    begun: dict[str, Run]
    """Executions by name."""
    held: list[str]
    """Names of runs that were received and may begin at any time."""


class Heartbeat:
    """Sends heartbeats until it is stopped, and reconciles while no other worker does."""

    def __init__(
        self,
        store: LeaseStore,
        host: str,
        interval: float,
        snapshot: Callable[[], Snapshot],
        reconciler: Reconciler,
    ) -> None:
        self._store = store
        self._host = host
        self._interval = interval
        self._snapshot = snapshot
        self._reconciler = reconciler
        self._woken = threading.Event()
        self._consuming = True
        self._stopped = False
        self._missing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="fairlane-balancer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop_consuming(self) -> None:
        """Report from now on that no queue is consumed. Called in a signal handler: it only sets flags."""
        self._consuming = False
        self._woken.set()

    def stop(self) -> None:
        """Stop the thread and remove the worker: nothing runs in it any more."""
        self._stopped = True
        self._woken.set()
        self._thread.join(JOIN_SECONDS)
        try:
            self._store.leave(self._host)
        except StoreUnavailable:
            # It is considered dead when its heartbeats are missed.
            log.warning("could not report to the load balancer that this worker has stopped")
        self._store.close()

    def _run(self) -> None:
        reconciled_at = time.monotonic()
        while not self._stopped:
            try:
                self.beat()
                if time.monotonic() - reconciled_at >= self._interval:
                    reconciled_at = time.monotonic()
                    self._reconciler.run_if_due(self._store, self._host)
            except StoreUnavailable:
                pass
            except Exception:
                log.exception("the load balancer's heartbeat failed and is repeated")
            self._woken.wait(self._interval)
            self._woken.clear()
        self._reconciler.close()

    def beat(self) -> None:
        """Send one heartbeat."""
        seen = self._snapshot()
        consumed = seen.consumed if self._consuming else []
        missing = self._store.beat(self._host, consumed, seen.newest, list(seen.begun), seen.held)
        for name in missing & self._missing:
            self._store.start(seen.begun[name])
        self._missing = missing
