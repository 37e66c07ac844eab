"""Publishing: Celery's own sender with another producer in front, so that routes, signals and events stay Celery's.

Every publish passes here with its protocol-2 message ready-made: `delay`, canvas, `send_task`, beat, retries and
replacements. What is routed to a fair queue becomes a job; everything else goes to the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from celery._state import _task_stack
from celery.app.amqp import AMQP
from celery.app.task import Task
from celery.exceptions import Retry
from kombu.compression import compress
from kombu.entity import Queue
from kombu.exceptions import OperationalError
from kombu.serialization import dumps
from kombu.utils.functional import retry_over_time

from ...errors import InvalidInput, StoreUnavailable
from ...model.job import MOST_RETRIES, NewJob, Priority
from ...runtime.running_job import current_job_or_none
from .applications import fair_of
from .destinations import queue_at
from .messages import JOB, KEY, LANE, OPTIONS, PREFIX, PRIORITY, QUEUE, TTL, UNIQUE, digest_of, payload_of

if TYPE_CHECKING:
    from .fair import Fair

FAIR_ONLY = (KEY, UNIQUE, TTL)
"""The options that a task must not run without. A lane and a priority only decide when it runs."""
CRASH_RETRIES = 3
"""How often a task with `acks_late` is run again after its worker died, besides the retries that it did not use."""
MOST_RUNS_OF_AN_ID = 100
"""How many jobs may have the same Celery id: replacements, and ids that a caller uses again."""
RETRY_POLICY = ("max_retries", "interval_start", "interval_step", "interval_max")
"""What Celery's `task_publish_retry_policy` may have. Elsewhere kombu heeds it, when it publishes."""
KEPT = "fairlane_retry"
"""The attribute of a request that holds the retry it has published."""
_captured: ContextVar[list[Publish] | None] = ContextVar("fairlane_celery_captured", default=None)
_reporting: ContextVar[Any] = ContextVar("fairlane_celery_request", default=None)


@contextmanager
def reporting(request: Any) -> Iterator[None]:
    """Make `request` the parent of what a worker's main process publishes: error callbacks, retries of lost runs."""
    token = _reporting.set(request)
    try:
        yield
    finally:
        _reporting.reset(token)


@contextmanager
def captured() -> Iterator[list[Publish]]:
    """Collect what is published in this block to fair queues instead of storing it."""
    publishes: list[Publish] = []
    token = _captured.set(publishes)
    try:
        yield publishes
    finally:
        _captured.reset(token)


def capture(publish: Publish) -> bool:
    """Whether a publish is only collected."""
    publishes = _captured.get()
    if publishes is not None:
        publishes.append(publish)
    return publishes is not None


def parent_request() -> Any:
    """The request of the fair job whose code or whose end runs here; None outside of one."""
    if (request := _reporting.get()) is not None:
        return request
    for task in reversed(_task_stack.stack):
        # A task that is applied eagerly has no job of its own; the one around it counts.
        if task.request.get(JOB) is not None:
            return task.request
    return None


class KeptRetry(Retry):
    """A retry with the payload of its next run. Celery's own loses its signature on the way to the main process."""

    payload: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _kept_retry, (self.message, self.exc, self.when, self.payload)


def _kept_retry(message: Any, exc: Any, when: Any, payload: bytes | None) -> KeptRetry:
    retry = KeptRetry(message, exc, when)
    retry.payload = payload
    return retry


def keep_retry(request: Any, reason: Any) -> None:
    """Attach the payload that `request` has published for its retry to the exception that ends it."""
    kept = request.__dict__.pop(KEPT, None)
    if kept is not None:
        reason.__class__ = KeptRetry
        reason.payload = kept.payload


