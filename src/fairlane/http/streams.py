"""Server-sent events of one job and of the whole system.

A stream keeps no history. It begins with the current state from the store, so a client that reconnects has the latest
state. Between two sends only the latest update is kept. A client that does not read is disconnected. Streams end when
the service stops.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ..errors import FairlaneError
from ..handle import Update, position_of
from ..model.job import Job
from ..model.reading import JobPosition
from ..runtime.job_watcher import Watch
from .access import Caller
from .answers import Parts
from .live_views import LanesView, LineView, QueuesView, WorkersView
from .problems import problem_of
from .service import Service
from .topics import Topic, merged
from .views import update_view

EVENT_STREAM = b"text/event-stream"
HEARTBEAT = b": alive\n\n"
RETRY = b"retry: 1000\n\n"
"""Milliseconds after which a browser reconnects."""
FINAL = "final-"
"""The prefix of the id of a job's last event: a client that reconnects with it has received the final state."""
_encoder = msgspec.json.Encoder()

Events = AsyncGenerator[bytes, None]


def event(kind: str, data: bytes, id: str | None = None) -> bytes:
    """Encode an event. `data` is JSON without line breaks."""
    head = f"event: {kind}\n" if id is None else f"event: {kind}\nid: {id}\n"
    return head.encode() + b"data: " + data + b"\n\n"


class EventStream:
    """Sends `events` until they end, the client disconnects, its token is revoked, or the service stops."""

    def __init__(self, service: Service, caller: Caller, events: Events) -> None:
        self._service = service
        self._caller = caller
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.stream(self._caller):
            parts = Parts(scope, send, self._service.settings.slow_reader)
            await parts.begin(EVENT_STREAM, [(b"x-accel-buffering", b"no")])
            await self._send_all(receive, parts)

    async def _send_all(self, receive: Receive, parts: Parts) -> None:
        settings = self._service.settings
        ends = [asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(self._service.stopped())]
        following: asyncio.Future[bytes] | None = None
        try:
            await parts.write(RETRY)
            following = asyncio.ensure_future(anext(self._events))
            while True:
                await asyncio.wait([following, *ends], timeout=settings.heartbeat, return_when=asyncio.FIRST_COMPLETED)
                if ends[0].done():
                    return
                if not await self._service.access.holds(self._caller):
                    break
                if following.done():
                    try:
                        part = following.result()
                    except StopAsyncIteration:
                        break
                    await parts.write(part)
                    following = asyncio.ensure_future(anext(self._events))
                elif ends[1].done():
                    break
                else:
                    await parts.write(HEARTBEAT)
            await parts.end()
        finally:
            tasks: list[asyncio.Future[Any]] = [*ends, *([following] if following is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def job_events(service: Service, job: Job) -> Events:
    """The events of a job. The first has the current state, the last one the final state."""
    last: Update | None = None
    last_run: tuple[int, bool] | None = None
    async with Watch(service.app.connection, job.id, places=True) as watch:
        while last is None or not last.state.final:
            try:
                look = await watch.snapshot()
            except FairlaneError as exc:
                yield _failed(exc)
                return
            if look.job is None:
                yield event("gone", b'{"id":' + _encoder.encode(job.id) + b"}", FINAL + "gone")
                return
            update = Update(look.job.state, position_of(look.position), look.job.progress)
            # A job may have ended a run and begun another one since the last look.
            run = (look.job.fence, look.job.cancel_requested)
            if run != last_run or not update.repeats(last):
                kind = "state" if run != last_run else _kind(update, last)
                last, last_run = update, run
                yield _job_event(kind, look.job, look.position)


def _kind(update: Update, last: Update | None) -> str:
    """The kind of an event: a new state, else new progress, else a new position."""
    if last is None or update.state is not last.state:
        return "state"
    return "progress" if update.progress != last.progress else "position"


def _job_event(kind: str, job: Job, position: JobPosition | None) -> bytes:
    data = _encoder.encode(update_view(job, position))
    name = hashlib.blake2b(data, digest_size=8).hexdigest()
    return event(kind, data, f"{FINAL}{name}" if job.state.final else name)


def _failed(exc: FairlaneError) -> bytes:
    """A problem event. The stream ends after it, so that the client reconnects and gets the current state."""
    problem = problem_of(exc)
    assert problem is not None
    return event("problem", _encoder.encode(problem.document()))


async def system_events(service: Service) -> Events:
    """The queues and the workers of the whole system, whenever they have changed."""

    def queues() -> Topic:
        return Topic(service, "queues", QueuesView(service), empty={"queues": []})

    def workers() -> Topic:
        return Topic(service, "workers", WorkersView(service), empty={"workers": [], "total": 0, "leader": None})

    async with (
        service.topics.listening(("queues",), queues) as first,
        service.topics.listening(("workers",), workers) as second,
        aclosing(merged(first, second)) as samples,
    ):
        async for topic, sample in samples:
            yield event(topic.kind, sample.data)


async def lanes_events(service: Service, queue: str) -> Events:
    """A queue with its longest lanes, whenever they have changed."""

    def lanes() -> Topic:
        empty: dict[str, Any] = {
            "queue": None,
            "lanes": [],
            "cursor": None,
            "exact": True,
            "next": [],
            "measured_seconds": 0,
        }
        return Topic(service, "lanes", LanesView(service, queue), empty=empty)

    async with service.topics.listening(("lanes", queue), lanes) as topic, aclosing(merged(topic)) as samples:
        async for _, sample in samples:
            yield event(topic.kind, sample.data)


async def line_events(service: Service, queue: str, lane: str | None) -> Events:
    """The line of a lane, whenever it has changed."""

    def line() -> Topic:
        empty: dict[str, Any] = {"queue": queue, "lane": lane, "jobs": [], "running": 0, "head": None}
        return Topic(service, "line", LineView(service, queue, lane), empty=empty)

    async with service.topics.listening(("line", queue, lane), line) as topic, aclosing(merged(topic)) as samples:
        async for _, sample in samples:
            yield event(topic.kind, sample.data)
