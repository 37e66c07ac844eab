"""Live views of the system, of a queue and of a lane, as server-sent events.

Each event has everything, so a client that reconnects has missed nothing. A view is read once a second for all who
watch it, and only while somebody does.
"""

from __future__ import annotations

import msgspec

from ...model.names import check_key
from .. import streams
from ..access import Scope
from ..operation import Exchange, Operations, Response
from .queues import NAMED, found_queue, queue_name

operations = Operations("events")


@operations.add(
    *("GET", "/events", Scope.READ),
    timed=False,
    content="text/event-stream",
    shows='event: queues\ndata: {"store":"up","queues":[]}\n\n',
)
async def system_events(exchange: Exchange) -> Response:
    """Watch all queues and workers, as server-sent events.

    The first events are sent at once, others whenever something has changed, checked once a second. An event `queues`
    has every queue with its counts and with the jobs that arrived and ended per second, within the last 5 s; an event
    `workers` has the workers that are present, and the leader.
    """
    return streams.EventStream(exchange.service, exchange.caller, streams.system_events(exchange.service))


@operations.add(
    *("GET", "/queues/{queue}/events", Scope.READ),
    bound=True,
    timed=False,
    content="text/event-stream",
    shows='event: lanes\ndata: {"store":"up","queue":{},"lanes":[],"next":[]}\n\n',
    parameters=NAMED,
)
async def queue_events(exchange: Exchange) -> Response:
    """Watch a queue, as server-sent events.

    An event `lanes` has the queue with its settings, its 100 longest lanes, and the jobs that start next. `used` of a
    lane is the share of the queue's running time that it had within the last minute, or `measured_seconds`.
    """
    name = queue_name(exchange)
    exchange.caller.check_queue(name)
    await exchange.service.timed(found_queue(exchange))
    return streams.EventStream(exchange.service, exchange.caller, streams.lanes_events(exchange.service, name))


class LaneQuery(msgspec.Struct, frozen=True):
    """The lane. Without it: the jobs of the queue that have none."""

    lane: str | None = None


@operations.add(
    *("GET", "/queues/{queue}/line/events", Scope.READ),
    bound=True,
    timed=False,
    query=LaneQuery,
    content="text/event-stream",
    shows='event: line\ndata: {"store":"up","queue":"default","lane":"user:ann","jobs":[],"head":null}\n\n',
    parameters=NAMED | {"lane": "user:ann"},
)
async def line_events(exchange: Exchange) -> Response:
    """Watch the line of a lane, as server-sent events.

    An event `line` has the first 50 running and the first 50 waiting jobs, how many there are of both, estimates of
    when they start, and what the first of them waits for.
    """
    name, lane = queue_name(exchange), exchange.query(LaneQuery).lane
    if lane is not None:
        check_key("lane", lane)
    exchange.caller.check(name, lane)
    await exchange.service.timed(found_queue(exchange))
    return streams.EventStream(exchange.service, exchange.caller, streams.line_events(exchange.service, name, lane))
