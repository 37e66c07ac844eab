"""Executions: signals of a worker open and close running leases.

Celery reports an execution by several signals, from the process of the pool and from the main process, and which of
them fire depends on how it ends. The main process numbers each delivery and passes the number with the request, so
both sides name the same run. The first report of an end closes it; the heartbeat closes what is never reported.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from celery import signals
from celery.worker import state

from ....errors import StoreUnavailable
from .heartbeat import Heartbeat, Snapshot
from .leases import Lease, LeaseStore, Run
from .publishing import DELIVERY_HEADER, LEASE_HEADER, Publisher
from .reconciler import Reconciler

log = logging.getLogger(__name__)


def _guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """An error here must not reach the task, and an outage was already logged."""

    @wraps(handler)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            handler(*args, **kwargs)
        except StoreUnavailable:
            pass
        except Exception:
            log.exception("the load balancer failed to handle a signal; the task is not affected")

    return guarded


class Executions:
    """The handlers of one application. All are no-ops for tasks of other applications and other queues."""

    def __init__(
        self, app: Any, store: LeaseStore, publisher: Publisher, reconciler: Reconciler, interval: float
    ) -> None:
        self._app = app
        self._store = store
        self._publisher = publisher
        self._reconciler = reconciler
        self._interval = interval
        self._main: int | None = None
        """The process id of the worker; None in a process that is no worker."""
        self._host = ""
        self._newest = 0
        self._received: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The requests that this worker has received, by number, as long as Celery keeps them."""
        self._heartbeat: Heartbeat | None = None

    @property
    def in_worker(self) -> bool:
        """Whether this process is a worker or was forked by one."""
        return self._main is not None

    def connect(self) -> None:
        """Connect the handlers. Strong references: a bound method would otherwise be dropped at once."""
        handlers = {
            signals.worker_init: self._worker_init,
            signals.worker_ready: self._worker_ready,
            signals.worker_shutting_down: self._worker_shutting_down,
            signals.worker_shutdown: self._worker_shutdown,
            signals.task_received: self._task_received,
            signals.task_prerun: self._task_prerun,
            signals.task_postrun: self._task_postrun,
            signals.task_failure: self._task_failure,
            signals.task_revoked: self._task_revoked,
            signals.task_unknown: self._task_unknown,
            signals.task_rejected: self._task_rejected,
        }
        for signal, handler in handlers.items():
            signal.connect(_guarded(handler), weak=False)

    # -- the worker ------------------------------------------------------------------------------------------------

    def _worker_init(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self._app:
            self._main = os.getpid()
            # A worker that is started again under its name is another host: the executions of the first one ended.
            self._host = f"{sender.hostname}/{self._main}-{secrets.token_hex(3)}"

    def _worker_ready(self, sender: Any = None, **_: Any) -> None:
        # Sent again after each loss of the broker.
        if self._is_main() and self._heartbeat is None:
            self._heartbeat = Heartbeat(
                self._store.separate(), self._host, self._interval, self._snapshot, self._reconciler
            )
            self._heartbeat.start()

    def _worker_shutting_down(self, **_: Any) -> None:
        if self._is_main() and self._heartbeat is not None:
            self._heartbeat.stop_consuming()

    def _worker_shutdown(self, **_: Any) -> None:
        if self._is_main() and self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _is_main(self) -> bool:
        return self._main == os.getpid()

    def _snapshot(self) -> Snapshot:
        # First: a delivery that comes later is newer than this number.
        newest = self._newest
        begun: dict[str, Run] = {}
        held: list[str] = []
        for request in self._requests():
            run = self._run_of(request.request_dict)
            if run is None:
                continue
            if request in state.active_requests:
                begun[run.name] = run
            elif request in state.reserved_requests or request.time_start is None:
                held.append(run.name)
        consumed = [self._publisher.index[name] for name in self._consumed() if name in self._publisher.index]
        return Snapshot(sorted(consumed), newest, begun, held)

    def _requests(self) -> list[Any]:
        """Requests that still exist. The main thread may add one meanwhile, which interrupts the copy."""
        for _ in range(100):
            try:
                return list(self._received.values())
            except RuntimeError:
                continue
        raise StoreUnavailable("the requests of the worker change too fast to be listed")

    def _consumed(self) -> list[str]:
        return list(self._app.amqp.queues.consume_from)

    # -- tasks, in the main process --------------------------------------------------------------------------------

    def _task_received(self, sender: Any = None, request: Any = None, **_: Any) -> None:
        if not self._is_main() or request is None or sender.app is not self._app:
            return
        queue = self._publisher.index_of(request.delivery_info)
        if queue is None:
            return
        self._newest += 1
        request.request_dict[DELIVERY_HEADER] = (self._host, self._newest)
        self._received[self._newest] = request
        if request.delivery_info.get("redelivered"):
            # An earlier execution has taken its lease; while it waits for the pool it is pending again.
            self._store.open((_lease_of(request.request_dict),), queue)

    def _task_failure(self, sender: Any = None, task_id: str | None = None, **_: Any) -> None:
        """In a process of the pool, postrun follows. Only the main process reports a lost one.

        The signal has no request. Another attempt of the same task may have been received or may run already; the one
        that failed has begun and is not reserved any more.
        """
        if not self._is_main() or sender is None or sender.app is not self._app:
            return
        for request in self._requests():
            if request.id == task_id and request.time_start is not None and request not in state.reserved_requests:
                run = self._run_of(request.request_dict)
                if run is not None:
                    self._store.finish(run)

    def _task_revoked(self, sender: Any = None, request: Any = None, **_: Any) -> None:
        if request is None or sender is None or sender.app is not self._app:
            return
        queue = self._publisher.index_of(request.delivery_info)
        if queue is None:
            return
        self._store.drop([(queue, _lease_of(vars(request)))])
        run = self._run_of(vars(request))
        if run is not None:
            self._store.finish(run)

    def _task_unknown(self, sender: Any = None, message: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self._app:
            self._drop_message(message)

    def _task_rejected(self, sender: Any = None, message: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self._app:
            self._drop_message(message)

    def _drop_message(self, message: Any) -> None:
        headers = getattr(message, "headers", None) or {}
        queue = self._publisher.index_of(getattr(message, "delivery_info", None))
        if queue is not None and "id" in headers:
            self._store.drop([(queue, _lease_of(headers))])

    # -- tasks, in the process that runs them ----------------------------------------------------------------------

    def _task_prerun(self, task: Any = None, **_: Any) -> None:
        run = self._current_run(task)
        if run is not None:
            self._store.start(run)

    def _task_postrun(self, task: Any = None, **_: Any) -> None:
        run = self._current_run(task)
        if run is not None:
            if self._is_main():
                # A thread that ends by SystemExit is active for Celery until the worker stops; the heartbeat must not
                # report it.
                self._received.pop(run.number, None)
            self._store.finish(run)

    def _current_run(self, task: Any) -> Run | None:
        if task is None or task.app is not self._app:
            return None
        request = task.request
        if request.is_eager or request.called_directly:
            return None
        return self._run_of(vars(request))

    def _run_of(self, request: dict[str, Any]) -> Run | None:
        """The run of a request; None if it was not delivered from a balanced queue by a worker with the balancer."""
        queue = self._publisher.index_of(request.get("delivery_info"))
        delivery = request.get(DELIVERY_HEADER)
        if queue is None or delivery is None:
            return None
        host, number = delivery
        return Run(queue, _lease_of(request), host, number)


def _lease_of(request: dict[str, Any]) -> Lease:
    return Lease.of_message(request.get(LEASE_HEADER), request["id"], request.get("retries") or 0)
