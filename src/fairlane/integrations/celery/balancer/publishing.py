"""Publishing: each message to a balanced queue gets a pending lease first, and gives it back if it is not published.

Celery calls a router without the id of the task, so the router only returns a stand-in. The queue is chosen where the
message is complete, in the function that sends it: choosing and counting are one step there, and a failed publish is
seen as an exception. delay, canvas, retries, beat and ``send_task("name")`` all pass through that function.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from celery.utils.imports import symbol_by_name
from kombu.entity import Exchange, Queue

from ....errors import InvalidInput, StoreUnavailable
from ..applications import fairs
from .leases import Lease, LeaseStore

log = logging.getLogger(__name__)

PREFIX = "queue_"
LEASE_HEADER = "fairlane_lease"
DELIVERY_HEADER = "fairlane_delivery"
"""Where a request carries its host and number, from the main process of a worker to the process that runs it."""
MOST_OWED = 10_000

Send = Callable[..., Any]


class Publisher:
    """Chooses queues and counts what is published."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.names = [f"{PREFIX}{index}" for index in range(store.queues)]
        self.index = {name: index for index, name in enumerate(self.names)}
        self.queues = [_queue(name, name) for name in self.names]
        self.anywhere = _queue("fairlane_least_loaded", "")
        """Stands for the least loaded queue until a message is sent. No broker ever sees it."""
        self._turn = count()
        self._allotted: dict[str, deque[tuple[int, Lease]]] = {}
        """Queues that `allot` has chosen, by the id of the task, of which there may be several messages."""
        self._owed: deque[tuple[int, Lease]] = deque(maxlen=MOST_OWED)
        """Leases of failed publishes that could not be given back yet."""

    def route(
        self, name: str, args: object, kwargs: object, options: Mapping[str, Any], task: object = None, **_: object
    ) -> dict[str, Any] | None:
        """A router of Celery: a task whose destination is not given goes to the least loaded queue."""
        get = options.get
        if get("queue") is not None or get("exchange") is not None or get("routing_key") is not None:
            return None
        return {"queue": self.anywhere}

    def index_of(self, delivery_info: Mapping[str, Any] | None) -> int | None:
        """The balanced queue that a message was delivered from, None if it was another one."""
        if not delivery_info or delivery_info.get("exchange"):
            return None
        return self.index.get(delivery_info.get("routing_key") or "")

    def allot(self, leases: Sequence[Lease]) -> None:
        """Choose queues for messages that are published next, level by level in one step."""
        try:
            chosen = self._store.open(leases)
        except StoreUnavailable:
            return
        for queue, lease in zip(chosen, leases, strict=True):
            self._allotted.setdefault(lease.id, deque()).append((queue, lease))

    def release_allotted(self, leases: Sequence[Lease]) -> None:
        """Give back what was allotted to messages that were not published."""
        self._release([unused for lease in leases for unused in self._allotted.pop(lease.id, ())])

    def repay(self) -> None:
        """Give back the leases that could not be given back before."""
        owed = [self._owed.popleft() for _ in range(len(self._owed))]
        self._release(owed)

    def wrap(self, send: Send) -> Send:
        """The function that sends messages, with leases."""

        def send_with_lease(producer: Any, name: str, message: Any, **options: Any) -> Any:
            destination = options.get("queue")
            if destination is not self.anywhere:
                fixed = self._fixed(options)
                if fixed is None:
                    return send(producer, name, message, **options)
            else:
                fixed = None
            queue, lease, counted = self._open(fixed, message, options.get("expiration"))
            if fixed is None:
                options["queue"] = self.queues[queue]
            # A retry repeats the headers of the attempt before.
            headers = {**(options.get("headers") or {}), LEASE_HEADER: lease.name}
            headers.pop(DELIVERY_HEADER, None)
            options["headers"] = headers
            try:
                return send(producer, name, message, **options)
            except BaseException:
                if counted:
                    self._release([(queue, lease)])
                raise

        return send_with_lease

    def _fixed(self, options: Mapping[str, Any]) -> int | None:
        """The balanced queue that the caller, a route or the previous attempt has chosen."""
        if options.get("exchange") and options.get("routing_key"):
            return None
        queue = options.get("queue")
        return self.index.get(queue if isinstance(queue, str) else getattr(queue, "name", ""))

    def _open(self, fixed: int | None, message: Any, expires_in: float | None) -> tuple[int, Lease, bool]:
        """Open a lease. Returns its queue, and whether it is counted: without the store, queues take turns."""
        headers, _, body, _ = message
        id = headers.get("id")
        if id is None:
            # Protocol 1: headers do not reach the task, so the lease must follow from the body.
            lease = Lease(f"{body['id']}:{body.get('retries') or 0}:-", body["id"], expires_in)
        else:
            if allotted := self._allotted.get(id):
                return *allotted.popleft(), True
            lease = Lease.new(id, headers.get("retries") or 0, expires_in)
        try:
            if self._owed:
                self.repay()
            return self._store.open((lease,), fixed)[0], lease, True
        except StoreUnavailable:
            return (next(self._turn) % len(self.names) if fixed is None else fixed), lease, False
        except Exception:
            log.exception("the load balancer failed to choose a queue; the task is published in turn")
            return (next(self._turn) % len(self.names) if fixed is None else fixed), lease, False

    def _release(self, leases: Sequence[tuple[int, Lease]]) -> None:
        if not leases:
            return
        try:
            self._store.drop(leases)
        except StoreUnavailable:
            self._owed.extend(leases)


