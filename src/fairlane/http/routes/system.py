"""The whole system: tasks, workers, bindings, schedules, failures, broadcasts, and the leader."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from ...client import Client
from ...documents import binding_record, leader_record, schedule_record, session_record
from ...errors import NotFound
from ...model.ids import new_id
from ...model.names import check_name
from ...model.schedule import job_from
from ...model.session import SessionKind, SessionState
from .. import audit, shapes
from ..access import Scope
from ..answers import Answer, json_answer
from ..history import FAILURES_FOR, NoQuery
from ..operation import Exchange, Operations
from ..requests import JobRequest
from ..views import task_view
from .jobs import ID, SENT, clamped

operations = Operations("system")
TASK = {
    "name": "shop.render",
    "queue": "default",
    "lane": "user:{user}",
    "priority": "normal",
    "retries": 3,
    "timeout": None,
    "schedule": None,
    "isolate": False,
    "signature": "(user: str) -> str",
    "arguments": {"type": "object", "properties": {"user": {"type": "string"}}, "required": ["user"]},
    "result": {"type": "string"},
}


@operations.add("GET", "/tasks", Scope.READ, bound=True, answer=shapes.Tasks, shows={"tasks": [TASK]})
async def list_tasks(exchange: Exchange) -> Answer:
    """List the tasks of the application with the JSON Schemas of their arguments and results."""
    exchange.service.app.load_tasks()
    tasks = sorted(exchange.service.app.registry, key=lambda task: task.name)
    return json_answer({"tasks": [task_view(task) for task in tasks]})


WORKER = {
    "id": ID,
    "kind": "worker",
    "state": "live",
    "host": "a",
    "pid": 7,
    "pool": "default",
    "index": 0,
    "named": False,
    "queues": ["default"],
    "slots": None,
    "started_at": 1_790_000_000.0,
    "lease": 15.0,
    "remaining": 12.0,
    "running": 1,
    "worker": "default/0",
    "classes": {"high": 0, "normal": 1, "low": 0},
}


class WorkerQuery(msgspec.Struct, frozen=True):
    """Filters of a list of sessions."""

    kind: SessionKind | None = None
    state: SessionState | None = None


@operations.add(
    *("GET", "/workers", Scope.READ),
    query=WorkerQuery,
    answer=shapes.Workers,
    shows={"workers": [WORKER]},
    parameters={"kind": "worker", "state": "live"},
)
async def list_workers(exchange: Exchange) -> Answer:
    """List the sessions in the store: workers, managers, and processes that wait for a turn."""
    query = exchange.query(WorkerQuery)
    found = [
        session_record(session)
        for session in await exchange.client.sessions()
        if query.kind in (None, session.kind) and query.state in (None, session.state)
    ]
    return json_answer({"workers": found})


BINDING = {
    "pool": "default",
    "key": "session:7",
    "index": 0,
    "state": "open",
    "opened_at": 1_790_000_000.0,
    "used_at": 1_790_000_000.0,
    "closed_at": None,
    "cleanup": None,
    "cleanup_failed": False,
}


class BindingQuery(msgspec.Struct, frozen=True):
    """Filters of a list of bindings."""

    pool: str | None = None
    key: str | None = None
    limit: int = 100


@operations.add(
    *("GET", "/bindings", Scope.READ),
    query=BindingQuery,
    answer=shapes.Bindings,
    shows={"bindings": [BINDING]},
    parameters={"pool": "default"},
)
async def list_bindings(exchange: Exchange) -> Answer:
    """List the sticky keys and their workers, open bindings first."""
    query = exchange.query(BindingQuery)
    return await exchange.service.shared.get(query, partial(_bindings, exchange.client, query, clamped(query.limit)))


async def _bindings(client: Client, query: BindingQuery, limit: int) -> Answer:
    found = await client.bindings(query.pool, query.key, limit=limit)
    return json_answer({"bindings": [binding_record(binding) for binding in found]})


class ReleaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sticky key to release."""

    key: str
    pool: str = "default"
    cleanup: JobRequest | None = None
    """A task that runs last, alone, on the key's worker."""


@operations.add(
    *("POST", "/bindings:release", Scope.OPERATE),
    body=ReleaseRequest,
    answer=shapes.Released,
    example={"key": "session:7"},
    shows={"key": "session:7", "pool": "default", "answer": "released"},
)
async def release_binding(exchange: Exchange) -> Answer:
    """Release a sticky key from its worker once its jobs have ended."""
    request: ReleaseRequest = exchange.content
    cleanup = None if request.cleanup is None else request.cleanup.call(exchange.service, exchange.caller)
    answer = await exchange.client.release(request.key, cleanup=cleanup, pool=request.pool)
    audit.record(exchange, "release", key=request.key, pool=request.pool, answer=answer.value)
    return json_answer({"key": request.key, "pool": request.pool, "answer": answer.value})


