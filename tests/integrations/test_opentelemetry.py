"""Spans over a real store: the run of a job is found below the call that enqueued it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from fairlane.errors import Cancel, Fail, Snooze
from fairlane.events import Tracer
from fairlane.integrations.opentelemetry import Spans, carried, instrument
from fairlane.model import states
from fairlane.model.job import Claimed, Held, Reason
from fairlane.model.states import Transition
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from tests.conformance.kit import Kit, Worker


class Recorded:
    """A provider of spans, and the spans that ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        """The spans of one name, in the order they ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def only(self, name: str) -> ReadableSpan:
        """The one span of this name."""
        [span] = self.named(name)
        return span


@pytest.fixture
def recorded() -> Recorded:
    """An SDK of its own; the process's provider stays as it is."""
    return Recorded()


@pytest.fixture
def spans(recorded: Recorded) -> Spans:
    """The tracer under test."""
    return instrument(recorded.provider)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    """A real store."""
    clock = ManualClock()
    store = await open_store(f"sqlite:///{tmp_path / 'fairlane.db'}", clock=clock)
    yield Kit(store, clock)
    await store.close()


async def enqueue(kit: Kit, tracer: Tracer, task: str = "render") -> str:
    """Enqueue as a client does."""
    with tracer.headers(task, "default") as headers:
        return await kit.enqueue(task, headers=None if headers is None else msgspec.json.encode(headers))


async def claimed(kit: Kit, worker: Worker | None = None) -> Claimed:
    """The next job, as a worker gets it."""
    [job] = await (worker or await kit.worker()).claim()
    return job


