"""Builds the ASGI application: routes from the table of operations, the OpenAPI document, and the lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..app import Fairlane
from .answers import note_transport
from .deadlines import limit_connections
from .document import openapi_document
from .operation import Endpoint, Operation, Operations
from .problems import Problem
from .routes import operations_of
from .service import Service
from .settings import HttpSettings
from .unread import UnreadBodies


def create_app(app: Fairlane, *, settings: HttpSettings | None = None, extra: Iterable[Operations] = ()) -> FastAPI:
    """Create the HTTP service of an application, to serve it alone or to mount it in FastAPI or Starlette.

        web = create_app(app)                      # uvicorn module:web
        mine.mount("/queue", create_app(app))      # enter service_of(web).lifespan() in your own lifespan

    `extra` are operations of your own. They get the same access checks and documentation.
    """
    service = Service(app, settings or HttpSettings())

    @asynccontextmanager
    async def lifespan(_web: FastAPI) -> AsyncIterator[None]:
        async with service.lifespan():
            yield

    middleware = [Middleware(UnreadBodies, service.settings.batch_bytes)]
    if service.settings.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=service.settings.origins,
                allow_methods=["GET", "POST", "PUT", "DELETE"],
                allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"],
                expose_headers=["Location", "Retry-After"],
            )
        )
    web = _Web(
        title="Fairlane",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: _problem_page},
    )
    web.state.fairlane = service
    more = [each for operations in extra for each in operations.all]
    service.features = sorted({each.tag for each in more})
    add_operations(web, [*operations_of(service), *more])
    return web


def add_operations(web: FastAPI, operations: Iterable[Operation]) -> None:
    """Add operations to a service before it is served."""
    service = service_of(web)
    known: list[Operation] = getattr(web.state, "operations", [])
    added = [*operations]
    web.state.operations = [*known, *added]
    paths: dict[str, list[Operation]] = {}
    for operation in added:
        paths.setdefault(operation.path, []).append(operation)
    for path, those in paths.items():
        web.router.routes.append(Route(path, Endpoint(service, those), include_in_schema=False))
    web.openapi = partial(openapi_document, web.state.operations)  # type: ignore[method-assign]  # FastAPI documents this way


def service_of(web: FastAPI) -> Service:
    """The service of an application that `create_app` returned."""
    service = web.state.fairlane
    assert isinstance(service, Service)
    return service


class _Web(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in a middleware: FastAPI hides the server's `receive` from those, for requests if OpenTelemetry is in use.
        if scope["type"] == "lifespan":
            limit_connections(receive, service_of(self).settings)
        else:
            note_transport(scope, receive)
        await super().__call__(scope, receive, send)


class _ProblemPage:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._problem.answer()(scope, receive, send)


async def _problem_page(_request: object, exc: Exception) -> Any:
    """Turn an error of the framework, such as an unknown path, into a problem document."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    detail = "this path does not exist" if status == 404 else str(getattr(exc, "detail", "the request failed"))
    headers = tuple(
        (name.lower().encode(), value.encode()) for name, value in (getattr(exc, "headers", None) or {}).items()
    )
    return _ProblemPage(Problem(status, detail, headers=headers))