def _queue(name: str, exchange: str) -> Any:
    make: Any = Queue
    make_exchange: Any = Exchange
    return make(name, make_exchange(exchange, type="direct"), routing_key=name)


def check_not_fair(app: Any, publisher: Publisher) -> None:
    """Reject an application whose balanced queues are fair too: their tasks would be jobs, not messages."""
    fair = fairs.get(app)
    if fair is None:
        return
    both = [name for name in (*publisher.names, publisher.anywhere.name) if fair.is_fair(name)]
    if both:
        advice = "name the fair ones with Fair(queues=[…]), without the balanced ones"
        raise InvalidInput("app", f"has Fair and LoadBalancer, and {both[0]} would be fair and balanced; {advice}")


def install(app: Any, publisher: Publisher, revoked: Callable[[Sequence[str]], None]) -> None:
    """Make an application publish through the publisher, and report what it revokes."""
    check_not_fair(app, publisher)
    amqp_class: Any = symbol_by_name(app.amqp_cls)
    control_class: Any = symbol_by_name(app.control_cls)

    class BalancedAMQP(amqp_class):
        """Knows the balanced queues beside the configured ones, whenever and however those are configured."""

        def __init__(self, app: Any) -> None:
            # Again, because Fair may have been created after the balancer.
            check_not_fair(app, publisher)
            super().__init__(app)

        def Queues(self, *args: Any, **kwargs: Any) -> Any:
            found = super().Queues(*args, **kwargs)
            for queue in publisher.queues:
                if queue.name not in found:
                    found.select_add(queue)
            return found

        def Router(self, *args: Any, **kwargs: Any) -> Any:
            router = super().Router(*args, **kwargs)
            # Last, so that routes of the user come first.
            router.routes = [*router.routes, publisher.route]
            return router

        def _create_task_sender(self) -> Any:
            return publisher.wrap(super()._create_task_sender())

    class BalancedControl(control_class):
        """A revoked task leaves the load at once; its message stays in the queue until its turn comes."""

        def revoke(self, task_id: Any, *args: Any, **kwargs: Any) -> Any:
            answer = super().revoke(task_id, *args, **kwargs)
            revoked([task_id] if isinstance(task_id, str) else list(task_id))
            return answer

    app.amqp_cls = BalancedAMQP
    app.control_cls = BalancedControl
    # Both are created once and kept.
    app.__dict__.pop("amqp", None)
    app.__dict__.pop("control", None)