SCHEDULE = {
    "name": "shop.report",
    "timetable": {"cron": "0 4 * * *"},
    "next": 1_790_000_000.0,
    "last": None,
    "stored_at": 1_789_000_000.0,
    "declared_at": 1_789_990_000.0,
    "live": True,
    "stopped": False,
    "last_job": None,
}


@operations.add("GET", "/schedules", Scope.READ, answer=shapes.Schedules, shows={"schedules": [SCHEDULE]})
async def list_schedules(exchange: Exchange) -> Answer:
    """List the schedules: timetable, next and last run, and whether a live worker declares them."""
    return await exchange.service.shared.get(NoQuery("schedules"), partial(_schedules, exchange.client))


async def _schedules(client: Client) -> Answer:
    schedules = await client.schedules()
    sessions = await client.sessions()
    served = any(s.kind is SessionKind.WORKER and s.state is SessionState.LIVE for s in sessions)
    now = time.time()
    return json_answer({"schedules": [schedule_record(each, served, now) for each in schedules]})


@operations.add(
    *("POST", "/schedules/{name}/run", Scope.OPERATE),
    answer=shapes.Sent,
    status=202,
    shows=SENT,
    parameters={"name": "shop.report"},
)
async def run_schedule(exchange: Exchange) -> Answer:
    """Send the job of a schedule now. Its timetable does not change."""
    name = check_name("name", exchange.path("name"))
    for each in await exchange.client.schedules():
        if each.schedule.name == name:
            job = job_from(each.schedule.job, name, each.now)
            # Without the slot: the slots of the timetable fire all the same.
            [answer] = await exchange.client.send([msgspec.structs.replace(job, id=new_id(), cron=None)])
            audit.record(exchange, "run_schedule", name=name, id=answer.id)
            location = exchange.url(f"/jobs/{quote(answer.id, safe='')}").encode()
            return json_answer(answer, 202, ((b"location", location),))
    raise NotFound(f"there is no schedule {name!r}; a worker declares the schedules of its tasks when it starts")


FAILURE = {
    "task": "shop.render",
    "error_group": "ValueError",
    "count": 12,
    "first_at": 1_790_000_000.0,
    "last_at": 1_790_000_600.0,
    "reason": "error",
    "example_id": ID,
    "error_line": "ValueError: no",
    "exact": True,
}


class FailureQuery(msgspec.Struct, frozen=True):
    """Filters of the failures."""

    queue: str | None = None
    task: str | None = None
    limit: int = 50


@operations.add(
    *("GET", "/failures", Scope.READ),
    query=FailureQuery,
    answer=shapes.Failures,
    shows={"failures": [FAILURE]},
    parameters={"queue": "default"},
)
async def list_failures(exchange: Exchange) -> Answer:
    """List failed jobs grouped by task and error, largest group first."""
    query = exchange.query(FailureQuery)
    read = partial(_failures, exchange.client, query, clamped(query.limit))
    return await exchange.service.shared.get(query, read, FAILURES_FOR)


async def _failures(client: Client, query: FailureQuery, limit: int) -> Answer:
    groups = await client.failures(queue=query.queue, task=query.task, limit=limit)
    return json_answer({"failures": groups})


class BroadcastRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task to run once on every worker of a pool."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    pool: str = "default"
    ttl: float = 0.0
    """Workers that join within this many seconds run it too."""


@operations.add(
    *("POST", "/broadcasts", Scope.OPERATE),
    body=BroadcastRequest,
    answer=shapes.Sent,
    status=202,
    example={"task": "shop.reload", "ttl": 10},
    shows=SENT | {"state": "running"},
)
async def send_broadcast(exchange: Exchange) -> Answer:
    """Run a task once on every live worker of a pool."""
    request: BroadcastRequest = exchange.content
    call = JobRequest(request.task, request.args, request.kwargs).call(exchange.service, exchange.caller)
    handle = await exchange.client.broadcast(call, pool=request.pool, ttl=request.ttl)
    job = await handle.job()
    audit.record(exchange, "broadcast", id=handle.id, task=request.task, pool=request.pool)
    answer = {"id": handle.id, "created": handle.created, "state": job.state.value}
    return json_answer(answer, 202, ((b"location", exchange.url(f"/jobs/{handle.id}").encode()),))


LEADER = {"leader": {"term": 3, "session": ID, "lease": 15.0, "remaining": 9.5}}


@operations.add("GET", "/leader", Scope.READ, answer=shapes.Leader, shows=LEADER)
async def get_leader(exchange: Exchange) -> Answer:
    """Get the current leader."""
    return json_answer({"leader": leader_record(await exchange.client.leader())})