def same_trace(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether `child` stands directly below `parent`."""
    assert parent.context is not None
    return child.parent is not None and (child.parent.trace_id, child.parent.span_id) == (
        parent.context.trace_id,
        parent.context.span_id,
    )


async def test_a_run_is_a_child_of_the_enqueue(kit: Kit, spans: Spans, recorded: Recorded) -> None:
    id = await enqueue(kit, spans)
    with spans.run(await claimed(kit)):
        pass

    produced, consumed = recorded.only("enqueue render"), recorded.only("run render")
    assert (produced.kind, consumed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert same_trace(consumed, produced)
    assert dict(produced.attributes or {}) == {
        "messaging.system": "fairlane",
        "messaging.operation.type": "send",
        "messaging.destination.name": "default",
        "fairlane.task": "render",
    }
    assert dict(consumed.attributes or {}) == {
        "messaging.system": "fairlane",
        "messaging.operation.type": "process",
        "messaging.destination.name": "default",
        "messaging.message.id": id,
        "fairlane.task": "render",
        "fairlane.attempt": 1,
    }
    assert consumed.status.status_code is StatusCode.UNSET


async def test_an_enqueue_stands_below_the_span_of_its_caller(kit: Kit, spans: Spans, recorded: Recorded) -> None:
    with recorded.provider.get_tracer("shop").start_as_current_span("checkout"):
        await enqueue(kit, spans)

    assert same_trace(recorded.only("enqueue render"), recorded.only("checkout"))


async def test_every_attempt_is_a_child_of_the_same_enqueue(kit: Kit, spans: Spans, recorded: Recorded) -> None:
    await enqueue(kit, spans)
    worker = await kit.worker()
    for _ in range(2):
        job = await claimed(kit, worker)
        with pytest.raises(ValueError, match="bad"), spans.run(job):
            raise ValueError("bad")
        await worker.retry(job)

    runs = recorded.named("run render")
    assert [dict(run.attributes or {})["fairlane.attempt"] for run in runs] == [1, 2]
    assert all(same_trace(run, recorded.only("enqueue render")) for run in runs)


async def test_an_exception_passes_and_leaves_its_type_and_message_alone(
    kit: Kit, spans: Spans, recorded: Recorded
) -> None:
    await enqueue(kit, spans)
    job = await claimed(kit)

    def body(password: str) -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"), spans.run(job):
        body("hunter2")

    run = recorded.only("run render")
    assert run.status.status_code is StatusCode.ERROR
    [event] = run.events
    assert event.name == "exception"
    assert dict(event.attributes or {}) == {"exception.type": "ValueError", "exception.message": "no such file"}
    assert "hunter2" not in run.to_json()


async def test_a_decision_records_what_went_wrong_without_the_traceback(
    kit: Kit, spans: Spans, recorded: Recorded
) -> None:
    await enqueue(kit, spans)
    job = await claimed(kit)
    traceback = (
        'Traceback:\n  File "x.py", line 1, in body\n    login("hunter2")\nshop.ValueError: no such file\nhunter2\n'
    )
    with spans.run(job) as decided:
        decided(states.retry(job.held, 5, Reason.ERROR, traceback, group="ValueError in body"))

    run = recorded.only("run render")
    assert run.status.status_code is StatusCode.ERROR
    [event] = run.events
    assert dict(event.attributes or {}) == {"exception.type": "ValueError", "exception.message": "no such file"}
    assert dict(run.attributes or {})["fairlane.outcome"] == "retry"
    assert "hunter2" not in run.to_json()


async def test_a_timeout_is_an_error_though_its_job_was_only_cancelled(
    kit: Kit, spans: Spans, recorded: Recorded
) -> None:
    await enqueue(kit, spans)
    job = await claimed(kit)
    with spans.run(job) as decided:
        decided(states.fail(job.held, Reason.TIMEOUT, "the run took longer than 5 s"))

    run = recorded.only("run render")
    assert run.status.description == "timeout: the run took longer than 5 s"


@pytest.mark.parametrize(
    "decide", [states.complete, states.hand_back, states.cancel, lambda held: states.snooze(held, 5)]
)
async def test_a_decision_without_a_failure_is_no_error(
    kit: Kit, spans: Spans, recorded: Recorded, decide: Callable[[Held], Transition]
) -> None:
    await enqueue(kit, spans)
    job = await claimed(kit)
    transition = decide(job.held)
    with spans.run(job) as decided:
        decided(transition)

    run = recorded.only("run render")
    assert run.status.status_code is StatusCode.UNSET
    assert dict(run.attributes or {})["fairlane.outcome"] == transition.move.value
    assert not run.events


async def test_an_enqueue_repeated_under_another_span_is_the_same_job(kit: Kit, spans: Spans) -> None:
    answers = []
    for _ in range(2):
        with spans.headers("render", "default") as headers:
            job = kit.new("render", id="job-1", headers=msgspec.json.encode(headers))
            answers += await kit.store.enqueue([job])

    assert [answer.created for answer in answers] == [True, False]


async def test_an_enqueue_that_fails_is_recorded(spans: Spans, recorded: Recorded) -> None:
    with pytest.raises(ConnectionError), spans.headers("render", "default"):
        raise ConnectionError("no store")

    assert recorded.only("enqueue render").status.status_code is StatusCode.ERROR


async def test_an_exception_that_cannot_be_shown_passes_all_the_same(
    kit: Kit, spans: Spans, recorded: Recorded
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    await enqueue(kit, spans)
    with pytest.raises(Mute), spans.run(await claimed(kit)):
        raise Mute

    assert recorded.only("run render").status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (Snooze(5), StatusCode.UNSET),
        (Cancel("nobody needs it"), StatusCode.UNSET),
        (asyncio.CancelledError(), StatusCode.UNSET),
        (Fail("never"), StatusCode.ERROR),
        (StopIteration("body"), StatusCode.ERROR),
    ],
)
async def test_only_what_went_wrong_is_an_error(
    kit: Kit, spans: Spans, recorded: Recorded, raised: BaseException, status: StatusCode
) -> None:
    await enqueue(kit, spans)
    job = await claimed(kit)
    with pytest.raises(type(raised)) as passed, spans.run(job):
        raise raised

    assert passed.value is raised
    run = recorded.only("run render")
    assert run.status.status_code is status
    assert run.end_time is not None


@pytest.mark.parametrize(
    "headers",
    [
        None,
        b"{}",
        b"[]",
        b'"text"',
        b"7",
        b'{"traceparent": 7}',
        b'{"traceparent": "junk"}',
        b'{"traceparent": "00-00000000000000000000000000000000-0000000000000000-01"}',
        b'{"traceparent": {"traceparent": []}, "baggage": "=;=,=\xc3\xa9"}',
        b'{"tracestate": "' + b"x" * 5_000 + b'"}',
    ],
)
async def test_a_damaged_context_starts_a_new_trace(
    kit: Kit, spans: Spans, recorded: Recorded, headers: bytes | None
) -> None:
    await kit.enqueue("render", headers=headers)
    with spans.run(await claimed(kit)):
        pass

    assert recorded.only("run render").parent is None


async def test_a_run_without_a_context_does_not_join_the_workers_own_span(
    kit: Kit, spans: Spans, recorded: Recorded
) -> None:
    await kit.enqueue("render")
    with recorded.provider.get_tracer("worker").start_as_current_span("loop"), spans.run(await claimed(kit)):
        pass

    assert recorded.only("run render").parent is None


def test_headers_of_others_are_left_out() -> None:
    assert carried(b'{"traceparent": "a", "user": 7, "deep": {"traceparent": "b"}}') == {"traceparent": "a"}
    assert carried(b"[" * 100_000 + b"]" * 100_000) == {}
    assert carried(b"\xff") == {}


async def test_spans_of_concurrent_jobs_do_not_mix(kit: Kit, spans: Spans, recorded: Recorded) -> None:
    tracer = recorded.provider.get_tracer("shop")
    for number in range(5):
        await enqueue(kit, spans, f"task-{number}")
    worker = await kit.worker()
    jobs = await worker.claim(5)
    all_inside = asyncio.Barrier(5)

    def in_a_thread(task: str) -> None:
        tracer.start_span(f"thread {task}").end()

    async def run(job: Claimed) -> None:
        with spans.run(job):
            await all_inside.wait()
            with tracer.start_as_current_span(f"inside {job.task}"):
                await asyncio.sleep(0)
            await asyncio.to_thread(in_a_thread, job.task)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(run(job))

    assert len({job.task for job in jobs}) == 5
    for job in jobs:
        run_span = recorded.only(f"run {job.task}")
        assert same_trace(run_span, recorded.only(f"enqueue {job.task}"))
        assert same_trace(recorded.only(f"inside {job.task}"), run_span)
        assert same_trace(recorded.only(f"thread {job.task}"), run_span)
    assert not trace.get_current_span().get_span_context().is_valid


async def test_an_unsampled_trace_is_carried_on_unsampled(kit: Kit, spans: Spans, recorded: Recorded) -> None:
    await enqueue(kit, instrument(TracerProvider(sampler=ALWAYS_OFF)))
    job = await claimed(kit)
    flags = int(carried(job.headers)["traceparent"].rpartition("-")[2], 16)
    assert not flags & 1
    with pytest.raises(ValueError, match="bad"), spans.run(job):
        raise ValueError("bad")

    assert recorded.exporter.get_finished_spans() == ()


async def test_without_an_sdk_nothing_is_carried_and_jobs_run(kit: Kit) -> None:
    spans = Spans(trace.NoOpTracerProvider())
    with spans.headers("render", "default") as headers:
        assert headers is None
    await enqueue(kit, spans)
    job = await claimed(kit)
    assert job.headers is None
    with pytest.raises(ValueError, match="bad"), spans.run(job):
        raise ValueError("bad")


def test_a_missing_library_is_named_with_the_extra_that_brings_it() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import fairlane.integrations.opentelemetry"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "pip install 'fairlane[opentelemetry]'" in done.stderr
