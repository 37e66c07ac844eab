"""Traces with OpenTelemetry: one span where a job is asked for, one for each run of it, in one trace.

Needs the extra ``fairlane[opentelemetry]``. The context travels in the job's `headers`, in the form of the configured
propagator (``traceparent``), so a run is a child of the enqueue, however long it waited and wherever it runs. A
context that is missing or damaged starts a new trace and never stops a job. Without an SDK every span is a no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "fairlane.integrations.opentelemetry needs opentelemetry-api: pip install 'fairlane[opentelemetry]'",
        name=exc.name,
    ) from None
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from ..errors import Cancel, Snooze
from ..model.job import FAILED_REASONS, Claimed
from ..model.states import Transition

MESSAGE_LENGTH = 1_000


class Spans:
    """A `fairlane.events.Tracer` that makes spans."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("fairlane", tracer_provider=provider)

    @contextmanager
    def headers(self, task: str, queue: str) -> Iterator[dict[str, str] | None]:
        """A producer's span around an enqueue, and its context for the job to carry."""
        attributes = _attributes("send", task, queue)
        with self._span(f"enqueue {task}", SpanKind.PRODUCER, attributes):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            yield carrier or None

    @contextmanager
    def run(self, claimed: Claimed) -> Iterator[Callable[[Transition], None]]:
        """A consumer's span around a run of a job, below the span that enqueued it."""
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
            # Recorded by hand below: a stack trace shows the values a body worked on.
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
    """The tracer to hand to an app, with the process's own provider unless one is given."""
    return Spans(provider)


def carried(headers: bytes | None) -> dict[str, str]:
    """The texts among the headers of a job; nothing when they are of another form, for anybody may have set them."""
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
    """How a run ended; of a traceback only the last line, which has the message."""
    if not span.is_recording():
        return
    span.set_attribute("fairlane.outcome", transition.move.value)
    if transition.reason in FAILED_REASONS:
        # "ValueError in body" and "...\nshop.ValueError: no such file"
        kind = (transition.error_group or transition.reason.value).partition(" ")[0]
        last = (transition.error or "").rstrip().rpartition("\n")[2]
        _fail(span, kind, last.partition(f"{kind}: ")[2] or last)


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
