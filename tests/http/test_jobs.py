"""Jobs over HTTP: send, list, look, wait, cancel, retry."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from fairlane import Fairlane

from .conftest import API, burst


def is_problem(answer: httpx.Response, status: int, field: str | None = None) -> bool:
    document = answer.json()
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert document["status"] == status
    assert document["type"].startswith("urn:fairlane:problem:")
    assert document["detail"]
    assert document.get("field") == field
    return True


async def send(http: httpx.AsyncClient, task: str, *args: object, **options: object) -> str:
    answer = await http.post(f"{API}/jobs", json={"task": task, "args": args, "options": options})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


async def test_a_job_is_sent_run_and_read(http: httpx.AsyncClient, app: Fairlane) -> None:
    answer = await http.post(f"{API}/jobs", json={"task": "add", "args": [2], "kwargs": {"b": 3}})
    assert answer.status_code == 202
    sent = answer.json()
    assert sent == {"id": sent["id"], "created": True, "state": "pending"}
    assert answer.headers["location"] == f"{API}/jobs/{sent['id']}"
    waiting = (await http.get(answer.headers["location"])).json()
    assert waiting["state"] == "pending"
    assert waiting["position"]["place"] == 1
    assert waiting["payload"] == [[2], {"b": 3}]
    assert waiting["why"]
    assert (await http.get(f"{API}/jobs/{sent['id']}/result")).status_code == 202
    await burst(app)
    done = (await http.get(f"{API}/jobs/{sent['id']}")).json()
    assert (done["state"], done["result"], done["position"], done["eta"]) == ("completed", 5, None, None)
    [attempt] = done["attempts"]
    assert attempt["outcome"] == "completed"
    result = await http.get(f"{API}/jobs/{sent['id']}/result", params={"wait": 5})
    assert result.status_code == 200
    assert result.json()["result"] == 5


async def test_options_reach_the_job(http: httpx.AsyncClient, app: Fairlane) -> None:
    id = await send(
        http, "add", 1, queue="other", lane="l/1", priority="high", delay=60, retries=7, timeout=9, sticky="s", id="a/b"
    )
    job = await app.client.job(id)
    assert (job.id, job.queue, job.lane, job.priority.label, job.retries) == ("a/b", "other", "l/1", "high", 7)
    assert (job.state.value, job.timeout, job.sticky) == ("scheduled", 9.0, "s")
    shown = (await http.get(f"{API}/jobs/a%2Fb")).json()
    assert (shown["id"], shown["priority"], shown["lane"]) == ("a/b", "high", "l/1")


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"task": "nobody"}, 422, "task"),
        ({"args": []}, 422, "task"),
        ({"task": "add"}, 422, "argument 'a'"),
        ({"task": "add", "args": ["x"]}, 422, "argument 'a'"),
        ({"task": "add", "args": [1], "kwargs": {"c": 1}}, 422, "argument 'c'"),
        ({"task": "add", "args": [1], "options": {"priority": "urgent"}}, 422, "options.priority"),
        ({"task": "add", "args": [1], "options": {"lane": ""}}, 422, "options.lane"),
        ({"task": "add", "args": [1], "options": {"delay": -1}}, 422, "options.delay"),
        ({"task": "add", "args": [1], "options": {"colour": "red"}}, 422, "options.colour"),
        ({"task": "add", "args": [1], "options": {"id": "a\0b"}}, 422, "options.id"),
        ({"task": "add", "args": [1], "options": {"id": ".."}}, 422, "options.id"),
        ({"task": "add", "args": [1], "options": {"id": "order/7/cancel"}}, 422, "options.id"),
        ({"task": "add", "args": 1}, 422, "args"),
        ({"task": "render", "args": [""]}, 422, "lane"),
        ([], 422, None),
    ],
)
async def test_what_does_not_fit_is_refused_by_its_field_and_nothing_is_stored(
    http: httpx.AsyncClient, app: Fairlane, body: object, status: int, field: str | None
) -> None:
    assert is_problem(await http.post(f"{API}/jobs", json=body), status, field)
    assert (await app.client.find()).jobs == ()


async def test_the_allowed_values_are_named_and_not_the_sent_one(http: httpx.AsyncClient) -> None:
    request = {"task": "add", "args": [1], "options": {"priority": "urgent - at `$.x`"}}
    answer = await http.post(f"{API}/jobs", json=request)
    assert is_problem(answer, 422, "options.priority")
    assert answer.json()["detail"] == "must be 'high', 'low' or 'normal'"
    answer = await http.post(f"{API}/jobs:batch", json=[request])
    assert answer.json()["detail"] == "must be 'high', 'low' or 'normal'"
    answer = await http.get(f"{API}/jobs", params={"state": "bad"})
    assert is_problem(answer, 422, "state")
    states = "'scheduled', 'pending', 'running', 'completed', 'failed' or 'cancelled'"
    assert answer.json()["detail"] == f"must be {states}"


async def test_the_same_idempotency_key_makes_one_job(http: httpx.AsyncClient, app: Fairlane) -> None:
    key = {"Idempotency-Key": "order 7"}
    first = await http.post(f"{API}/jobs", json={"task": "add", "args": [1]}, headers=key)
    again = await http.post(f"{API}/jobs", json={"task": "add", "args": [1]}, headers=key)
    assert again.json() == {**first.json(), "created": False}
    other = await http.post(f"{API}/jobs", json={"task": "add", "args": [2]}, headers=key)
    assert is_problem(other, 409)
    assert "Idempotency-Key" in other.json()["detail"], "the client knows no id"
    both = {"task": "add", "args": [1], "options": {"id": "x"}}
    assert is_problem(await http.post(f"{API}/jobs", json=both, headers=key), 422, "options.id")
    assert len((await app.client.find()).jobs) == 1


async def test_a_full_queue_says_when_to_come_back(http: httpx.AsyncClient) -> None:
    for _ in range(2):
        await send(http, "add", 1, queue="small")
    full = await http.post(f"{API}/jobs", json={"task": "add", "args": [1], "options": {"queue": "small"}})
    assert is_problem(full, 429)
    assert int(full.headers["retry-after"]) >= 1


async def test_lists_are_filtered_paged_and_clamped(http: httpx.AsyncClient) -> None:
    ids = [await send(http, "add", n) for n in range(5)]
    await send(http, "render", "ann")
    first = (await http.get(f"{API}/jobs", params={"task": "add", "limit": 3})).json()
    rest = (await http.get(f"{API}/jobs", params={"task": "add", "limit": 3, "cursor": first["cursor"]})).json()
    assert [job["id"] for job in first["jobs"] + rest["jobs"]] == ids[::-1]
    assert rest["cursor"] is None
    assert len((await http.get(f"{API}/jobs", params={"limit": 100_000})).json()["jobs"]) == 6
    [own] = (await http.get(f"{API}/jobs", params={"queue": "default", "lane": "user:ann"})).json()["jobs"]
    assert own["task"] == "render"
    assert is_problem(await http.get(f"{API}/jobs", params={"state": "asleep"}), 422, "state")
    assert is_problem(await http.get(f"{API}/jobs", params={"limit": "many"}), 422, "limit")
    assert is_problem(await http.get(f"{API}/jobs", params={"limit": 0}), 422, "limit")
    assert is_problem(await http.get(f"{API}/jobs", params={"colour": "red"}), 422, "colour")
    assert is_problem(await http.get(f"{API}/jobs", params={"lane": "x"}), 422, "lane")
    assert is_problem(await http.get(f"{API}/jobs", params={"cursor": "nonsense"}), 422, "cursor")


async def test_jobs_are_cancelled_and_run_again(http: httpx.AsyncClient, app: Fairlane) -> None:
    id = await send(http, "add", 1)
    assert is_problem(await http.post(f"{API}/jobs/{id}/retry"), 409, "id")
    assert (await http.post(f"{API}/jobs/{id}/cancel")).json() == {"id": id, "answer": "cancelled"}
    again = await http.post(f"{API}/jobs/{id}/retry")
    assert again.status_code == 202
    assert again.json()["retry_of"] == id
    failed = await send(http, "boom")
    await burst(app)
    assert (await http.get(again.headers["location"])).json()["state"] == "completed"
    outcome = (await http.get(f"{API}/jobs/{failed}/result")).json()
    assert (outcome["state"], outcome["final"], outcome["reason"]) == ("failed", True, "error")
    assert "no luck" in outcome["error"]


async def test_an_unknown_task_is_rejected_with_the_path_of_the_list(http: httpx.AsyncClient) -> None:
    answer = await http.post(f"{API}/jobs", json={"task": "nope"})
    assert answer.status_code == 422
    path = answer.json()["detail"].rpartition("see GET ")[2]
    assert (await http.get(path)).json()["tasks"]


async def test_unknown_things_are_not_found(http: httpx.AsyncClient) -> None:
    for path in ("jobs/none", "jobs/none/result", "jobs/%00", "jobs/", "nothing"):
        answer = await http.get(f"{API}/{path}")
        assert answer.status_code == 404, path
        assert msgspec.json.decode(answer.content)["status"] == 404
    assert is_problem(await http.post(f"{API}/jobs/none/cancel"), 404)
    wrong = await http.delete(f"{API}/jobs")
    assert is_problem(wrong, 405)
    assert wrong.headers["allow"] == "GET, HEAD, POST"