class FairAMQP(AMQP):
    """Celery's AMQP with publishes that become jobs."""

    @property
    def fair(self) -> Fair:
        """The fair mode of its application."""
        return fair_of(self.app)

    def _create_task_sender(self) -> Any:
        send = super()._create_task_sender()

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            asked = {option: options.pop(option) for option in OPTIONS if option in options}
            _refuse_unknown(options)
            queue = self._fair_queue(options)
            if JOB in (options.get("headers") or ()):
                options["headers"] = self._without_claim(options["headers"], queue)
            if queue is not None:
                producer = FairProducer(producer, self.fair, queue, asked)
            elif lost := _lost(asked, options.get("headers") or {}):
                raise InvalidInput(lost[0], "requires a fair queue: this task would go to the broker")
            return send(producer, name, message, **options)

        return send_task_message

    def _without_claim(self, headers: Mapping[str, Any], queue: str | None) -> dict[str, Any]:
        """The headers of a request that are used for another message, as a retry does, without those of its claim.

        With them, what is run by Celery elsewhere would seem to be that job. Its key only counts where it chooses a
        worker; in the queue of that worker it is inherited anyway.
        """
        router = self.fair.router
        keyed = router is not None and queue == router.any_worker
        dropped = (JOB, QUEUE) if keyed else (JOB, QUEUE, KEY)
        return {name: value for name, value in headers.items() if name not in dropped}

    def _fair_queue(self, options: Mapping[str, Any]) -> str | None:
        """The fair queue that Celery's sender would send a publish to; None if that is another queue or none."""
        queue, exchange, key = (options.get(name) for name in ("queue", "exchange", "routing_key"))
        if queue is None and exchange is None:
            queue = self.default_queue
        elif isinstance(queue, str):
            queue = self.queues[queue]
        if exchange or key:
            # Celery adds the default queue to a call that only has these.
            queue = self._reached(queue, exchange, key, options.get("exchange_type"))
        return self.fair.fair_queue(queue) if isinstance(queue, Queue) else None

    def _reached(self, queue: Any, exchange: Any, key: str | None, kind: str | None) -> Any:
        """The queue that a message reaches if its publish has an exchange or a routing key besides its queue."""
        own = getattr(queue, "exchange", None)
        if (kind or getattr(own, "type", "direct")) == "direct" and not (exchange and key):
            return queue  # Celery's sender uses its name
        origin = own if exchange is None else exchange
        known = self.queues if queue is None else {**self.queues, queue.name: queue}
        return queue_at(known, getattr(origin, "name", origin) or "", key or getattr(queue, "routing_key", None) or "")


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuse a misspelt option of Fairlane: Celery ignores what it does not know, and the task would run without."""
    for option in options:
        if option.startswith(PREFIX):
            raise InvalidInput(option, f"is not an option; the options are {', '.join(OPTIONS)}")


def _lost(asked: dict[str, Any], headers: Mapping[str, Any]) -> list[str]:
    """The options that a task must not run without and that were given for a publish to the broker."""
    task = _task_stack.top
    # A retry has the headers of its request.
    inherited = {} if task is None else task.request.headers or {}
    given = {name: value for name, value in headers.items() if inherited.get(name) != value} | asked
    return [option for option in FAIR_ONLY if given.get(option) is not None]


def is_next_run(headers: Mapping[str, Any], request: Any) -> bool:
    """Whether a message is the retry of a request."""
    known = (request.id, request.get("task"), request.retries + 1)
    return (str(headers["id"]), str(headers["task"]), headers.get("retries")) == known


def runs_of(id: str, first: int = 0) -> Iterator[str]:
    """The ids that the jobs of a Celery id may have."""
    for number in range(first, first + MOST_RUNS_OF_AN_ID):
        yield id if number == 0 else f"{id}.{number}"


def repeatedly(policy: Mapping[str, Any] | None, work: Callable[..., object], *args: Any) -> None:
    """Call `work`, again while the store cannot be reached, as a policy of Celery says; without one only once."""
    given = {"max_retries": 0} if policy is None else {name: policy[name] for name in RETRY_POLICY if name in policy}
    retry_over_time(work, StoreUnavailable, args, **given)


class FairProducer:
    """Stands in for a producer during one publish: a task becomes a job; events go to the broker."""

    def __init__(self, producer: Any, fair: Fair, queue: str, asked: dict[str, Any]) -> None:
        self._producer = producer
        self._fair = fair
        self._queue = queue
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Store the job of a task message."""
        headers = options.get("headers") or {}
        if "task" not in headers:
            return self._producer.publish(body, **options)
        policy = options.get("retry_policy") if options.get("retry") else None
        try:
            repeatedly(policy, self._fair.publish, self._publish_of(body, headers, options), body)
        except StoreUnavailable as exc:
            # What callers expect when there is no connection.
            raise OperationalError(str(exc)) from exc
        except Exception:
            task = _task_stack.top
            if task is None or task.request.get(JOB) is not None or not is_next_run(headers, task.request):
                raise
            # What cannot be a job stays with Celery, which runs it now.
            return self._producer.publish(body, **options)

    def _publish_of(self, body: Any, headers: dict[str, Any], options: Mapping[str, Any]) -> Publish:
        content_type, content_encoding, data = dumps(body, options.get("serializer") or self._producer.serializer)
        names = ("correlation_id", "reply_to", "priority")
        properties = {name: options[name] for name in names if options.get(name) is not None}
        payload = payload_of(headers, properties, content_type, content_encoding, data)
        if options.get("compression"):
            plain = digest_of(payload)
            data, headers["compression"] = compress(data, options["compression"])
            payload = payload_of(headers, properties, content_type, content_encoding, data, plain)
        return Publish(self._fair, self._queue, headers, properties, payload, self._asked)


