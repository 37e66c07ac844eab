"""Prometheus metrics: counters and histograms from events, and gauges that are read from the store at each scrape.

Requires the extra ``fairlane[prometheus]``. Labels are names of queues and tasks, verbs and states, never a lane or an
id, and each metric has a bounded number of series. Counters are of this process: sum them over processes. Gauges are of
the whole store: give `queues` and `sessions` to one process, or take the maximum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

try:
    import prometheus_client as prom
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "fairlane.integrations.prometheus requires prometheus-client: pip install 'fairlane[prometheus]'", name=exc.name
    ) from None
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from ..events import Called, Enqueued, Event, Events, Finished, Led, Passed, Refused, Started
from ..model.job import Priority
from ..model.maintenance import Promoted
from ..model.reading import QueueReading
from ..model.session import Session, SessionState
from ..worker.probes import Readiness, serve

log = logging.getLogger(__name__)

JOB_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 3_600)
WAIT_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3_600, 14_400, 86_400)
CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
MOST_SERIES = 1_000
OTHER = "other"

ReadQueues = Callable[[], Iterable[QueueReading]]
ReadSessions = Callable[[], Iterable[Session]]
ReadCounters = Callable[[], Mapping[str, int]]


class Load(Protocol):
    """What is read of a load."""

    @property
    def pending(self) -> int: ...

    @property
    def running(self) -> int: ...


M = TypeVar("M", bound=MetricWrapperBase)
C = TypeVar("C", bound=Collector)


class _Series(Generic[M]):
    """A metric with a cache of its children: a lookup in prometheus_client costs four times as much as an increment."""

    def __init__(self, metric: M) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], M] = {}

    def __call__(self, *labels: str) -> M:
        child = self._children.get(labels)
        if child is None:
            # A client that may enqueue can invent names, so their number is bounded.
            named = labels if len(self._children) < MOST_SERIES else (OTHER,) * len(labels)
            child = self._metric.labels(*named)
            if named is labels:
                self._children[labels] = child
        return child


class Metrics:
    """Counts events, and reads the store at each scrape if it is given functions for that. `close` unregisters it.

    `queues`, `sessions` and `counters` are called in the thread of the scrape and may wait for the store. If one
    raises, the scrape omits the gauges and ``fairlane_store_up`` is 0.
    """

    def __init__(
        self,
        events: Events,
        registry: prom.CollectorRegistry | None = None,
        *,
        queues: ReadQueues | None = None,
        sessions: ReadSessions | None = None,
        counters: ReadCounters | None = None,
    ) -> None:
        self.registry = registry or prom.REGISTRY
        self._collectors: list[Collector] = []
        self._enqueued = self._counter("fairlane_jobs_enqueued", "Jobs created by this process.", "queue", "task")
        self._started = self._counter("fairlane_jobs_started", "Jobs claimed by this process.", "queue", "task")
        self._finished = self._counter(
            "fairlane_jobs_finished",
            "Runs that ended in this process, by outcome and resulting state of the job.",
            *("queue", "task", "state", "outcome"),
        )
        self._job_seconds = self._histogram(
            "fairlane_job_seconds", "Duration of runs from claim to finish.", JOB_BUCKETS, "queue", "task"
        )
        self._wait_seconds = self._histogram(
            "fairlane_job_wait_seconds",
            "Wait of jobs for their first start, since they were sent or due.",
            *(WAIT_BUCKETS, "queue", "priority"),
        )
        self._late_seconds = self._add(
            prom.Histogram(
                "fairlane_promotion_late_seconds",
                "Time from the due time of the longest overdue job of a pass to its promotion.",
                buckets=WAIT_BUCKETS,
                registry=None,
            )
        )
        self._call_seconds = self._histogram(
            "fairlane_store_call_seconds", "Duration of calls to the store.", CALL_BUCKETS, "verb"
        )
        self._errors = self._counter(
            "fairlane_store_errors", "Calls to the store that raised an error.", "verb", "error"
        )
        self._refused = self._counter(
            "fairlane_refused_writes", "Rejected writes to jobs that the worker no longer owns.", "verb"
        )
        self._maintenance = self._counter(
            "fairlane_maintenance", "Jobs and records that maintenance passes of the leader changed.", "verb", "what"
        )
        self._terms = self._add(prom.Counter("fairlane_terms", "Elections won by this process.", registry=None))
        if queues or sessions or counters:
            self._add(_Gauges(queues, sessions, counters))
        self._unsubscribe = events.subscribe(self._count)

    def serve(self, port: int, host: str = "127.0.0.1", readiness: Readiness | None = None) -> Callable[[], None]:
        """Serve metrics in a thread, by default only to this machine. Returns a function that stops it.

        It also serves ``/healthz``, and with `readiness` ``/readyz``.
        """
        return serve(prom.make_wsgi_app(self.registry), port, host, readiness)

    def close(self) -> None:
        """Stop counting, and unregister. It is safe to call it twice."""
        self._unsubscribe()
        while self._collectors:
            self.registry.unregister(self._collectors.pop())

    def _counter(self, name: str, text: str, *labels: str) -> _Series[prom.Counter]:
        return _Series(self._add(prom.Counter(name, text, labels, registry=None)))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> _Series[prom.Histogram]:
        return _Series(self._add(prom.Histogram(name, text, labels, buckets=buckets, registry=None)))

    def _add(self, collector: C) -> C:
        self.registry.register(collector)
        self._collectors.append(collector)
        return collector

    def _count(self, event: Event) -> None:
        match event:
            case Called():
                self._call_seconds(event.verb).observe(event.seconds)
                # A cancelled call is not an error of the store.
                if event.error is not None and event.error != "CancelledError":
                    self._errors(event.verb, event.error).inc()
            case Enqueued():
                if event.created:
                    self._enqueued(event.queue, event.task).inc()
            case Started():
                self._started(event.queue, event.task).inc()
                if event.waited is not None:
                    self._wait_seconds(event.queue, event.priority.label).observe(event.waited)
            case Finished():
                queue, task = event.queue or "", event.task or ""
                self._finished(queue, task, event.state.value, event.outcome.value).inc()
                if event.seconds is not None:
                    self._job_seconds(queue, task).observe(event.seconds)
            case Refused():
                self._refused(event.verb).inc()
            case Passed():
                self._count_pass(event)
            case Led():
                self._terms.inc()

    def _count_pass(self, event: Passed) -> None:
        if isinstance(event.answer, Promoted) and event.answer.late is not None:
            self._late_seconds.observe(event.answer.late)
        for what in event.answer.__struct_fields__:
            value = getattr(event.answer, what)
            count = len(value) if isinstance(value, tuple) else value
            # The other fields are times and flags.
            if type(count) is int and count:
                self._maintenance(event.verb, what).inc(count)


class _Gauges(Collector):
    """Gauges that are read from the store at each scrape."""

    def __init__(self, queues: ReadQueues | None, sessions: ReadSessions | None, counters: ReadCounters | None) -> None:
        self._queues = queues
        self._sessions = sessions
        self._counters = counters
        self._up = True

    def describe(self) -> Iterator[Metric]:
        """Yield empty families; without this method, registering would read the store."""
        yield from (*self._of_queues([]), *self._of_sessions([]), *self._of_server({}), _up(True))

    def collect(self) -> Iterator[Metric]:
        try:
            families: list[Metric] = []
            if self._queues is not None:
                families += self._of_queues(self._queues())
            if self._sessions is not None:
                families += self._of_sessions(self._sessions())
            if self._counters is not None:
                families += self._of_server(self._counters())
        except Exception as exc:
            # Log once per outage, not at every scrape.
            if self._up:
                log.warning("cannot read the store for metrics, gauges are omitted: %s", type(exc).__name__)
            self._up, families = False, []
        else:
            self._up = True
        yield from (*families, _up(self._up))

    @staticmethod
    def _of_queues(readings: Iterable[QueueReading]) -> list[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("fairlane_jobs", "Jobs that have not ended.", labels=("queue", "priority", "state"))
        workers = GaugeMetricFamily("fairlane_queue_workers", "Live workers that serve a queue.", labels=("queue",))
        paused = GaugeMetricFamily("fairlane_queue_paused", "1 if the queue is paused.", labels=("queue",))
        oldest = GaugeMetricFamily(
            "fairlane_queue_oldest_wait_seconds", "Wait of the oldest waiting job.", labels=("queue",)
        )
        for reading in readings:
            for priority, counts in zip(Priority, reading.classes, strict=True):
                for state in ("scheduled", "pending", "running"):
                    jobs.add_metric((reading.name, priority.label, state), getattr(counts, state))
            workers.add_metric((reading.name,), reading.workers)
            paused.add_metric((reading.name,), reading.settings.paused)
            oldest.add_metric((reading.name,), reading.oldest_wait or 0.0)
        return [jobs, workers, paused, oldest]

    @staticmethod
    def _of_sessions(sessions: Iterable[Session]) -> list[GaugeMetricFamily]:
        present = GaugeMetricFamily("fairlane_sessions", "Sessions that have not ended.", labels=("kind", "state"))
        counts: dict[tuple[str, str], int] = {}
        for session in sessions:
            if session.state in (SessionState.LIVE, SessionState.STOPPING):
                key = (session.kind.value, session.state.value)
                counts[key] = counts.get(key, 0) + 1
        for key, count in counts.items():
            present.add_metric(key, count)
        return [present]

    @staticmethod
    def _of_server(counters: Mapping[str, int]) -> list[Metric]:
        text = "Incidents that the store's server has counted."
        incidents = CounterMetricFamily("fairlane_server_incidents", text, labels=("what",))
        tokens = CounterMetricFamily("fairlane_tokens", "Tokens in Redis, by what became of them.", labels=("what",))
        down = GaugeMetricFamily("fairlane_redis_down", "Servers of tokens that do not answer.")
        for what, count in counters.items():
            if what == REDIS_DOWN:
                down.add_metric((), count)
            elif what.startswith(TOKENS):
                tokens.add_metric((what.removeprefix(TOKENS),), count)
            else:
                incidents.add_metric((what,), count)
        return [incidents, tokens, down]


TOKENS, REDIS_DOWN = "tokens_", "redis_down"
"""Counters of a store on PostgreSQL with Redis that have metrics of their own."""


class CeleryLoads(Collector):
    """The loads of the balanced queues of a Celery application, read at each scrape.

    `loads` is the method of a `fairlane.integrations.celery.LoadBalancer`. If it raises, the scrape omits the loads and
    ``fairlane_celery_balancer_up`` is 0. Register it with ``registry.register(CeleryLoads(balancer.loads))``.
    """

    def __init__(self, loads: Callable[[], Mapping[str, Load]]) -> None:
        self._loads = loads

    def describe(self) -> Iterator[Metric]:
        """Yield empty families; without this method, registering would read the server."""
        yield from self._families({}, True)

    def collect(self) -> Iterator[Metric]:
        try:
            loads, up = self._loads(), True
        except Exception:
            # The balancer logs an outage itself, once.
            loads, up = {}, False
        yield from self._families(loads, up)

    @staticmethod
    def _families(loads: Mapping[str, Load], up: bool) -> list[Metric]:
        tasks = GaugeMetricFamily(
            "fairlane_celery_tasks", "Tasks that wait or run in a balanced queue.", labels=("queue", "state")
        )
        for queue, load in loads.items():
            tasks.add_metric((queue, "pending"), load.pending)
            tasks.add_metric((queue, "running"), load.running)
        text = "1 if this scrape could read the loads."
        return [tasks, GaugeMetricFamily("fairlane_celery_balancer_up", text, value=up)]


def _up(value: bool) -> GaugeMetricFamily:
    return GaugeMetricFamily("fairlane_store_up", "1 if this scrape could read the store.", value=value)
