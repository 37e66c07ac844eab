"""Fair mode: two lines make every Celery worker of an application a Fairlane worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from celery import Celery, signals
from celery.app.amqp import AMQP
from celery.app.control import Control
from celery.utils.imports import symbol_by_name
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.common import Broadcast

from ...app import Fairlane
from ...errors import Conflict, InvalidInput, NotFound
from ...model.job import WAITING_STATES, Enqueued, Job, Priority
from ...model.names import check_count, check_name
from ...runtime.loop_thread import LoopThread
from ...store.port import Store
from .applications import fairs
from .messages import LANE, digests_of, headers_of
from .publishing import KEPT, FairAMQP, Publish, capture, keep_retry, parent_request, repeatedly, runs_of
from .results import record_duplicate
from .revoking import FairControl
from .worker_steps import AgentStep, DeliveryStep

if TYPE_CHECKING:
    from .sticky import StickyRouter

T = TypeVar("T")
Tenant = Callable[[str, Sequence[Any], Mapping[str, Any], Mapping[str, Any]], str | None]
"""Returns the tenant of a publish, from the task's name, its arguments, its keyword arguments and the headers."""
DIRECT_EXCHANGE = "C.dq2"
"""Celery's exchange for the queue of one worker (`worker_direct`)."""
HIGHEST_FIRST = frozenset({"amqp"})
"""Drivers of brokers whose highest priority is 9. For all others it is 0."""
URGENT, ORDINARY = 7, 3
"""The least urgency, from 0 to 9, of high and of normal priority."""


