"""Jobs: send, list, get, wait for the result, watch, cancel, retry."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import msgspec

from ...documents import listed_job
from ...errors import Conflict
from ...handle import find_job, unknown_job
from ...model.job import WAITING_STATES, Job, JobState
from ...model.reading import MOST_PER_PAGE
from ...runtime.job_watcher import Watch
from ...store.port import Store
from .. import audit, shapes, streams, views
from ..access import Scope
from ..answers import Answer, json_answer
from ..operation import Exchange, Operations, Response, check_id
from ..problems import Problem
from ..requests import JobRequest, idempotent_id

operations = Operations("jobs")
REQUEST = {"task": "shop.render", "args": ["ann"], "kwargs": {"size": 2}, "options": {"lane": "user:ann"}}
ID = "01hzy3v9k7e8m4q2n6p5r1s0t0"
SENT = {"id": ID, "created": True, "state": "pending"}
KEY = {
    "Idempotency-Key": "The same key and content create no second job; the same key with other content is a conflict."
}
OUTCOME = {
    "id": ID,
    "state": "completed",
    "final": True,
    "reason": None,
    "result": "ann.png",
    "error": None,
    "progress": None,
}


EVENT = f"""event: position
id: 5f1c6a1b0c9d2e3f
data: {{"id":"{ID}","state":"pending","position":{{"place":2,"of":5,"ahead":1}},"eta":12.5,"progress":null}}

