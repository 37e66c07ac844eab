"""What helps a person to understand the system: the last hour, a diagnosis, failures over time, and a search."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ...client import Client
from ...documents import binding_record, listed_job
from ...errors import FairlaneError
from ...model.job import Job, JobState
from ...model.names import check_key
from .. import view_shapes
from ..access import Scope
from ..answers import Answer, json_answer
from ..history import FAILURES_FOR, NoQuery
from ..operation import Exchange, Operations
from .jobs import ID, LISTED

if TYPE_CHECKING:
    from ..service import Service

operations = Operations("insight")
SPREAD = {"p50": 0.02, "p95": 0.4, "jobs": 100}
HISTORY = {
    "since": 1_790_000_000.0,
    "interval": 10.0,
    "at": [1_790_000_010.0],
    "completed": [12],
    "failed": [0],
    "cancelled": [0],
    "pending": [3],
    "running": [2],
    "waits": {"all": SPREAD, "high": SPREAD, "normal": SPREAD, "low": SPREAD},
}


class HistoryQuery(msgspec.Struct, frozen=True):
    """One queue, or all without it."""

    queue: str | None = None


@operations.add(
    *("GET", "/history", Scope.READ),
    query=HistoryQuery,
    answer=view_shapes.HistoryView,
    shows=HISTORY,
    parameters={"queue": "default"},
)
async def get_history(exchange: Exchange) -> Answer:
    """What ended in the last hour, and how long recent jobs waited for their start.

    The counts are kept in memory since the service was started, at most for an hour. The waits are those of the newest
    100 jobs of all queues and of 50 that run, as far as they have started once.
    """
    history = exchange.service.history
    query = exchange.query(HistoryQuery)
    return json_answer(history.document(query.queue) | {"waits": await history.waits.get()})


FINDING = {
    "level": "warn",
    "topic": "queues",
    "what": "images is paused, 12 jobs are waiting",
    "advice": "fairlane resume images",
}


@operations.add(
    *("GET", "/doctor", Scope.READ),
    timed=False,
    answer=view_shapes.Diagnosis,
    shows={"at": 1_790_000_000.0, "findings": [FINDING]},
)
async def get_diagnosis(exchange: Exchange) -> Answer:
    """What `fairlane doctor` finds, and what to do about it. At most a minute old."""
    return json_answer(await exchange.service.diagnosis.get())


COUNTERS = {"deadlocks": 0, "tokens_pushed": 8_412, "tokens_failed": 0, "redis_down": 0}


@operations.add("GET", "/counters", Scope.READ, answer=view_shapes.Counters, shows={"counters": COUNTERS})
async def get_counters(exchange: Exchange) -> Answer:
    """Counts that the servers of the store keep: deadlocks of PostgreSQL, and what became of tokens in Redis.

    Empty on a store that counts nothing.
    """
    return json_answer({"counters": await exchange.client.counters()})


TIMELINE = {
    "from": 1_790_000_000.0,
    "until": 1_790_000_600.0,
    "exact": True,
    "groups": [{"task": "shop.render", "error_group": "ValueError", "counts": [0, 2, 10]}],
}
BUCKETS = 40
FAILURES_EXAMINED = 300


@operations.add("GET", "/failures/timeline", Scope.READ, answer=view_shapes.FailureTimeline, shows=TIMELINE)
async def failure_timeline(exchange: Exchange) -> Answer:
    """Count the newest 300 failed jobs over time, for each task and error group."""
    return await exchange.service.shared.get(
        NoQuery("timeline"), partial(_read_timeline, exchange.client), FAILURES_FOR
    )


async def _read_timeline(client: Client) -> Answer:
    page = await client.find(state=JobState.FAILED, limit=FAILURES_EXAMINED)
    return json_answer(_timeline(page.jobs, exact=page.cursor is None))


def _timeline(jobs: tuple[Job, ...], *, exact: bool) -> dict[str, Any]:
    ends = [job.finished_at for job in jobs if job.finished_at is not None]
    now = time.time()
    first = min(ends, default=now)
    width = max(now - first, 60.0) / BUCKETS
    groups: dict[tuple[str, str], list[int]] = {}
    for job in jobs:
        if job.finished_at is not None:
            counts = groups.setdefault((job.task, job.error_group or ""), [0] * BUCKETS)
            counts[max(0, BUCKETS - 1 - int((now - job.finished_at) / width))] += 1
    return {
        "from": now - BUCKETS * width,
        "until": now,
        "exact": exact,
        "groups": [{"task": task, "error_group": group, "counts": counts} for (task, group), counts in groups.items()],
    }


MOST_QUEUES = 50
"""Queues in which a lane is searched."""
MOST_FOUND = 10
FOUND = {
    "jobs": [LISTED],
    "by": ["id"],
    "queues": ["default"],
    "lanes": [{"queue": "default", "lane": "user:ann"}],
    "tasks": ["shop.render"],
    "bindings": [],
    "complete": True,
}


class SearchQuery(msgspec.Struct, frozen=True):
    """The text to search for."""

    q: str


@operations.add(
    *("GET", "/search", Scope.READ), query=SearchQuery, answer=view_shapes.Found, shows=FOUND, parameters={"q": ID}
)
async def search(exchange: Exchange) -> Answer:
    """Find what has a name: a job by its id; jobs by task, lane, sticky key or worker; queues and tasks by a part.

    Ids, lanes, keys and workers are matched exactly. A lane is searched in the first 50 queues.
    """
    query = SearchQuery(check_key("q", exchange.query(SearchQuery).q.strip()))
    return await exchange.service.shared.get(query, partial(_search, exchange.service, query.q))


async def _search(service: Service, text: str) -> Answer:
    client = service.app.client
    jobs: dict[str, Job] = {}
    by: list[str] = []

    async def add(how: str, **where: Any) -> bool:
        try:
            found = (await client.find(limit=MOST_FOUND, **where)).jobs
        except FairlaneError as exc:
            if isinstance(exc, ValueError):  # the text is no name of this kind
                return False
            raise
        jobs.update((job.id, job) for job in found)
        by.extend([how] if found and how not in by else [])
        return bool(found)

    store = await service.app.connection.store()
    [exact] = await store.get([text])
    if exact is not None:
        jobs[exact.id] = exact
        by.append("id")
    await add("task", task=text)
    await add("sticky", sticky=text)
    await add("worker", worker=text)
    queues = [queue.name for queue in await client.queues()]
    lanes = [
        {"queue": queue, "lane": text} for queue in queues[:MOST_QUEUES] if await add("lane", queue=queue, lane=text)
    ]
    lowered = text.lower()
    service.app.load_tasks()
    names = sorted(task.name for task in service.app.registry)
    return json_answer(
        {
            "jobs": [listed_job(job) for job in jobs.values()],
            "by": by,
            "queues": [name for name in queues if lowered in name.lower()][:MOST_FOUND],
            "lanes": lanes,
            "tasks": [name for name in names if lowered in name.lower()][:MOST_FOUND],
            "bindings": [binding_record(each) for each in await client.bindings(None, text, limit=MOST_FOUND)],
            "complete": len(queues) <= MOST_QUEUES,
        }
    )
