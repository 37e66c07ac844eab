"""Metrics as a scrape sees them, from a store that is really used."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fairlane.errors import NotFound, StoreUnavailable
from fairlane.events import Called, Enqueued, Events
from fairlane.integrations import prometheus
from fairlane.integrations.prometheus import Metrics
from fairlane.model.job import Held, Priority
from fairlane.model.reading import QueueReading
from fairlane.model.session import Session
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.instrumented import InstrumentedStore
from tests.conformance.kit import Kit
from tests.servers.postgresql import free_port

WAIT = 30.0


@pytest.fixture
def events() -> Events:
    """The events that the store emits."""
    return Events()


@pytest.fixture
async def kit(store_url: str, events: Events) -> AsyncIterator[Kit]:
    """A real store, watched."""
    clock = ManualClock()
    store = await open_store(store_url, clock=clock)
    yield Kit(InstrumentedStore(store, events), clock)
    await store.close()


@pytest.fixture
def metrics(events: Events) -> Iterator[Metrics]:
    """Metrics in a registry of their own."""
    metrics = Metrics(events, CollectorRegistry())
    yield metrics
    metrics.close()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """What a scrape shows for one series, None when there is none."""
    return metrics.registry.get_sample_value(name, labels)


async def test_the_life_of_a_job_is_counted(kit: Kit, metrics: Metrics) -> None:
    worker = await kit.worker("images")
    for _ in range(3):
        await kit.enqueue("render", queue="images", lane="ann")
    first, second, third = await worker.claim(3)
    await worker.complete(first)
    await worker.retry(second, delay=60)
    await worker.fail(third)

    of = {"queue": "images", "task": "render"}
    assert value(metrics, "fairlane_jobs_enqueued_total", **of) == 3
    assert value(metrics, "fairlane_jobs_started_total", **of) == 3
    for state, outcome in [("completed", "completed"), ("scheduled", "retry"), ("failed", "failed")]:
        assert value(metrics, "fairlane_jobs_finished_total", **of, state=state, outcome=outcome) == 1
    assert value(metrics, "fairlane_job_seconds_count", **of) == 3
    assert (value(metrics, "fairlane_job_seconds_sum", **of) or 0) > 0


async def test_a_duplicate_is_not_counted(kit: Kit, metrics: Metrics) -> None:
    for _ in range(3):
        await kit.enqueue(unique="once")

    assert value(metrics, "fairlane_jobs_enqueued_total", queue="default", task="task") == 1


async def test_calls_and_their_errors_are_counted_by_verb(kit: Kit, metrics: Metrics) -> None:
    await kit.enqueue()
    with pytest.raises(NotFound):
        await kit.store.cancel(["nobody"])

    assert value(metrics, "fairlane_store_call_seconds_count", verb="enqueue") == 1
    assert value(metrics, "fairlane_store_call_seconds_count", verb="cancel") == 1
    assert value(metrics, "fairlane_store_errors_total", verb="cancel", error="NotFound") == 1
    assert value(metrics, "fairlane_store_errors_total", verb="enqueue", error="NotFound") is None


def test_a_call_that_was_given_up_is_no_error_of_the_store(events: Events, metrics: Metrics) -> None:
    events.emit(Called("claim", 0.1, "CancelledError"))

    assert value(metrics, "fairlane_store_call_seconds_count", verb="claim") == 1
    assert b"CancelledError" not in generate_latest(metrics.registry)


async def test_refused_writes_are_counted(kit: Kit, metrics: Metrics) -> None:
    worker = await kit.worker()
    id = await kit.enqueue()
    [job] = await worker.claim()
    await worker.complete(Held(id, job.fence + 1))
    await kit.store.progress(worker.id, [(Held(id, job.fence + 1), b"1")])

    assert value(metrics, "fairlane_refused_writes_total", verb="finish") == 1
    assert value(metrics, "fairlane_refused_writes_total", verb="progress") == 1


async def test_maintenance_and_elections_are_counted(kit: Kit, metrics: Metrics) -> None:
    worker = await kit.worker()
    await kit.enqueue()
    await kit.enqueue(delay=30)
    await worker.claim()
    kit.clock.advance(60)
    assert await kit.store.lead("manager", lease=10) is not None
    await kit.store.promote()
    await kit.store.rescue()

    assert value(metrics, "fairlane_maintenance_total", verb="promote", what="promoted") == 1
    assert value(metrics, "fairlane_maintenance_total", verb="rescue", what="declared") == 1
    assert value(metrics, "fairlane_maintenance_total", verb="rescue", what="retried") == 1
    assert value(metrics, "fairlane_terms_total") == 1
    await kit.store.promote()
    assert value(metrics, "fairlane_promotion_late_seconds_count") == 1, "a pass that promoted nothing says nothing"
    assert value(metrics, "fairlane_promotion_late_seconds_sum") == pytest.approx(30.0)
    # Times and flags of an answer are not counts.
    assert b'what="now"' not in generate_latest(metrics.registry)
    assert b'what="late"' not in generate_latest(metrics.registry)
    assert b'what="more"' not in generate_latest(metrics.registry)


async def test_labels_never_carry_a_lane_or_an_id(kit: Kit, metrics: Metrics) -> None:
    worker = await kit.worker(id="session-77")
    id = await kit.enqueue(id="job-77", lane="user:ann", sticky="plan-77", payload=b'[["hunter2"],{}]')
    [job] = await worker.claim()
    await worker.fail(job, error="hunter2")
    await kit.store.cancel([id])

    scraped = generate_latest(metrics.registry)
    assert b"fairlane_jobs_finished_total" in scraped
    for secret in (b"user:ann", b"job-77", b"session-77", b"plan-77", b"hunter2"):
        assert secret not in scraped


def test_invented_names_do_not_fill_the_memory(
    events: Events, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "MOST_SERIES", 3)
    for number in range(10):
        events.emit(Enqueued(str(number), f"task-{number}", "default", None, Priority.LOW, True))
    events.emit(Enqueued("again", "task-0", "default", None, Priority.LOW, True))

    assert value(metrics, "fairlane_jobs_enqueued_total", queue="default", task="task-0") == 2
    assert value(metrics, "fairlane_jobs_enqueued_total", queue="default", task="task-3") is None
    assert value(metrics, "fairlane_jobs_enqueued_total", queue="other", task="other") == 7


async def test_gauges_show_the_store_as_it_is_at_the_scrape(kit: Kit, events: Events) -> None:
    loop = asyncio.get_running_loop()

    def queues() -> Iterable[QueueReading]:
        return asyncio.run_coroutine_threadsafe(kit.store.queues(), loop).result(WAIT)

    def sessions() -> Iterable[Session]:
        return asyncio.run_coroutine_threadsafe(kit.store.sessions(), loop).result(WAIT)

    metrics = Metrics(events, CollectorRegistry(), queues=queues, sessions=sessions)
    worker = await kit.worker("images")
    await (await kit.worker("images")).leave()
    await kit.enqueue(queue="images", priority=Priority.HIGH)
    await kit.enqueue(queue="images", priority=Priority.LOW, delay=60)
    jobs = {"queue": "images"}

    def scrape(name: str, **labels: str) -> float | None:
        return value(metrics, name, **labels)

    assert await asyncio.to_thread(scrape, "fairlane_jobs", **jobs, priority="high", state="pending") == 1
    assert await asyncio.to_thread(scrape, "fairlane_jobs", **jobs, priority="low", state="scheduled") == 1
    assert await asyncio.to_thread(scrape, "fairlane_queue_workers", **jobs) == 1
    assert await asyncio.to_thread(scrape, "fairlane_queue_paused", **jobs) == 0
    kit.clock.advance(12)
    assert await asyncio.to_thread(scrape, "fairlane_queue_oldest_wait_seconds", **jobs) == 12
    assert await asyncio.to_thread(scrape, "fairlane_sessions", kind="worker", state="live") == 1
    assert await asyncio.to_thread(scrape, "fairlane_sessions", kind="worker", state="ended") is None
    await worker.claim()
    assert await asyncio.to_thread(scrape, "fairlane_jobs", **jobs, priority="high", state="pending") == 0
    assert await asyncio.to_thread(scrape, "fairlane_jobs", **jobs, priority="high", state="running") == 1
    assert await asyncio.to_thread(scrape, "fairlane_queue_oldest_wait_seconds", **jobs) == 0
    assert await asyncio.to_thread(scrape, "fairlane_store_up") == 1
    metrics.close()


async def test_a_scrape_while_the_store_is_gone_still_shows_the_counters(
    kit: Kit, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    gone = True

    def queues() -> Iterable[QueueReading]:
        if gone:
            raise StoreUnavailable("postgresql://ann:hunter2@db cannot be reached")
        return []

    metrics = Metrics(events, CollectorRegistry(), queues=queues)
    await kit.enqueue()
    with caplog.at_level(logging.WARNING, logger="fairlane"):
        for _ in range(3):
            scraped = generate_latest(metrics.registry)
            assert b"fairlane_jobs_enqueued_total" in scraped
            assert b"fairlane_store_up 0.0" in scraped
    # Others log too, such as asyncio about tasks that other tests have left.
    assert [record.name for record in caplog.records if record.name.startswith("fairlane")] == [prometheus.__name__]
    assert "hunter2" not in caplog.text

    gone = False
    assert b"fairlane_store_up 1.0" in generate_latest(metrics.registry)
    gone = True
    generate_latest(metrics.registry)
    assert len(caplog.records) == 2
    metrics.close()


async def test_waits_are_counted_by_queue_and_class(kit: Kit, metrics: Metrics) -> None:
    worker = await kit.worker(lease=1e6)
    await kit.enqueue(priority=Priority.HIGH)
    kit.clock.advance(40)
    await kit.enqueue(priority=Priority.LOW)
    first, _ = await worker.claim(2)
    await worker.retry(first)
    await worker.claim()
    high, low = ({"queue": "default", "priority": priority} for priority in ("high", "low"))
    assert value(metrics, "fairlane_job_wait_seconds_count", **high) == 1
    assert value(metrics, "fairlane_job_wait_seconds_sum", **high) == pytest.approx(40)
    assert value(metrics, "fairlane_job_wait_seconds_bucket", **high, le="30.0") == 0
    assert value(metrics, "fairlane_job_wait_seconds_bucket", **high, le="60.0") == 1
    assert value(metrics, "fairlane_job_wait_seconds_sum", **low) == 0


def test_making_metrics_does_not_read_the_store(events: Events) -> None:
    def queues() -> Iterable[QueueReading]:
        raise AssertionError("read before any scrape")

    Metrics(events, CollectorRegistry(auto_describe=True), queues=queues).close()


async def test_closed_metrics_count_no_more_and_leave_room_for_others(kit: Kit, events: Events) -> None:
    registry = CollectorRegistry()
    first = Metrics(events, registry, queues=list)
    first.close()
    first.close()
    assert not events.active
    assert generate_latest(registry) == b""

    second = Metrics(events, registry, queues=list)
    await kit.enqueue()
    assert value(second, "fairlane_jobs_enqueued_total", queue="default", task="task") == 1
    second.close()


async def test_scrapes_are_served_on_this_machine_until_stopped(kit: Kit, metrics: Metrics) -> None:
    port = free_port()
    await kit.enqueue()
    stop = metrics.serve(port)

    def scrape() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT) as answer:
            body: bytes = answer.read()
            return body

    try:
        assert b'fairlane_jobs_enqueued_total{queue="default",task="task"} 1.0' in await asyncio.to_thread(scrape)
    finally:
        await asyncio.to_thread(stop)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape)


def test_a_missing_library_is_named_with_the_extra_that_brings_it() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import fairlane.integrations.prometheus"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "pip install 'fairlane[prometheus]'" in done.stderr
