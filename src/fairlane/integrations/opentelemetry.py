"""OpenTelemetry traces: a span for each enqueue and one for each run of the job, in one trace.

Requires the extra ``fairlane[opentelemetry]``. The job's `headers` carry the context in the format of the configured
propagator (``traceparent``), so a run is a child of the enqueue, regardless of how long it waited and where it
runs. A missing or malformed context starts a new trace and never fails a job. Without an SDK every span is a no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "fairlane.integrations.opentelemetry requires opentelemetry-api: pip install 'fairlane[opentelemetry]'",
        name=exc.name,
    ) from None
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from ..error_text import error_summary
from ..errors import Cancel, Snooze
from ..model.job import FAILED_REASONS, Claimed
from ..model.states import Transition

MESSAGE_LENGTH = 1_000


class Spans:
    """A `fairlane.events.Tracer` that creates spans."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("fairlane", tracer_provider=provider)

    @contextmanager
    def headers(self, task: str, queue: str) -> Iterator[dict[str, str] | None]:
        """A producer span around an enqueue. Yields its context for the job's headers."""
        attributes = _attributes("send", task, queue)
        with self._span(f"enqueue {task}", SpanKind.PRODUCER, attributes):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            yield carrier or None

    @contextmanager
    def run(self, claimed: Claimed) -> Iterator[Callable[[Transition], None]]:
        """A consumer span around a run of a job, as a child of the span that enqueued it."""
        attributes = _attributes("process", claimed.task, claimed.queue)
        attributes["messaging.message.id"] = claimed.id
        attributes["fairlane.attempt"] = claimed.attempt
        context = propagate.extract(carried(claimed.headers))
        with self._span(f"run {claimed.task}", SpanKind.CONSUMER, attributes, context) as span:
            yield lambda transition: _decided(span, transition)

    @contextmanager
    def _span(
        self, name: str, kind: SpanKind, attributes: dict[str, str | int], context: Context | None = None
    ) -> Iterator[Span]:
        span = self._tracer.start_span(name, context, kind, attributes)
        try:
            # Recorded below without the stack trace, which may contain the values that a job works on.
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        except (Snooze, Cancel):
            raise
        except Exception as exc:
            _record(span, exc)
            raise
        finally:
            span.end()


def instrument(provider: trace.TracerProvider | None = None) -> Spans:
    """Create the tracer to pass to an app. It uses the global provider unless one is given."""
    return Spans(provider)


def carried(headers: bytes | None) -> dict[str, str]:
    """The string headers of a job; empty if the headers are malformed, since any client may set them."""
    if headers is None:
        return {}
    try:
        found = msgspec.json.decode(headers, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _attributes(operation: str, task: str, queue: str) -> dict[str, str | int]:
    return {
        "messaging.system": "fairlane",
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
        "fairlane.task": task,
    }


def _decided(span: Span, transition: Transition) -> None:
    """Record how a run ended. Of a traceback, only the line that names the error is kept."""
    if not span.is_recording():
        return
    span.set_attribute("fairlane.outcome", transition.move.value)
    if transition.reason in FAILED_REASONS:
        # "ValueError in body" and "...\nshop.ValueError: no such file"
        kind = (transition.error_group or transition.reason.value).partition(" ")[0]
        summary = error_summary(transition.error) or ""
        _fail(span, kind, summary.partition(f"{kind}: ")[2] or summary)


def _record(span: Span, exc: Exception) -> None:
    try:
        message = str(exc)
    except Exception:
        message = ""
    _fail(span, type(exc).__qualname__, message)


def _fail(span: Span, kind: str, message: str) -> None:
    message = message[:MESSAGE_LENGTH]
    span.add_event("exception", {"exception.type": kind, "exception.message": message})
    span.set_status(Status(StatusCode.ERROR, f"{kind}: {message}"))
