"""What helps people: the last hour, a diagnosis, failures over time, next jobs, a search, a run of a schedule."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fairlane import Fairlane
from fairlane.http import create_app, history, service_of, view_shapes
from fairlane.http.history import Cached, spread
from fairlane.http.routes.celery import load_operations
from fairlane.integrations.celery.balancer.leases import Load
from fairlane.model.job import JobState
from fairlane.model.slots import Slots

from .conftest import API, burst, client_of, eventually
from .test_jobs import is_problem, send
from .test_operations import fits
from .test_streams import Stream


async def test_the_history_counts_what_ended_between_two_reads(
    http: httpx.AsyncClient, app: Fairlane, web: FastAPI
) -> None:
    recorded = service_of(web).history
    assert fits(view_shapes.HistoryView, (await http.get(f"{API}/history")).json())
    recorded.note(await app.client.queues(), 100.0)
    for _ in range(3):
        await send(http, "add", 1)
    await send(http, "boom")
    await burst(app)
    await send(http, "add", 1)
    recorded.note(await app.client.queues(), 110.0)
    found = (await http.get(f"{API}/history")).json()
    assert fits(view_shapes.HistoryView, found)
    assert (found["since"], found["at"]) == (100.0, [110.0])
    assert (found["completed"], found["failed"], found["pending"]) == ([3], [1], [1])
    assert (await http.get(f"{API}/history", params={"queue": "small"})).json()["completed"] == [0]
    # An hour later the old points are gone.
    recorded.note(await app.client.queues(), 110.0 + 3_600.5)
    assert recorded.document(None)["at"] == []


async def test_the_time_to_start_is_that_of_jobs_that_ran_once(http: httpx.AsyncClient, app: Fairlane) -> None:
    for _ in range(5):
        await send(http, "add", 1)
    await burst(app)
    waits = (await http.get(f"{API}/history")).json()["waits"]
    assert waits["all"]["jobs"] == waits["normal"]["jobs"] == 5
    assert 0 <= waits["all"]["p50"] <= waits["all"]["p95"]
    assert waits["high"] == {"p50": None, "p95": None, "jobs": 0}
    jobs = (await app.client.find(state=JobState.COMPLETED)).jobs
    assert spread(jobs)["jobs"] == 5


async def test_a_job_that_was_sent_for_later_did_not_wait_before(http: httpx.AsyncClient, app: Fairlane) -> None:
    sent: list[dict[str, float]] = [{"delay": 2.0}, {"run_at": time.time() + 2.0}, {}]
    ids = [await send(http, "add", 1, **options) for options in sent]

    async def started() -> bool:
        await burst(app)
        jobs = [await app.client.job(id) for id in ids]
        return all(job.state is JobState.COMPLETED for job in jobs)

    await eventually(started)
    later, at, now = [await app.client.job(id) for id in ids]
    for job in (later, at):
        assert job.first_due_at is not None
        assert job.first_due_at == pytest.approx(job.enqueued_at + 2.0, abs=1.5)
        assert job.started_at is not None
        assert spread([job])["p50"] == round(job.started_at - job.first_due_at, 3)
    assert now.first_due_at is None


async def test_a_slow_value_is_read_once_for_all(http: httpx.AsyncClient) -> None:
    reads = 0

    async def read() -> int:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0.05)
        return reads

    cached = Cached(read, 0.2)
    assert await asyncio.gather(*(cached.get() for _ in range(5))) == [1] * 5
    assert await cached.get() == 1
    await asyncio.sleep(0.25)
    assert await cached.get() == 1  # the old one, while the new one is read
    await asyncio.sleep(0.2)
    assert await cached.get() == 2


async def test_the_doctor_speaks_in_sentences(http: httpx.AsyncClient) -> None:
    await send(http, "add", 1)
    found = (await http.get(f"{API}/doctor")).json()
    assert fits(view_shapes.Diagnosis, found)
    levels = [finding["level"] for finding in found["findings"]]
    assert levels == sorted(levels, key=["error", "warn", "ok"].index)
    [queues] = [finding for finding in found["findings"] if finding["topic"] == "queues"]
    assert "1 job is waiting, and no live worker serves the queue" in queues["what"]


async def test_the_doctor_looks_again_after_a_change(http: httpx.AsyncClient) -> None:
    await send(http, "add", 1)

    async def queues() -> str:
        found = (await http.get(f"{API}/doctor")).json()["findings"]
        return " ".join(finding["what"] for finding in found if finding["topic"] == "queues")

    assert "is paused" not in await queues()
    for verb in ("pause", "resume"):
        assert (await http.post(f"{API}/queues/default/{verb}")).status_code == 200
        assert ("is paused" in await queues()) == (verb == "pause")


async def test_what_the_stores_servers_count_is_reported(http: httpx.AsyncClient) -> None:
    found = (await http.get(f"{API}/counters")).json()
    assert fits(view_shapes.Counters, found)
    assert set(found["counters"].values()) <= {0}


async def test_failures_are_counted_over_time(http: httpx.AsyncClient, app: Fairlane) -> None:
    for _ in range(3):
        await send(http, "boom")
    await burst(app)
    found = (await http.get(f"{API}/failures/timeline")).json()
    assert fits(view_shapes.FailureTimeline, found)
    [group] = found["groups"]
    assert (group["task"], sum(group["counts"]), len(group["counts"])) == ("boom", 3, 40)
    assert found["exact"]


async def test_the_next_jobs_are_in_the_order_of_the_queue(http: httpx.AsyncClient) -> None:
    for _ in range(6):
        await send(http, "render", "ann")
    bob = await send(http, "render", "bob")
    urgent = await send(http, "render", "cleo", priority="high")
    answer = (await http.get(f"{API}/queues/default/next")).json()
    assert fits(view_shapes.NextJobs, answer)
    ids = [job["id"] for job in answer["jobs"]]
    assert ids[0] == urgent
    assert ids.index(bob) <= 2, "a newcomer is served within a turn of each lane"
    assert [job["ahead"] for job in answer["jobs"]] == sorted(job["ahead"] for job in answer["jobs"])
    assert is_problem(await http.get(f"{API}/queues/none/next"), 404)


async def test_a_long_lane_shows_its_first_jobs_and_not_the_newest(http: httpx.AsyncClient, app: Fairlane) -> None:
    add = app.registry.find("add")
    sent = await app.client.enqueue_many([add.options(lane="bulk").call(n) for n in range(300)])
    jobs = (await http.get(f"{API}/queues/default/next")).json()["jobs"]
    assert [job["id"] for job in jobs] == [each.id for each in sent[:10]]
    assert [job["ahead"] for job in jobs] == [*range(10)]
    # A lane whose jobs cannot start is not next, and does not affect others.
    await app.client.pause("default", "bulk")
    single = await send(http, "render", "ann")
    jobs = (await http.get(f"{API}/queues/default/next")).json()["jobs"]
    assert [job["id"] for job in jobs] == [single]


async def test_what_may_be_next_is_not_guessed_among_very_many_lanes(http: httpx.AsyncClient, app: Fairlane) -> None:
    add = app.registry.find("add")
    await app.client.enqueue_many([add.options(lane=f"lane-{n}").call(n) for n in range(100)])
    assert (await http.get(f"{API}/queues/default/next")).json() == {"jobs": []}


async def test_a_lane_with_very_many_running_jobs_still_shows_waiting_jobs(
    http: httpx.AsyncClient, web: FastAPI, app: Fairlane
) -> None:
    opened = asyncio.Event()

    @app.task(name="hold", lane="bulk")
    async def hold() -> None:
        await opened.wait()

    sent = await app.client.enqueue_many([hold.call() for _ in range(80)])
    worker = app.worker(slots=Slots(total=70))
    running = asyncio.create_task(worker.run())
    try:

        async def busy() -> bool:
            [queue] = [queue for queue in await app.client.queues() if queue.name == "default"]
            return queue.counts.running == 70

        await eventually(busy)
        async with Stream(web, f"{API}/queues/default/line/events?lane=bulk") as stream:
            _, told, _ = await anext(stream.events())
        assert (told["running"], told["waiting"], told["more"]) == (70, 10, True)
        assert [job["place"] for job in told["jobs"]] == [*[None] * 50, *range(1, 11)]
        assert told["head"]["id"] == sent[70].id
        jobs = (await http.get(f"{API}/queues/default/next")).json()["jobs"]
        assert [job["id"] for job in jobs] == [each.id for each in sent[70:]]
    finally:
        opened.set()
        worker.stop()
        await running


async def test_costly_answers_are_shared_and_never_older_than_a_change(
    http: httpx.AsyncClient, app: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    real = app.client.bindings

    async def counted(*query: Any, **more: Any) -> Any:
        nonlocal reads
        reads += 1
        return await real(*query, **more)

    monkeypatch.setattr(app.client, "bindings", counted)
    failures = _Counted()
    monkeypatch.setattr(app.client, "failures", failures)
    for path in ("/bindings?limit=500", "/failures"):
        answers = await asyncio.gather(*(http.get(API + path) for _ in range(5)))
        assert len({answer.text for answer in answers}) == 1
    assert (reads, failures.reads) == (1, 1)
    assert (await http.get(f"{API}/bindings?limit=1")).status_code == 200
    assert reads == 2
    await http.post(f"{API}/bindings:release", json={"key": "plan-7"})
    await http.get(f"{API}/bindings?limit=500")
    assert reads == 3


class _Counted:
    reads = 0

    async def __call__(self, **_: Any) -> list[Any]:
        self.reads += 1
        return []


async def test_only_so_many_shared_answers_are_kept() -> None:
    shared = history.SharedAnswers(60.0)

    async def read() -> int:
        return 1

    for n in range(history.MOST_SHARED + 5):
        assert await shared.get(history.NoQuery(str(n)), read) == 1
    assert len(shared._known) == history.MOST_SHARED


async def test_a_search_matches_every_name(http: httpx.AsyncClient) -> None:
    id = await send(http, "render", "ann", sticky="plan-7")
    for text, by in ((id, "id"), ("render", "task"), ("user:ann", "lane"), ("plan-7", "sticky")):
        found = (await http.get(f"{API}/search", params={"q": text})).json()
        assert fits(view_shapes.Found, found)
        assert ([job["id"] for job in found["jobs"]], found["by"]) == ([id], [by])
    assert found["complete"]
    lane = (await http.get(f"{API}/search", params={"q": "user:ann"})).json()["lanes"]
    assert lane == [{"queue": "default", "lane": "user:ann"}]
    part = (await http.get(f"{API}/search", params={"q": "PICT"})).json()
    assert (part["queues"], part["jobs"]) == (["pictures"], [])
    assert (await http.get(f"{API}/search", params={"q": "ste"})).json()["tasks"] == ["steps"]
    odd = (await http.get(f"{API}/search", params={"q": "no name: <b> /"})).json()
    assert not any(odd[kind] for kind in ("jobs", "queues", "lanes", "tasks", "bindings"))
    assert is_problem(await http.get(f"{API}/search", params={"q": ""}), 422, "q")


async def test_a_schedule_is_run_now_and_keeps_its_timetable(http: httpx.AsyncClient, app: Fairlane) -> None:
    @app.task(name="nightly", cron="0 4 * * *")
    async def nightly() -> str:
        return "done"

    await burst(app)
    [before] = (await http.get(f"{API}/schedules")).json()["schedules"]
    answer = await http.post(f"{API}/schedules/nightly/run")
    assert answer.status_code == 202, answer.text
    again = await http.post(f"{API}/schedules/nightly/run")
    assert again.json()["id"] != answer.json()["id"]
    await burst(app)
    job = (await http.get(answer.headers["location"])).json()
    assert (job["state"], job["result"]) == ("completed", "done")
    [after] = (await http.get(f"{API}/schedules")).json()["schedules"]
    assert (after["last"], after["next"]) == (before["last"], before["next"])
    assert is_problem(await http.post(f"{API}/schedules/none/run"), 404)


async def test_a_queue_and_a_line_are_watched(http: httpx.AsyncClient, web: FastAPI) -> None:
    for _ in range(3):
        await send(http, "add", 1, queue="pictures", lane="model:a")
    async with Stream(web, f"{API}/queues/pictures/events") as stream:
        kind, told, _ = await anext(stream.events())
        assert kind == "lanes"
        [lane] = told["lanes"]
        assert (lane["lane"], lane["pending"], lane["limit"]) == ("model:a", 3, 1)
        assert [job["lane"] for job in told["next"]] == ["model:a"] * 3
    async with Stream(web, f"{API}/queues/pictures/line/events?lane=model%3Aa") as stream:
        events = stream.events()
        kind, told, _ = await anext(events)
        assert kind == "line"
        assert [job["place"] for job in told["jobs"]] == [1, 2, 3]
        assert [job["arguments"] for job in told["jobs"]] == ["1"] * 3
        assert told["waiting"] == 3
        assert told["head"]["id"] == told["jobs"][0]["id"]
        assert told["head"]["why"]
        await send(http, "add", 1, queue="pictures", lane="model:a")
        async for _, told, _ in events:
            if len(told["jobs"]) == 4:
                break
    async with Stream(web, f"{API}/queues/none/events") as stream:
        assert "does not exist yet" in await anext(stream.parts())


async def test_the_loads_of_celery_are_read_where_there_is_a_balancer(app: Fairlane) -> None:
    web = create_app(app, extra=[load_operations(lambda: {"queue_0": Load(3, 1)})])
    async with client_of(web) as http:
        found = (await http.get(f"{API}/celery")).json()
        assert fits(view_shapes.Loads, found)
        assert found == {"queues": {"queue_0": {"pending": 3, "running": 1}}}
        assert (await http.get(f"{API}/session")).json()["features"] == ["celery"]
    async with client_of(create_app(app)) as http:
        assert is_problem(await http.get(f"{API}/celery"), 404)
