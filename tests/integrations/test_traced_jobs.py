"""One trace from the code that enqueues a job to the code that runs in it, through a real worker."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from fairlane import Fairlane, JobState
from fairlane.events import Event, Finished, Started
from fairlane.integrations.opentelemetry import instrument


async def test_the_spans_of_a_job_are_one_trace(store_url: str) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("shop")
    app = Fairlane(store_url, tracer=instrument(provider))
    seen: list[Event] = []
    app.events.subscribe(seen.append)

    @app.task
    async def render() -> None:
        with tracer.start_as_current_span("draw"):
            pass

    @app.task
    def resize() -> None:
        assert trace.get_current_span().get_span_context().is_valid
        with tracer.start_as_current_span("shrink"):
            pass

    @app.task(retries=0)
    async def explode() -> None:
        raise ValueError("no such picture")

    async with app:
        with tracer.start_as_current_span("checkout"):
            jobs = [await task.enqueue() for task in (render, resize, explode)]
        await app.worker(burst=True).run()
        states = [await job.state() for job in jobs]
    assert states == [JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED]

    spans = {span.name.rpartition(".")[2]: span for span in exporter.get_finished_spans()}
    runs = {span.name: span for span in exporter.get_finished_spans() if span.name.startswith("run ")}
    assert len({span.context.trace_id for span in exporter.get_finished_spans() if span.context}) == 1
    for inner, task in (("draw", render), ("shrink", resize)):
        assert _parent(spans[inner]) == _own(runs[f"run {task.name}"])
    failed = runs[f"run {explode.name}"]
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description is not None
    assert "no such picture" in failed.status.description
    assert sorted(e.task for e in seen if isinstance(e, Started)) == sorted(t.name for t in (render, resize, explode))
    assert {e.state for e in seen if isinstance(e, Finished)} == {JobState.COMPLETED, JobState.FAILED}


def _own(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def _parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id
