"""Health, readiness, metrics, and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from ...errors import FairlaneError, NotSupported
from ..access import Scope
from ..answers import Answer, json_answer
from ..operation import Exchange, Operations

operations = Operations("health")
TEXT = b"text/plain; charset=utf-8"


@operations.add("GET", "/healthz", Scope.PUBLIC, bound=True, content="text/plain", shows="ok")
async def healthz(exchange: Exchange) -> Answer:
    """Whether the process responds."""
    return Answer(b"ok\n", content_type=TEXT)


@operations.add("GET", "/readyz", Scope.PUBLIC, bound=True, timed=False, content="text/plain", shows="ok")
async def readyz(exchange: Exchange) -> Answer:
    """Whether the store is reachable and embedded workers claim jobs; otherwise 503 with the reason."""
    service = exchange.service
    problem = "the service is stopping" if service.stopping else None
    problem = next((found for unready in service.unready if (found := unready()) is not None), problem)
    if problem is None:
        try:
            await service.timed(service.app.client.leader())
        except (FairlaneError, TimeoutError) as exc:
            problem = f"cannot read the store ({type(exc).__name__})"
    return Answer(f"{problem or 'ok'}\n".encode(), 200 if problem is None else 503, content_type=TEXT)


@operations.add("GET", "/metrics", Scope.READ, timed=False, content="text/plain", shows="fairlane_store_up 1.0\n")
async def metrics(exchange: Exchange) -> Answer:
    """Prometheus metrics."""
    exposition = exchange.service.exposition
    if exposition is None:
        raise NotSupported("metrics require prometheus-client: pip install 'fairlane[prometheus]'")
    text = await exposition.text()
    return Answer(text, content_type=b"text/plain; version=0.0.4; charset=utf-8")


@operations.add("GET", "/openapi.json", Scope.PUBLIC, bound=True, answer=dict[str, Any], shows={"openapi": "3.1.0"})
async def openapi(exchange: Exchange) -> Answer:
    """This OpenAPI document."""
    return json_answer(exchange.scope["app"].openapi())
