"""Queues and lanes: their jobs, and the overrides of their settings."""

from __future__ import annotations

from typing import Any

import msgspec

from ...documents import lane_record, queue_record
from ...model.lanes import terms
from ...model.names import check_key, check_name
from ...model.reading import QueueReading
from .. import audit, shapes, view_shapes
from ..access import Scope
from ..answers import Answer, json_answer
from ..live_views import MOST_LANES, one_queue, queue_detail
from ..next_up import next_up
from ..operation import Declare, Exchange, Operations
from .jobs import clamped

operations = Operations("queues")
COUNTS = {"scheduled": 0, "pending": 2, "running": 1, "completed": 40, "failed": 1, "cancelled": 0}
QUEUE = {
    "name": "default",
    **COUNTS,
    "workers": 1,
    "oldest_wait": 3.5,
    "paused": False,
    "limit": None,
    "max_pending": None,
    "overridden": False,
    "classes": {"high": COUNTS, "normal": COUNTS, "low": COUNTS},
}
DETAIL: dict[str, Any] = QUEUE | {"declared": {}, "override": None, "lanes": []}
LANE = {
    "queue": "default",
    "lane": "user:ann",
    "pending": 2,
    "running": 1,
    "exact": True,
    "oldest_wait": 12.5,
    "share": 0.5,
    "limit": 1,
    "weight": 1.0,
    "ordered": True,
    "max_pending": None,
    "paused": False,
    "own_limit": 1,
}
LINE = {
    "queue": "default",
    "lane": "user:ann",
    "ordered": True,
    "cursor": None,
    "exact": True,
    "jobs": [
        {
            "id": "01hzy3v9k7e8m4q2n6p5r1s0t0",
            "task": "shop.render",
            "state": "pending",
            "priority": "normal",
            "enqueued_at": 1_790_000_000.0,
            "attempt": 0,
            "started_at": None,
            "place": 1,
        }
    ],
}
NEXT = {
    "id": "01hzy3v9k7e8m4q2n6p5r1s0t0",
    "task": "shop.render",
    "lane": "user:ann",
    "priority": "normal",
    "enqueued_at": 1_790_000_000.0,
    "why": "next in line; all slots are busy",
    "eta": 1.5,
    "ahead": 0,
}
NAMED = {"queue": "default"}


@operations.add("GET", "/queues", Scope.READ, bound=True, answer=shapes.Queues, shows={"queues": [QUEUE]})
async def list_queues(exchange: Exchange) -> Answer:
    """List the queues with their jobs by state."""
    if exchange.caller.lane_prefix is not None:
        return json_answer({"queues": []})
    queues = [each for each in await exchange.client.queues() if exchange.caller.covers_queue(each.name)]
    return json_answer({"queues": [queue_record(queue) for queue in queues]})


async def found_queue(exchange: Exchange) -> QueueReading:
    """The queue of the path, with its counts."""
    return await one_queue(exchange.service, queue_name(exchange))


def queue_name(exchange: Exchange) -> str:
    """The queue of the path."""
    return check_name("queue", exchange.path("queue"))


@operations.add(
    *("GET", "/queues/{queue}", Scope.READ), bound=True, answer=shapes.QueueDetail, shows=DETAIL, parameters=NAMED
)
async def get_queue(exchange: Exchange) -> Answer:
    """Get a queue with its counts, its declared settings and their override."""
    exchange.caller.check_queue(queue_name(exchange))
    return json_answer(queue_detail(await found_queue(exchange)))


class LaneQuery(msgspec.Struct, frozen=True):
    """The page of lanes to return."""

    limit: int = 100
    cursor: str | None = None


@operations.add(
    *("GET", "/queues/{queue}/lanes", Scope.READ),
    bound=True,
    query=LaneQuery,
    answer=shapes.Lanes,
    shows={"lanes": [LANE], "cursor": None},
    parameters=NAMED,
)
async def list_lanes(exchange: Exchange) -> Answer:
    """List the lanes of a queue that have jobs, longest backlog first."""
    query, name = exchange.query(LaneQuery), queue_name(exchange)
    exchange.caller.check_queue(name)
    lanes = await exchange.client.lanes(name, limit=clamped(query.limit), cursor=query.cursor)
    return json_answer({"lanes": [lane_record(lane) for lane in lanes], "cursor": lanes.cursor})


@operations.add(
    *("GET", "/queues/{queue}/next", Scope.READ),
    bound=True,
    answer=view_shapes.NextJobs,
    shows={"jobs": [NEXT]},
    parameters=NAMED,
)
async def list_next(exchange: Exchange) -> Answer:
    """List the jobs of a queue that start next, in the estimated order."""
    name = queue_name(exchange)
    exchange.caller.check_queue(name)
    lanes = await exchange.client.lanes(name, limit=MOST_LANES)
    return json_answer({"jobs": await next_up(await exchange.service.app.connection.store(), name, lanes)})


