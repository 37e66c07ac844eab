"""Changes of many jobs by a selection: cancel, retry, purge; with a dry run, and with progress line by line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from ...bulk import Bulk
from ...model.job import JobState
from .. import audit, shapes
from ..access import Scope
from ..answers import COMMON, NDJSON, json_answer
from ..operation import Declare, Exchange, Operations, Response
from ..problems import Problem, problem_of
from ..views import bulk_view
from .jobs import LISTED, check_selection

operations = Operations("jobs")
MOST = 10_000
"""Jobs that one request looks at, unless it says otherwise."""
SECONDS = 60.0
"""How long one request may take without progress lines. After that it says so; repeating it does the rest."""


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which jobs, and how. Ages are seconds since a job was sent."""

    state: JobState | None = None
    queue: str | None = None
    lane: str | None = None
    task: str | None = None
    sticky: str | None = None
    worker: str | None = None
    error_group: str | None = None
    older_than: float | None = None
    newer_than: float | None = None
    all: bool = False
    """Every job; must be said if nothing else selects."""
    dry_run: bool = False
    most: int = MOST

    def which(self, exchange: Exchange) -> dict[str, Any]:
        """The selection as the client takes it; within the caller's bounds."""
        found = {
            field: value
            for field in self.__struct_fields__
            if field not in ("all", "dry_run", "most") and (value := getattr(self, field)) is not None
        }
        if exchange.caller.bound:
            check_selection(exchange, self.queue, self.lane)
        if bool(found) == self.all:
            text = "does not go with a selection" if found else "select by queue, task, state …, or say all: true"
            raise Problem(422, text, field="all")
        return found


class Purge(Selection, frozen=True, forbid_unknown_fields=True):
    """The same for a purge."""

    cancel_waiting: bool = False
    """Also what waits: it is cancelled first."""


EXAMPLE = {"state": "failed", "queue": "default", "dry_run": True}
SHOWN = {
    "dry_run": True,
    "matched": 1,
    "changed": 0,
    "requested": 0,
    "unchanged": {},
    "refusal": None,
    "more": False,
    "jobs": [LISTED],
}
PROGRESS = {"Accept": "application/x-ndjson answers with a line after each page; the last line is the whole answer."}
Verb = Callable[..., Awaitable[Bulk]]


def _bulk(name: str, scope: Scope, body: type[Selection], bound: bool = True) -> Declare:
    return operations.add(
        *("POST", f"/jobs:{name}", scope),
        bound=bound,
        timed=False,
        body=body,
        answer=shapes.BulkView,
        headers=PROGRESS,
        example=EXAMPLE,
        shows=SHOWN,
    )


@_bulk("cancel", Scope.OPERATE, Selection)
async def cancel_jobs(exchange: Exchange) -> Response:
    """Cancel every job of a selection that has not ended."""
    return await _change(exchange, "cancel_all", exchange.client.cancel_all)


@_bulk("retry", Scope.OPERATE, Selection)
async def retry_jobs(exchange: Exchange) -> Response:
    """Run every job of a selection that has ended once more; failed ones unless `state` says otherwise."""
    return await _change(exchange, "retry_all", exchange.client.retry_all)


@_bulk("purge", Scope.ADMIN, Purge)
async def purge_jobs(exchange: Exchange) -> Response:
    """Forget every job of a selection that has ended, before its retention is over."""
    return await _change(exchange, "purge", exchange.client.purge)


async def _change(exchange: Exchange, action: str, verb: Verb) -> Response:
    asked: Selection = exchange.content
    options = asked.which(exchange) | {"dry_run": asked.dry_run, "most": asked.most}
    if not asked.dry_run:
        audit.record(exchange, action, **options)

    async def recorded(**options: Any) -> Bulk:
        told = await verb(**options)
        if not told.dry_run:
            # A record of its own: the one before is there even if this process dies on the way.
            counts = {"matched": told.matched, "changed": told.changed, "requested": told.requested}
            audit.record(exchange, f"{action} ended", **counts)
        return told

    if b"application/x-ndjson" in exchange.headers.get(b"accept", b""):
        return _Progress(exchange, recorded, options)
    async with asyncio.timeout(SECONDS):
        return json_answer(bulk_view(await recorded(**options)))


class _Progress:
    """A change whose progress is told line by line. It ends with the client: what is done stays done."""

    def __init__(self, exchange: Exchange, verb: Verb, options: dict[str, Any]) -> None:
        self._exchange = exchange
        self._verb = verb
        self._options = options

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        service = self._exchange.service
        with service.stream(self._exchange.caller):
            headers = [*COMMON, (b"content-type", NDJSON)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            news = asyncio.Event()
            latest: list[Bulk] = []

            def note(told: Bulk) -> None:
                latest[:] = [told]
                news.set()

            async def line(document: dict[str, Any]) -> None:
                async with asyncio.timeout(service.settings.slow_reader):
                    body = msgspec.json.encode(document) + b"\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})

            work = asyncio.ensure_future(self._verb(**self._options, progress=note))
            stopped = asyncio.ensure_future(service.stopped())
            try:
                while not work.done() and not stopped.done():
                    told = asyncio.ensure_future(news.wait())
                    await asyncio.wait([work, told, stopped], return_when=asyncio.FIRST_COMPLETED)
                    told.cancel()
                    news.clear()
                    if latest and not work.done():
                        await line(bulk_view(latest[0]) | {"done": False, "jobs": []})
                if work.done():
                    await line(_last(work))
            except TimeoutError:
                return
            finally:
                work.cancel()
                stopped.cancel()
                await asyncio.gather(work, stopped, return_exceptions=True)
            await send({"type": "http.response.body", "body": b""})


def _last(work: asyncio.Future[Bulk]) -> dict[str, Any]:
    try:
        return bulk_view(work.result()) | {"done": True}
    except Exception as exc:
        problem = problem_of(exc)
        if problem is None:
            raise
        return {"done": False, "problem": problem.document()}
