"""The application of `strict` in a program with OpenTelemetry: FastAPI stands between the server and the service."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from .strict import web

__all__ = ["web"]

trace.set_tracer_provider(TracerProvider())