class LineQuery(msgspec.Struct, frozen=True):
    """The lane and the page. Without a lane: the jobs of the queue that have none."""

    lane: str | None = None
    limit: int = 50
    cursor: str | None = None


@operations.add(
    *("GET", "/queues/{queue}/line", Scope.READ),
    bound=True,
    query=LineQuery,
    answer=shapes.Line,
    shows=LINE,
    parameters=NAMED | {"lane": "user:ann"},
)
async def lane_line(exchange: Exchange) -> Answer:
    """List the jobs of a lane in their order: running jobs, then waiting jobs by place."""
    query, name = exchange.query(LineQuery), queue_name(exchange)
    if query.lane is not None:
        check_key("lane", query.lane)
    exchange.caller.check(name, query.lane)
    page = await exchange.client.lane_line(name, query.lane, limit=clamped(query.limit), cursor=query.cursor)
    jobs = [msgspec.to_builtins(job) | {"priority": job.priority.label} for job in page.jobs]
    return json_answer(msgspec.to_builtins(page) | {"jobs": jobs})


class LaneName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lane of the queue, or the whole queue without it."""

    lane: str | None = None


class LimitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many jobs may run at once; null for no limit."""

    limit: int | None
    lane: str | None = None


def _change(method: str, verb: str, body: Any = LaneName, example: Any = None) -> Declare:
    return operations.add(
        *(method, f"/queues/{{queue}}/{verb}", Scope.OPERATE),
        bound=True,
        body=body,
        body_optional=body is LaneName,
        answer=shapes.QueueDetail,
        lane_answer=shapes.SteeredLane,
        example={"lane": "user:ann"} if example is None else example,
        shows=DETAIL,
        parameters=NAMED,
    )


async def _changed(exchange: Exchange, action: str, **target: Any) -> Answer:
    name, lane = queue_name(exchange), target.get("lane")
    audit.record(exchange, action, queue=name, **target)
    queue = await found_queue(exchange)
    if exchange.caller.lane_prefix is not None:
        # The counts and the rules of the queue are about the lanes of others too.
        return json_answer({"queue": name, "lane": lane} | msgspec.to_builtins(terms(queue.settings, lane)))
    return json_answer(queue_detail(queue))


def _lane(exchange: Exchange, lane: str | None) -> tuple[str, str | None]:
    """The queue and the lane to change, checked against the caller's bounds."""
    name = queue_name(exchange)
    if lane is None:
        exchange.caller.check_queue(name)
    else:
        exchange.caller.check(name, check_key("lane", lane))
    return name, lane


@_change("POST", "pause")
async def pause_queue(exchange: Exchange) -> Answer:
    """Start no more jobs of a queue or of one lane. Running jobs continue."""
    name, lane = _lane(exchange, exchange.content.lane)
    await exchange.client.pause(name, lane)
    return await _changed(exchange, "pause", lane=lane)


@_change("POST", "resume")
async def resume_queue(exchange: Exchange) -> Answer:
    """Resume a paused queue or lane."""
    name, lane = _lane(exchange, exchange.content.lane)
    await exchange.client.resume(name, lane)
    return await _changed(exchange, "resume", lane=lane)


@_change("PUT", "limit", LimitRequest, {"limit": 2, "lane": "user:ann"})
async def set_limit(exchange: Exchange) -> Answer:
    """Override how many jobs of a queue or of one lane may run at once."""
    request: LimitRequest = exchange.content
    name, lane = _lane(exchange, request.lane)
    await exchange.client.set_limit(name, request.limit, lane=lane)
    return await _changed(exchange, "set_limit", lane=lane, limit=request.limit)


@_change("POST", "clear-limit")
async def clear_limit(exchange: Exchange) -> Answer:
    """Remove the override of a limit; the declared limit applies again."""
    name, lane = _lane(exchange, exchange.content.lane)
    await exchange.client.clear_limit(name, lane=lane)
    return await _changed(exchange, "clear_limit", lane=lane)


@operations.add(
    *("DELETE", "/queues/{queue}/override", Scope.OPERATE),
    bound=True,
    answer=shapes.QueueDetail,
    shows=DETAIL,
    parameters=NAMED,
)
async def clear_override(exchange: Exchange) -> Answer:
    """Remove every pause and limit override of a queue and its lanes; the declared settings apply again."""
    name = queue_name(exchange)
    exchange.caller.check_queue(name)
    await exchange.client.clear_override(name)
    return await _changed(exchange, "clear_override")