class Fair:
    """Publishes of a Celery application become jobs of a Fairlane application, and its workers run them.

        celery_app = Celery("shop", broker="redis://", backend="redis://")
        Fair(celery_app, Fairlane("redis://"), tenant="customer")

    `tenant` decides the lane of a job: the name of a header, or a function of the task's name, its arguments, keyword
    arguments and headers. Without one, or if it returns None, a job has the lane of the job that publishes it. `queues`
    names the Celery queues that are fair, all by default; others go to the broker as before. With `ahead`, a worker
    claims that many more jobs than it can run, so that no process waits for the store.
    """

    def __init__(
        self,
        app: Celery,
        fairlane: Fairlane,
        *,
        tenant: str | Tenant | None = None,
        queues: Sequence[str] | None = None,
        ahead: int = 0,
    ) -> None:
        _check_kind("app", app, Celery, "a Celery application")
        _check_kind("fairlane", fairlane, Fairlane, "a Fairlane application, such as Fairlane('redis://')")
        if app in fairs:
            raise InvalidInput("app", f"Fair was called twice for {app.main or 'this application'}")
        if not (tenant is None or isinstance(tenant, str) or callable(tenant)):
            raise InvalidInput("tenant", f"must be the name of a header or a function, not a {type(tenant).__name__}")
        if isinstance(queues, str):
            raise InvalidInput("queues", f"must be a list of queues, such as [{queues!r}]")
        self.app = app
        self.fairlane = fairlane
        self.ahead = check_count("ahead", ahead, least=0, most=1_000)
        self._tenant = tenant
        self._queues = None if queues is None else frozenset(check_name("queues", name) for name in queues)
        self._thread = LoopThread()
        self._highest_first: bool | None = None
        self.router: StickyRouter | None = None
        """The router of sticky plans, if the application has one."""
        fairs[app] = self
        self._replace(FairAMQP, AMQP, "amqp")
        self._replace(FairControl, Control, "control")
        app.steps["worker"].add(AgentStep)
        app.steps["consumer"].add(DeliveryStep)
        signals.task_retry.connect(self._on_retry, weak=False)
        signals.task_postrun.connect(self._on_postrun, weak=False)

    def _replace(self, mine: type, usual: type, part: str) -> None:
        """Use `mine` for a part of the application, on top of the class that it uses already."""
        base = symbol_by_name(getattr(self.app, f"{part}_cls"))
        # Without a class of its own the application can still be pickled, for processes that are spawned.
        chosen = mine if base is usual else type(mine.__name__, (mine, base), {})
        setattr(self.app, f"{part}_cls", chosen)
        self.app.__dict__.pop(part, None)

    # -- what is published -------------------------------------------------------------------------------------------

    def is_fair(self, queue: str) -> bool:
        """Whether the tasks of a Celery queue become jobs."""
        return self._queues is None or queue in self._queues or (self.router is not None and self.router.owns(queue))

    def fair_queue(self, queue: Any) -> str | None:
        """The name of a queue of Celery if its tasks become jobs; not if it is that of every or of a single worker."""
        name, exchange = str(queue.name), queue.exchange
        if self.router is not None and self.router.owns(name):
            return name  # also if it is declared as a broadcast
        if isinstance(queue, Broadcast):
            return None
        if exchange is not None and (exchange.name == DIRECT_EXCHANGE or exchange.type == "fanout"):
            return None
        return name if self.is_fair(name) else None

    def served(self) -> list[str]:
        """The fair queues among those that this process consumes."""
        consumed = self.app.amqp.queues.consume_from.values()
        return [name for queue in consumed if (name := self.fair_queue(queue)) is not None]

    @property
    def choice(self) -> tuple[list[str] | None, str | None]:
        """Which queues are fair: their names, None for all, and the pool of the router."""
        names = None if self._queues is None else sorted(self._queues)
        return names, None if self.router is None else self.router.org

    def task(self, name: str) -> Any:
        """The task of this name; None if this process does not know it."""
        return self.app.tasks.get(name)

    def tenant_of(self, task: str, body: Any, headers: Mapping[str, Any]) -> str | None:
        """The tenant of a publish; None if there is none, and the lane is inherited."""
        if self._tenant is None:
            return None
        if isinstance(self._tenant, str):
            named = headers.get(self._tenant)
            return None if named is None else str(named)
        return self._tenant(task, body[0], body[1], headers)

    def priority_of(self, number: object) -> Priority:
        """The class of a Celery priority from 0 to 9, which means what it means for the application's broker."""
        if not isinstance(number, int | float):
            raise InvalidInput("priority", f"must be a number from 0 to 9, not a {type(number).__name__}")
        if self._highest_first is None:
            driver = self.app.connection_for_write().transport.driver_type
            self._highest_first = driver in HIGHEST_FIRST
        urgency = number if self._highest_first else 9 - number
        return Priority.HIGH if urgency >= URGENT else Priority.NORMAL if urgency >= ORDINARY else Priority.LOW

    def moment(self, field: str, headers: Mapping[str, Any]) -> float | None:
        """A time in the headers of a message, as seconds since 1970."""
        value = headers.get(field)
        if value is None:
            return None
        try:
            return float(maybe_make_aware(maybe_iso8601(value), self.app.timezone).timestamp())
        except (AttributeError, TypeError, ValueError) as exc:
            raise InvalidInput(field, f"is not a time of Celery ({exc})") from None

    def publish(self, publish: Publish, body: Any) -> None:
        """Store the job of a publish. A retry of the running job waits for the end of its run instead."""
        parent = parent_request()
        if publish.is_retry_of(parent):
            # Now, while the task can still fail by it: after the run nothing sees that it cannot be stored.
            publish.job(publish.id, None)
            setattr(parent, KEPT, publish)
            return
        if capture(publish):
            return
        self.enqueue(publish, publish.lane(body, parent))

    def enqueue(self, publish: Publish, lane: str | None) -> None:
        """Store the job of a publish in a lane. Safe to repeat, also inside a running event loop."""
        answer = self._store(publish, lane)
        if publish.unique is not None and answer.id not in publish.ids():
            record_duplicate(self, publish, lane, answer.id)

    def _store(self, publish: Publish, lane: str | None) -> Enqueued:
        client = self.fairlane.client

        async def store() -> Enqueued:
            for id in publish.ids():
                try:
                    [answer] = await client.send([publish.job(id, lane)])
                except Conflict:
                    try:
                        taken = await client.job(id)
                    except NotFound:
                        continue
                    if _is_repeated(taken.payload, publish.payload):
                        return Enqueued(id, False, taken.state)
                else:
                    return answer
            raise Conflict(f"too many jobs exist for the task id {publish.id!r}; choose another task_id")

        return self.wait(store)

    def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Wait for a call to the store, also inside a running event loop."""
        return self._thread.wait(work)

    def cancel(self, ids: Sequence[str], *, running: bool) -> None:
        """Cancel the jobs of Celery ids, including their replacements; without `running` only those that wait."""
        client = self.fairlane.client

        async def cancel_all() -> None:
            store = await self.fairlane.connection.store()
            for id in ids:
                for job in await _jobs_of(store, id):
                    if job.state in WAITING_STATES or (running and not job.state.final):
                        await client.cancel([job.id])

        self.wait(cancel_all)

    # -- called in the process that runs a task ----------------------------------------------------------------------

    def _on_retry(self, sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
        if getattr(sender, "app", None) is self.app and request is not None:
            keep_retry(request, reason)

    def _on_postrun(self, task: Any = None, state: Any = None, **_: Any) -> None:
        """Store a retry that was published but not raised (`throw=False`): the run ends by itself."""
        if getattr(task, "app", None) is self.app:
            kept = task.request.__dict__.pop(KEPT, None)
            if kept is not None:
                # Nothing sees an error here, and the retry would be lost.
                policy = task.app.conf.task_publish_retry_policy
                repeatedly(policy, self.enqueue, kept, task.request.get(LANE))


def _check_kind(field: str, value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise InvalidInput(field, f"must be {what}, not a {type(value).__name__}")


def _is_repeated(stored: bytes, payload: bytes) -> bool:
    """Whether the message of a payload is the one that a job was sent with, once more."""
    try:
        return not digests_of(stored).isdisjoint(digests_of(payload))
    except InvalidInput:
        return False  # a job of another program in the same store


async def _jobs_of(store: Store, id: str) -> list[Job]:
    """The jobs of a Celery id, not those of other ids of the form that a replacement has."""
    jobs: list[Job] = []
    first = 0
    while True:
        # Not one after the other: a replacement may still wait when its task is forgotten.
        found = await store.get(list(runs_of(id, first)))
        jobs += [job for job in found if job is not None and _has_id(job.payload, id)]
        if found[-1] is None:
            return jobs
        first += len(found)


def _has_id(payload: bytes, id: str) -> bool:
    """Whether the message of a payload has an id."""
    try:
        return str(headers_of(payload).get("id")) == id
    except InvalidInput:
        return False  # a job of another program in the same store
