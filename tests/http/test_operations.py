"""Queues, lanes, workers, bindings, schedules, bulk changes, broadcasts, batches, health and metrics over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from fairlane import Fairlane
from fairlane.http import shapes

from .conftest import API, burst
from .test_jobs import is_problem, send


def fits(shape: Any, document: Any) -> bool:
    """Whether a document has exactly the keys and types that OpenAPI promises."""
    msgspec.convert(document, shape)
    assert msgspec.to_builtins(msgspec.convert(document, shape)).keys() == document.keys()
    return True


async def test_queues_are_read_and_steered(
    http: httpx.AsyncClient, app: Fairlane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fairlane.audit")
    await send(http, "render", "ann")
    queues = (await http.get(f"{API}/queues")).json()
    assert fits(shapes.Queues, queues)
    assert {queue["name"] for queue in queues["queues"]} >= {"default", "small", "pictures"}
    paused = await http.post(f"{API}/queues/default/pause")
    assert fits(shapes.QueueDetail, paused.json())
    assert paused.json()["paused"]
    [reading] = [queue for queue in await app.client.queues() if queue.name == "default"]
    assert reading.settings.paused
    assert not (await http.post(f"{API}/queues/default/resume", json={})).json()["paused"]
    limited = (await http.put(f"{API}/queues/default/limit", json={"limit": 1, "lane": "user:ann"})).json()
    assert limited["lanes"][0]["limit"] == 1
    lanes = (await http.get(f"{API}/queues/default/lanes")).json()
    assert fits(shapes.Lanes, lanes)
    assert [(lane["lane"], lane["limit"]) for lane in lanes["lanes"]] == [("user:ann", 1)]
    assert lanes["lanes"][0]["oldest_wait"] >= 0
    assert lanes["lanes"][0]["share"] == 1
    assert lanes["cursor"] is None
    assert (await http.post(f"{API}/queues/default/pause", json={"lane": "user:ann"})).status_code == 200
    assert (await http.delete(f"{API}/queues/default/override")).json()["override"] is None
    assert is_problem(await http.put(f"{API}/queues/default/limit", json={"limit": 0}), 422, "limit")
    assert is_problem(await http.put(f"{API}/queues/default/limit", json={}), 422, "limit")
    assert is_problem(await http.post(f"{API}/queues/none/pause"), 404)
    assert is_problem(await http.get(f"{API}/queues/none"), 404)
    actions = [record.audit["action"] for record in caplog.records if hasattr(record, "audit")]
    assert actions == ["pause", "resume", "set_limit", "pause", "clear_override"]
    assert {record.audit["caller"] for record in caplog.records if hasattr(record, "audit")} == {"local"}


async def test_the_line_of_a_lane_is_in_order(http: httpx.AsyncClient) -> None:
    ids = [await send(http, "add", n, queue="pictures", lane="model:a") for n in range(3)]
    line = (await http.get(f"{API}/queues/pictures/line", params={"lane": "model:a", "limit": 2})).json()
    assert fits(shapes.Line, line)
    more = {"lane": "model:a", "limit": 2, "cursor": line["cursor"]}
    rest = (await http.get(f"{API}/queues/pictures/line", params=more)).json()
    assert [(job["id"], job["place"]) for job in line["jobs"] + rest["jobs"]] == list(zip(ids, (1, 2, 3), strict=True))


async def test_jobs_and_tasks_have_the_shape_that_is_documented(http: httpx.AsyncClient, app: Fairlane) -> None:
    id = await send(http, "add", 1)
    assert fits(shapes.JobView, (await http.get(f"{API}/jobs/{id}")).json())
    await burst(app)
    assert fits(shapes.JobView, (await http.get(f"{API}/jobs/{id}")).json())
    assert fits(shapes.JobPage, (await http.get(f"{API}/jobs")).json())
    assert fits(shapes.Outcome, (await http.get(f"{API}/jobs/{id}/result")).json())
    tasks = (await http.get(f"{API}/tasks")).json()
    assert fits(shapes.Tasks, tasks)
    [add] = [task for task in tasks["tasks"] if task["name"] == "add"]
    assert add["arguments"]["required"] == ["a"]
    assert add["arguments"]["properties"]["b"] == {"type": "integer"}
    assert add["result"] == {"type": "integer"}
    workers = (await http.get(f"{API}/workers", params={"kind": "worker"})).json()
    assert fits(shapes.Workers, workers)
    assert len(workers["workers"]) == 1
    assert fits(shapes.Leader, (await http.get(f"{API}/leader")).json())
    assert fits(shapes.Schedules, (await http.get(f"{API}/schedules")).json())


async def test_bindings_are_listed_and_released(
    http: httpx.AsyncClient, app: Fairlane, caplog: pytest.LogCaptureFixture
) -> None:
    await send(http, "add", 1, sticky="s:1")
    await burst(app)
    troubles = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in troubles if record.name == "fairlane.worker"] == []
    bindings = (await http.get(f"{API}/bindings", params={"key": "s:1"})).json()
    assert fits(shapes.Bindings, bindings)
    assert [each["key"] for each in bindings["bindings"]] == ["s:1"]
    released = (await http.post(f"{API}/bindings:release", json={"key": "s:1"})).json()
    assert released["key"] == "s:1"
    nothing = await http.post(f"{API}/bindings:release", json={"key": "unbound", "cleanup": {"task": "boom"}})
    assert nothing.json()["answer"] == "nothing"
    assert is_problem(await http.post(f"{API}/bindings:release", json={"key": ""}), 422, "key")


async def test_failures_are_grouped(http: httpx.AsyncClient, app: Fairlane) -> None:
    for _ in range(3):
        await send(http, "boom")
    await burst(app)
    failures = (await http.get(f"{API}/failures", params={"queue": "default"})).json()
    assert fits(shapes.Failures, failures)
    [group] = failures["failures"]
    assert (group["task"], group["count"], group["error_line"]) == ("boom", 3, "ValueError: no luck")
    assert (await http.get(f"{API}/failures", params={"task": "add"})).json() == {"failures": []}


async def test_broadcasts_are_sent_and_their_copies_listed(http: httpx.AsyncClient) -> None:
    answer = await http.post(f"{API}/broadcasts", json={"task": "boom", "ttl": 5})
    assert answer.status_code == 202
    assert fits(shapes.Sent, answer.json())
    assert (await http.get(answer.headers["location"])).json()["kind"] == "broadcast"
    assert (await http.get(answer.headers["location"] + "/copies")).json() == {"jobs": [], "cursor": None}


async def test_many_jobs_are_changed_by_a_selection(http: httpx.AsyncClient, app: Fairlane) -> None:
    for n in range(3):
        await send(http, "add", n, lane="a")
    kept = await send(http, "boom")
    dry = (await http.post(f"{API}/jobs:cancel", json={"task": "add", "dry_run": True})).json()
    assert fits(shapes.BulkView, dry)
    assert (dry["matched"], dry["changed"], len(dry["jobs"])) == (3, 0, 3)
    assert (await http.post(f"{API}/jobs:cancel", json={"task": "add"})).json()["changed"] == 3
    await burst(app)
    lines = await http.post(f"{API}/jobs:retry", json={"state": "failed"}, headers={"Accept": "application/x-ndjson"})
    last = [json.loads(line) for line in lines.text.splitlines()][-1]
    assert (last["done"], last["changed"]) == (True, 1)
    assert (await app.client.job(kept)).state == "failed"
    assert is_problem(await http.post(f"{API}/jobs:cancel", json={}), 422, "all")
    assert is_problem(await http.post(f"{API}/jobs:cancel", json={"all": True, "task": "add"}), 422, "all")
    assert is_problem(await http.post(f"{API}/jobs:cancel", json={"state": "failed"}), 422, "state")
    assert (await http.post(f"{API}/jobs:purge", json={"task": "add"})).json()["changed"] == 3


async def test_a_batch_is_stored_as_a_whole_or_not_at_all(http: httpx.AsyncClient, app: Fairlane) -> None:
    jobs = [{"task": "add", "args": [n]} for n in range(1_000)]
    answer = await http.post(f"{API}/jobs:batch", json=jobs)
    assert answer.status_code == 202, answer.text
    assert fits(shapes.SentMany, answer.json())
    assert len({job["id"] for job in answer.json()["jobs"]}) == 1_000
    assert is_problem(await http.post(f"{API}/jobs:batch", json=[*jobs, *jobs[:1]]), 422)
    bad = [*jobs[:2], {"task": "add", "args": ["x"]}]
    assert is_problem(await http.post(f"{API}/jobs:batch", json=bad), 422, "[2].argument 'a'")
    assert (await http.post(f"{API}/jobs:batch", json=[])).json() == {"jobs": []}
    [queue] = [queue for queue in await app.client.queues() if queue.name == "default"]
    assert queue.counts.pending == 1_000


async def test_the_same_key_makes_a_batch_once(http: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "k"}
    jobs = [{"task": "add", "args": [n]} for n in range(3)]
    first = (await http.post(f"{API}/jobs:batch", json=jobs, headers=key)).json()["jobs"]
    again = (await http.post(f"{API}/jobs:batch", json=jobs, headers=key)).json()["jobs"]
    assert [job["id"] for job in again] == [job["id"] for job in first]
    assert not any(job["created"] for job in again)


async def test_lines_are_answered_one_by_one(http: httpx.AsyncClient) -> None:
    lines = [
        *({"task": "add", "args": [n], "options": {"queue": "small"}} for n in range(3)),
        {"task": "nobody"},
        {"task": "add", "args": [9]},
    ]
    body = b"\n".join(msgspec.json.encode(line) for line in lines) + b"\nnot json\n"

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50):
            yield body[start : start + 50]

    answer = await http.post(
        f"{API}/jobs:batch",
        content=parts(),
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    told = [json.loads(line) for line in answer.text.splitlines()]
    assert [each["line"] for each in told] == [1, 2, 3, 4, 5, 6]
    assert [each["problem"]["status"] if "problem" in each else each["state"] for each in told] == [
        *("pending", "pending", 429, 422, "pending", 400)
    ]


async def test_health_readiness_and_metrics(http: httpx.AsyncClient, web: FastAPI) -> None:
    assert (await http.get("/healthz")).text == "ok\n"
    assert (await http.get("/readyz")).text == "ok\n"
    await send(http, "add", 1)
    text = (await http.get("/metrics")).text
    assert 'fairlane_jobs{priority="normal",queue="default",state="pending"} 1.0' in text
    assert "fairlane_store_up 1.0" in text
    web.state.fairlane.unready.append(lambda: "the worker does not claim")
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "the worker does not claim\n")


async def test_a_head_is_answered_where_a_get_shows_something(http: httpx.AsyncClient) -> None:
    job = await send(http, "add", 1)
    for path in ("/healthz", "/readyz", "/", f"{API}/queues", f"{API}/jobs/{job}"):
        asked, got = await http.head(path), await http.get(path)
        assert asked.status_code == 200, path
        assert asked.headers["content-type"] == got.headers["content-type"]
    assert (await http.head(f"{API}/jobs/missing")).status_code == 404
    # Methods that are not allowed are rejected; so is HEAD on a stream, because a stream has no end.
    for path, allowed in ((f"{API}/events", "GET"), (f"{API}/jobs:batch", "POST"), (f"{API}/jobs", "GET, HEAD, POST")):
        answer = await http.request("HEAD" if "HEAD" not in allowed else "PATCH", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path
