"""Bulk changes by selection: cancel, retry, purge; with a dry run, and with progress as lines."""

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
from ..answers import NDJSON, Parts, json_answer
from ..operation import Declare, Exchange, Operations, Response
from ..problems import Problem, problem_of
from ..views import bulk_view
from .jobs import LISTED, check_selection

operations = Operations("jobs")
MOST = 10_000
"""The default number of jobs that one request examines."""
SECONDS = 60.0
"""The time limit of a request without progress lines. What it has changed by then stays changed."""


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The jobs to change. Ages are seconds since a job was sent."""

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
    """Select every job. Required if no other field selects."""
    dry_run: bool = False
    most: int = MOST

    def which(self, exchange: Exchange) -> dict[str, Any]:
        """The arguments for the client, checked against the caller's bounds."""
        found = {
            field: value
            for field in self.__struct_fields__
            if field not in ("all", "dry_run", "most") and (value := getattr(self, field)) is not None
        }
        if exchange.caller.bound:
            check_selection(exchange, self.queue, self.lane)
        if bool(found) == self.all:
            text = (
                "cannot be combined with other selectors"
                if found
                else "select by queue, task, state, …, or set all to true"
            )
            raise Problem(422, text, field="all")
        return found


class Purge(Selection, frozen=True, forbid_unknown_fields=True):
    """The jobs to purge."""

    cancel_waiting: bool = False
    """Include waiting jobs: cancel them first."""


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
PROGRESS = {
    "Accept": "With application/x-ndjson the response has a line after each page; the last line is the full result."
}
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
    """Run every ended job of a selection again, as new jobs; failed jobs unless `state` selects others."""
    return await _change(exchange, "retry_all", exchange.client.retry_all)


@_bulk("purge", Scope.ADMIN, Purge)
async def purge_jobs(exchange: Exchange) -> Response:
    """Delete every ended job of a selection before its retention is over."""
    return await _change(exchange, "purge", exchange.client.purge)


async def _change(exchange: Exchange, action: str, verb: Verb) -> Response:
    selection: Selection = exchange.content
    options = selection.which(exchange) | {"dry_run": selection.dry_run, "most": selection.most}
    if not selection.dry_run:
        audit.record(exchange, action, **options)

    async def recorded(progress: Callable[[Bulk], None] | None = None, **options: Any) -> Bulk:
        latest: Bulk | None = None

        def note(result: Bulk) -> None:
            nonlocal latest
            latest = result
            if progress is not None:
                progress(result)

        try:
            latest = await verb(progress=note, **options)
        finally:
            # A second record: the first one exists even if this process dies in between. Also of a change that was
            # stopped, with what it had done.
            if latest is not None and not latest.dry_run:
                counts = {"matched": latest.matched, "changed": latest.changed, "requested": latest.requested}
                audit.record(exchange, f"{action} ended", **counts)
        return latest

    if b"application/x-ndjson" in exchange.headers.get(b"accept", b""):
        return _Progress(exchange, recorded, options)
    async with asyncio.timeout(SECONDS):
        return json_answer(bulk_view(await recorded(**options)))


class _Progress:
    """A bulk change with progress as lines. It stops when the client disconnects; completed changes stay."""

    def __init__(self, exchange: Exchange, verb: Verb, options: dict[str, Any]) -> None:
        self._exchange = exchange
        self._verb = verb
        self._options = options

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        service = self._exchange.service
        with service.stream(self._exchange.caller):
            parts = Parts(scope, send, service.settings.slow_reader)
            await parts.begin(NDJSON)
            news = asyncio.Event()
            latest: list[Bulk] = []

            def note(result: Bulk) -> None:
                latest[:] = [result]
                news.set()

            async def line(document: dict[str, Any]) -> None:
                await parts.write(msgspec.json.encode(document) + b"\n")

            work = asyncio.ensure_future(self._verb(**self._options, progress=note))
            stopped = asyncio.ensure_future(service.stopped())
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                while not work.done() and not stopped.done() and not gone.done():
                    update = asyncio.ensure_future(news.wait())
                    await asyncio.wait([work, update, stopped, gone], return_when=asyncio.FIRST_COMPLETED)
                    update.cancel()
                    news.clear()
                    if latest and not work.done():
                        await line(bulk_view(latest[0]) | {"done": False, "jobs": []})
                if work.done():
                    await line(_last(work))
            finally:
                work.cancel()
                stopped.cancel()
                gone.cancel()
                await asyncio.gather(work, stopped, gone, return_exceptions=True)
            await parts.end()


def _last(work: asyncio.Future[Bulk]) -> dict[str, Any]:
    try:
        return bulk_view(work.result()) | {"done": True}
    except Exception as exc:
        problem = problem_of(exc)
        if problem is None:
            raise
        return {"done": False, "problem": problem.document()}


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone. Sending to it afterwards raises nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass
