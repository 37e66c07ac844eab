"""`LoadBalancer`: tasks of a Celery application go to the least loaded of several queues.

app = Celery("images", broker="redis://localhost")
balancer = LoadBalancer(app, "redis://localhost")

resize.delay("cat.png")             # goes to the least loaded queue of queue_0 … queue_19
balancer.loads()                    # {"queue_0": Load(pending=1, running=0), …}
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from celery.canvas import Signature

from ....errors import FairlaneError, InvalidInput, NotFound, StoreUnavailable
from ....model.names import NAME_PATTERN, shown
from ....store.diagnosis import Finding
from ..applications import fairs
from . import diagnosis
from .connection import Address
from .executions import Executions
from .leases import Lease, LeaseStore, Load
from .publishing import PREFIX, Publisher, install
from .reconciler import Reconciler

MOST_QUEUES = 1_000
MISSED_BEATS = 5
"""A worker that misses this many heartbeats in a row is considered dead."""
RECOUNT_PAUSE = 0.3
ATTRIBUTE = "fairlane_balancer"
"""Where an application keeps its balancer, for the command line."""


class LoadBalancer:
    """Declares ``queue_0`` … ``queue_{n-1}`` on an application and sends each task to the least loaded of them.

    The load of a queue is the number of its waiting messages and running executions. `url` names a Redis or Valkey
    server for the counts; the broker may be another one. All processes of an application, producers and workers,
    create the balancer with the same arguments where they create the application. A task with ``queue=``, with a route
    of its own in ``task_routes`` or on another queue is left alone. If the server cannot be reached, tasks are
    published to the queues in turn, and the counts are corrected when it is back.

    `namespace` separates applications that share a server. `heartbeat` is the number of seconds between reports of a
    worker; one that misses five is considered dead.
    """

    def __init__(
        self, app: Any, url: str, queues: int = 20, *, namespace: str = "celery", heartbeat: float = 2.0
    ) -> None:
        if not hasattr(app, "amqp_cls"):
            raise InvalidInput("app", "must be a Celery application")
        if type(queues) is not int or not 1 <= queues <= MOST_QUEUES:
            raise InvalidInput("queues", f"must be a number from 1 to {MOST_QUEUES}")
        if NAME_PATTERN.fullmatch(str(namespace)) is None:
            raise InvalidInput("namespace", f"{shown(str(namespace))} must be letters, digits and '_', '.', ':', '-'")
        if type(heartbeat) not in (int, float) or not 0.1 <= heartbeat <= 60:
            raise InvalidInput("heartbeat", "must be a number of seconds from 0.1 to 60")
        if getattr(app, ATTRIBUTE, None) is not None:
            raise InvalidInput("app", "has a load balancer already; create one for each application")
        self.app = app
        self._store = LeaseStore(Address(url), namespace, queues, heartbeat * MISSED_BEATS, self._recovered)
        self._publisher = Publisher(self._store)
        self._reconciler = Reconciler(app, self._publisher, heartbeat)
        self._executions = Executions(app, self._store, self._publisher, self._reconciler, heartbeat)
        install(app, self._publisher, self._revoked)
        self._executions.connect()
        setattr(app, ATTRIBUTE, self)

    @property
    def queues(self) -> list[str]:
        """The names of the balanced queues, in order."""
        return list(self._publisher.names)

    # -- publishing ------------------------------------------------------------------------------------------------

    def enqueue(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        """Publish a task to the least loaded queue, even if it has a queue of its own. Returns its AsyncResult."""
        _check_task(task)
        return task.apply_async(args, kwargs, queue=self._publisher.anywhere)

    def enqueue_many(self, signatures: Iterable[Any]) -> Any:
        """Publish many tasks, spread over the queues level by level. Returns their GroupResult.

        The queues of up to 5,000 members are chosen in one step, so that other producers see all or none. Members are
        published one after the other: if the broker fails in between, the error is raised and the rest is not
        published. Signatures with ``queue=`` go there; chains, chords and groups are published too, and each of their
        tasks chooses its queue when it is published.
        """
        if isinstance(signatures, Signature):
            raise InvalidInput("signatures", "must be a list of signatures, not a single one")
        members = [_checked(signature).clone() for signature in signatures]
        leases: list[Lease] = []
        for member in members:
            options = member.options
            if member.get("subtask_type") is None and not options.get("queue"):
                member.set(queue=self._publisher.anywhere)
                expires = options.get("expires", getattr(self.app.tasks.get(member.task), "expires", None))
                leases.append(Lease.new(member.freeze().id, 0, self._seconds_until(expires)))
        try:
            if not self.app.conf.task_always_eager:
                self._publisher.allot(leases)
            with self.app.producer_or_acquire(None) as producer:
                results = [member.apply_async(producer=producer) for member in members]
        finally:
            self._publisher.release_allotted(leases)
        return self.app.GroupResult(str(uuid4()), results)

    def enqueue_for_user(self, task: Any, user: object, *args: Any, **kwargs: Any) -> Any:
        """Publish a task to the queue of a user, always the same one. Returns its AsyncResult."""
        _check_task(task)
        return task.apply_async(args, kwargs, queue=self.queue_for_user(user))

    def queue_for_user(self, user: object) -> str:
        """The queue of a user. Without a user, that is None or an empty text, it is the first one."""
        text = "" if user is None else str(user)
        names = self._publisher.names
        # Not hash(): that differs between processes.
        return names[zlib.crc32(text.encode()) % len(names)] if text else names[0]

    # -- loads -----------------------------------------------------------------------------------------------------

    def loads(self) -> dict[str, Load]:
        """The load of every queue at one moment. Raises `StoreUnavailable`."""
        loads, _ = self._store.loads()
        return dict(zip(self._publisher.names, loads, strict=True))

    def load(self, queue: str) -> Load:
        """The load of one queue. Raises `NotFound` for a name that is not balanced, and `StoreUnavailable`."""
        return self.loads()[self._publisher.names[self._index(queue)]]

    def reset(self, queue: str | None = None) -> dict[str, Load]:
        """Recount all queues or one from the messages in the broker and what live workers report. Returns all loads.

        It is safe at any time: nothing that waits or runs is forgotten. Raises `StoreUnavailable` if the server of the
        counts or the broker cannot be reached.
        """
        queues = None if queue is None else [self._index(queue)]
        reconciler = Reconciler(self.app, self._publisher, RECOUNT_PAUSE)
        try:
            reconciler.recount(self._store, queues, RECOUNT_PAUSE)
        except FairlaneError:
            raise
        except Exception as exc:
            # Only the class: the text may contain the URL of the broker with its password.
            error = f"the broker of {self.app.main!r} cannot be read ({type(exc).__name__}); check broker_url"
            raise StoreUnavailable(error) from exc
        finally:
            reconciler.close()
        return self.loads()

    def diagnose(self) -> list[Finding]:
        """Look for problems: the server, queues without a consumer, counts that differ from the broker."""
        return diagnosis.diagnose(self.app, self._store, self._publisher)

    def close(self) -> None:
        """Close the connection of this process. It is opened again when it is needed."""
        self._store.close()

    def _index(self, queue: str) -> int:
        index = self._publisher.index.get(queue)
        if index is None:
            last = self._publisher.names[-1]
            raise NotFound(f"queue {shown(str(queue))} is not balanced; the queues are {PREFIX}0 to {last}")
        return index

    def _revoked(self, ids: Sequence[str]) -> None:
        try:
            self._store.revoke(ids)
        except StoreUnavailable:
            # Each leaves the load when its turn comes.
            return

    def _recovered(self) -> None:
        """The server is back. A worker's heartbeat corrects the counts; a producer does it itself, in a thread."""
        if not self._executions.in_worker:
            threading.Thread(target=self._heal, name="fairlane-balancer-heal", daemon=True).start()

    def _heal(self) -> None:
        self._publisher.repay()
        try:
            self.reset()
        except Exception:
            # Another process corrects the counts, or the next recovery does.
            return

    def _seconds_until(self, expires: object) -> float | None:
        if isinstance(expires, str):
            expires = datetime.fromisoformat(expires)
        if isinstance(expires, datetime):
            now: datetime = self.app.now()
            return (expires - (now if expires.tzinfo else now.replace(tzinfo=None))).total_seconds()
        return float(expires) if isinstance(expires, int | float) else None


def _check_task(task: Any) -> None:
    if not hasattr(task, "apply_async"):
        raise InvalidInput("task", f"must be a task or a signature of Celery, not a {type(task).__name__}")


def _checked(signature: Any) -> Any:
    if not isinstance(signature, Signature):
        found = type(signature).__name__
        raise InvalidInput("signatures", f"must be signatures, such as resize.s('cat.png'), but one is a {found}")
    return signature


def balancer_of(app: Any) -> LoadBalancer:
    """The balancer of an application. Raises `NotFound` if it has none."""
    found = getattr(app, ATTRIBUTE, None)
    if not isinstance(found, LoadBalancer):
        advice = "; fair mode is shown by `fairlane status` and `fairlane doctor`" if app in fairs else ""
        raise NotFound(f"the Celery application {app.main!r} has no LoadBalancer{advice}")
    return found