class Publish:
    """One message on its way to becoming a job."""

    def __init__(
        self,
        fair: Fair,
        queue: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
        payload: bytes,
        asked: dict[str, Any],
    ) -> None:
        self.fair = fair
        self.queue = queue
        self.headers = headers
        self.properties = properties
        self.payload = payload
        self.asked = {name: headers[name] for name in OPTIONS if headers.get(name) is not None} | asked
        self.unique: str | None = self.asked.get(UNIQUE)
        self.id = str(headers["id"])
        self.task = str(headers["task"])
        parent = parent_request()
        same_queue = parent is not None and parent.get(QUEUE) == queue
        self.parent_key: str | None = parent.get(KEY) if same_queue else None
        """The key of the running task, if it publishes to the queue that it came from."""

    def is_retry_of(self, request: Any) -> bool:
        """Whether this is the next run of the job that publishes it."""
        return (
            request is not None
            and is_next_run(self.headers, request)
            and (self.headers.get("replaced_task_nesting") or 0) == (request.replaced_task_nesting or 0)
            and self.queue == request.get(QUEUE)
        )

    def lane(self, body: Any, parent: Any) -> str | None:
        """The lane that was asked for, the tenant's, or that of the job that publishes.

        `body` has the arguments; None when they are not known here.
        """
        asked = self.asked.get(LANE)
        if asked is None:
            asked = self.fair.tenant_of(self.task, body, self.headers)
        if asked is not None:
            return str(asked)
        if parent is not None:
            inherited = parent.get(LANE)
            return None if inherited is None else str(inherited)
        job = current_job_or_none()
        return None if job is None else job.lane

    def job(self, id: str, lane: str | None) -> NewJob:
        """The job with this id."""
        expires = self.fair.moment("expires", self.headers)
        router = self.fair.router
        if router is None and KEY in self.asked:
            raise InvalidInput(KEY, "requires a StickyRouter")
        job = NewJob(
            id=id,
            task=self.task,
            queue=self.queue,
            payload=self.payload,
            lane=lane,
            priority=self._priority(),
            run_at=self.fair.moment("eta", self.headers),
            expires=None if expires is None else max(0.0, expires - time.time()),
            retries=self._retries(),
            unique=self.unique,
        )
        return job if router is None else router.assign(job, self)

    def ids(self) -> Iterator[str]:
        """The ids to try: that of the task, then numbered ones, because a replacement has the id of its task."""
        return runs_of(self.id, self.headers.get("replaced_task_nesting") or 0)

    def _priority(self) -> Priority:
        word = self.asked.get(PRIORITY)
        if word is not None:
            return word if isinstance(word, Priority) else Priority.parse(word)
        number = self.properties.get("priority")
        return Priority.NORMAL if number is None else self.fair.priority_of(number)

    def _retries(self) -> int:
        """The engine's budget, which only crashes use: whether Celery retries is Celery's decision.

        A task that is acknowledged before it runs must never run twice. That of a task which is not known here is seen
        to by the worker that gets it again.
        """
        task = self.fair.task(self.task) or Task
        if task is not Task and not task.acks_late:
            return 0
        own = MOST_RETRIES if task.max_retries is None else max(0, task.max_retries)
        return min(MOST_RETRIES, own + CRASH_RETRIES)
