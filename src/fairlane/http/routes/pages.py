"""The dashboard: a page for people, and its files."""

from __future__ import annotations

from ...errors import NotSupported
from ..access import Scope
from ..operation import Exchange, Operations, Response
from ..pages import PageAnswer, page_files
from ..problems import Problem

operations = Operations("dashboard")


@operations.add("GET", "/", Scope.PUBLIC, bound=True, content="text/html", shows="<!doctype html>")
async def dashboard(exchange: Exchange) -> Response:
    """The dashboard, a page for people. It contains no data: it reads the API with the rights of its visitor."""
    page = page_files().get("index.html")
    if page is None:
        raise NotSupported("the dashboard is not built; run `make dashboard` in the repository")
    return PageAnswer(page, changes=True)


@operations.add(
    *("GET", "/assets/{file}", Scope.PUBLIC),
    bound=True,
    content="text/javascript",
    shows="",
    parameters={"file": "index.js"},
)
async def dashboard_file(exchange: Exchange) -> Response:
    """A script or style of the dashboard."""
    found = page_files().get(f"assets/{exchange.path('file')}")
    if found is None:
        raise Problem(404, "this file is not part of the dashboard")
    return PageAnswer(found, changes=False)