"""


@operations.add(
    *("POST", "/jobs", Scope.ENQUEUE),
    bound=True,
    body=JobRequest,
    answer=shapes.Sent,
    status=202,
    headers=KEY,
    example=REQUEST,
    shows=SENT,
)
async def send_job(exchange: Exchange) -> Answer:
    """Send a job."""
    request: JobRequest = exchange.content
    caller = exchange.caller
    call = request.call(exchange.service, caller, idempotent_id(caller, exchange.header("idempotency-key")))
    try:
        [answer] = await exchange.client.send((call.job,))
    except Conflict:
        if exchange.header("idempotency-key") is None:
            raise
        raise Problem(409, "this Idempotency-Key was sent before with other content; use another key") from None
    if caller.bound:
        await check_own(exchange, call.job.id, answer.id)
    location = exchange.url(f"/jobs/{quote(answer.id, safe='')}").encode()
    return json_answer(answer, 202, ((b"location", location),))


async def check_own(exchange: Exchange, sent: str, found: str) -> None:
    """Reject a job whose unique value belongs to a job that the caller may not see."""
    if found != sent:
        taken = Problem(409, "another job has this unique value", field="options.unique")
        await visible_job(exchange, found, hidden=taken)


class JobQuery(msgspec.Struct, frozen=True):
    """Filters of a list of jobs."""

    state: JobState | None = None
    queue: str | None = None
    lane: str | None = None
    task: str | None = None
    sticky: str | None = None
    worker: str | None = None
    error_group: str | None = None
    limit: int = 50
    cursor: str | None = None


LISTED = {
    "id": ID,
    "task": "shop.render",
    "queue": "default",
    "lane": "user:ann",
    "priority": "normal",
    "kind": "job",
    "state": "pending",
    "reason": None,
    "attempt": 0,
    "retries": 3,
    "worker": None,
    "sticky": None,
    "enqueued_at": 1_790_000_000.0,
    "due_at": None,
    "expires_at": None,
    "started_at": None,
    "finished_at": None,
    "cancel_requested": False,
    "error": None,
    "error_group": None,
    "retry_of": None,
    "parent": None,
}
POSITION = {"place": 2, "of": 5, "ahead": 1, "exact": True, "eta": 12.5, "queue_ahead": 3, "of_exact": True}
WHOLE = {
    **LISTED,
    "payload": [["ann"], {"size": 2}],
    "progress": None,
    "result": None,
    "fence": 0,
    "arrival": 17,
    "unique": None,
    "pool": "default",
    "direct": None,
    "cost": 1.0,
    "timeout": None,
    "suspect": False,
    "attempts": [],
    "position": POSITION,
    "eta": 12.5,
    "why": "1 ahead in lane user:ann",
}


@operations.add(
    *("GET", "/jobs", Scope.READ),
    bound=True,
    query=JobQuery,
    answer=shapes.JobPage,
    shows={"jobs": [LISTED], "cursor": None},
    parameters={"state": "pending", "limit": 50},
)
async def list_jobs(exchange: Exchange) -> Answer:
    """List jobs, newest first."""
    query = exchange.query(JobQuery)
    if exchange.caller.bound:
        check_selection(exchange, query.queue, query.lane)
    page = await exchange.client.find(
        state=query.state,
        queue=query.queue,
        lane=query.lane,
        task=query.task,
        sticky=query.sticky,
        worker=query.worker,
        error_group=query.error_group,
        limit=clamped(query.limit),
        cursor=query.cursor,
    )
    return json_answer({"jobs": [listed_job(job) for job in page.jobs], "cursor": page.cursor})


def check_selection(exchange: Exchange, queue: str | None, lane: str | None) -> None:
    """Check that a bound token selects within its bounds."""
    if queue is None:
        own = (
            "name a queue and one of its lanes" if exchange.caller.lane_prefix is not None else "name one of its queues"
        )
        raise Problem(403, f"this token sees only a part of the jobs: {own}", field="queue")
    if lane is None:
        exchange.caller.check_queue(queue)
    else:
        exchange.caller.check(queue, lane)


def clamped(limit: int, most: int = MOST_PER_PAGE) -> int:
    """The length of a page, reduced to the maximum."""
    if limit < 1:
        raise Problem(422, "must be 1 or more", field="limit")
    return min(limit, most)


async def visible_job(exchange: Exchange, id: str, *, hidden: Problem | None = None) -> Job:
    """Find a job. One that the caller may not see is reported in the words for a missing one."""
    store = await exchange.service.app.connection.store()
    job = await find_job(store, check_id(id))
    if exchange.caller.bound and not exchange.caller.sees(job):
        raise hidden or unknown_job(id)
    return job


# Paths with a suffix after the id come first, because an id may contain slashes.


class ResultQuery(msgspec.Struct, frozen=True):
    """How long to wait for the job to end, in seconds."""

    wait: float = 0.0


@operations.add(
    *("GET", "/jobs/{id:path}/result", Scope.READ),
    bound=True,
    timed=False,
    query=ResultQuery,
    answer=shapes.Outcome,
    also={202: "The job has not ended within `wait` seconds."},
    shows=OUTCOME,
    parameters={"id": ID, "wait": 0},
)
async def job_result(exchange: Exchange) -> Answer:
    """Wait for a job to end, and return its result or error."""
    query = exchange.query(ResultQuery)
    if not query.wait >= 0:
        raise Problem(422, "must be 0 or more seconds", field="wait")
    service = exchange.service
    job = await service.timed(visible_job(exchange, exchange.path("id")))
    if not job.state.final and query.wait:
        with service.stream(exchange.caller):
            job = await _ended(exchange, job, min(query.wait, service.settings.longest_wait))
            if not await service.access.holds(exchange.caller):
                raise Problem(401, "the token was revoked or expired in the meantime")
    return json_answer(views.outcome_view(job), 200 if job.state.final else 202)


async def _ended(exchange: Exchange, job: Job, seconds: float) -> Job:
    """The job once it has ended, or its state after `seconds` or when the service stops."""
    async with Watch(exchange.service.app.connection, job.id) as watch:

        async def end() -> Job:
            nonlocal job
            while not job.state.final:
                job = (await watch.snapshot()).job or job
            return job

        tasks: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(work) for work in (end(), exchange.service.stopped(), _gone(exchange))
        ]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return job


async def _gone(exchange: Exchange) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        pass


@operations.add(
    *("GET", "/jobs/{id:path}/events", Scope.READ),
    bound=True,
    timed=False,
    content="text/event-stream",
    headers={
        "Last-Event-ID": "The id of the last event received; the response is 204 if that event had the final state."
    },
    also={204: "The client has already received the final state."},
    shows=EVENT,
    parameters={"id": ID},
)
async def job_events(exchange: Exchange) -> Response:
    """Watch a job: place in line, estimate, progress and state, as server-sent events.

    The first event has the current state, regardless of `Last-Event-ID`. The last event has the final state, with the
    result or the error. Events are named `state`, `position` and `progress`, and each has all fields.
    """
    service = exchange.service
    job = await service.timed(visible_job(exchange, exchange.path("id")))
    if job.state.final and (exchange.header("last-event-id") or "").startswith(streams.FINAL):
        return Answer(b"", 204)
    return streams.EventStream(service, exchange.caller, streams.job_events(service, job))


@operations.add(
    *("GET", "/jobs/{id:path}/copies", Scope.READ),
    answer=shapes.JobPage,
    shows={"jobs": [LISTED], "cursor": None},
    parameters={"id": ID},
)
async def job_copies(exchange: Exchange) -> Answer:
    """List the copies of a broadcast; empty for any other job."""
    jobs = await exchange.client.children(check_id(exchange.path("id")))
    return json_answer({"jobs": [listed_job(job) for job in jobs], "cursor": None})


@operations.add(
    *("POST", "/jobs/{id:path}/cancel", Scope.OPERATE),
    bound=True,
    answer=shapes.Cancelled,
    shows={"id": ID, "answer": "cancelled"},
    parameters={"id": ID},
)
async def cancel_job(exchange: Exchange) -> Answer:
    """Cancel a job. A waiting job ends at once; a running job is asked to stop."""
    job = await visible_job(exchange, exchange.path("id"))
    [answer] = await exchange.client.cancel([job.id])
    audit.record(exchange, "cancel", id=job.id, answer=answer.value)
    return json_answer({"id": job.id, "answer": answer.value})


@operations.add(
    *("POST", "/jobs/{id:path}/retry", Scope.OPERATE),
    bound=True,
    answer=shapes.Retried,
    status=202,
    shows={"id": "01hzy3v9k7e8m4q2n6p5r1s0t1", "retry_of": ID},
    parameters={"id": ID},
)
async def retry_job(exchange: Exchange) -> Answer:
    """Run an ended job again, as a new job."""
    job = await visible_job(exchange, exchange.path("id"))
    if not job.state.final:
        raise Problem(409, f"the job is {job.state.value}; only a job that has ended can be retried", field="id")
    again = await exchange.client.retry(job.id)
    audit.record(exchange, "retry", id=job.id, retried_as=again.id)
    location = exchange.url(f"/jobs/{quote(again.id, safe='')}").encode()
    return json_answer({"id": again.id, "retry_of": job.id}, 202, ((b"location", location),))


@operations.add(
    "GET", "/jobs/{id:path}", Scope.READ, bound=True, answer=shapes.JobView, shows=WHOLE, parameters={"id": ID}
)
async def get_job(exchange: Exchange) -> Answer:
    """Get a job: state, attempts, place in line, why it waits, progress, result or error."""
    store: Store = await exchange.service.app.connection.store()
    job = await visible_job(exchange, exchange.path("id"))
    position = None
    if job.state in WAITING_STATES:
        [position] = await store.positions([job.id])
        if position is None:
            job = await find_job(store, job.id)
    return json_answer(views.job_view(job, position))
