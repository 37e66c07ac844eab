"""The audit log has every change that an operator made."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from fastapi import FastAPI

from fairlane import Fairlane
from fairlane.http.access import Scope

from .conftest import API, burst, client_of
from .test_access import Tokens, bearer, operations, token

pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)


def entries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.audit for record in caplog.records if hasattr(record, "audit")]


async def test_every_operation_of_an_operator_leaves_a_record(
    web: FastAPI, app: Fairlane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fairlane.audit")

    @app.task(name="shop.reload")
    async def reload() -> None:
        """What the example of a broadcast names."""

    @app.task(name="nightly", cron="0 4 * * *")
    async def nightly() -> None:
        """What a schedule runs."""

    done = await app.registry.find("add").enqueue(1)
    await burst(app)
    waiting = await app.registry.find("add").enqueue(1)
    Tokens(web, token("boss", "admin"))
    walked = 0
    async with client_of(web, headers=bearer("boss")) as http:
        for operation in operations(web):
            if operation.scope not in (Scope.OPERATE, Scope.ADMIN):
                continue
            walked += 1
            caplog.clear()
            job = done if operation.path.endswith("/retry") else waiting
            path = operation.path.replace("{id:path}", job.id).replace("{queue}", "default").replace("{id}", job.id)
            path = path.replace("{name}", "nightly")
            body = operation.example
            if isinstance(body, dict) and "dry_run" in body:
                body = {"queue": "default", "dry_run": True}
                assert (await http.request(operation.method, path, json=body)).status_code == 200
                assert entries(caplog) == []
                del body["dry_run"]
            answer = await http.request(operation.method, path, json=body)
            assert answer.is_success, (path, answer.text)
            first, *_ = entries(caplog)
            assert (first["caller"], first["address"]) == ("id-boss", "127.0.0.1"), path
            assert first["target"], path
            assert "boss" not in caplog.text.replace("id-boss", ""), "the secret of the token is in the log"
    assert walked >= 12


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_the_outcome_of_a_bulk_change_is_recorded(
    web: FastAPI, app: Fairlane, caplog: pytest.LogCaptureFixture, accept: str
) -> None:
    caplog.set_level(logging.INFO, "fairlane.audit")
    for _ in range(3):
        await app.registry.find("add").enqueue(1)
    async with client_of(web, headers={"Accept": accept}) as http:
        assert (await http.post(f"{API}/jobs:cancel", json={"task": "add"})).is_success
    begun, ended = entries(caplog)
    assert (begun["action"], begun["target"]["task"]) == ("cancel_all", "add")
    assert (ended["action"], ended["target"]) == ("cancel_all ended", {"matched": 3, "changed": 3, "requested": 0})


async def test_a_bulk_change_ends_when_its_client_goes_and_what_it_did_is_recorded(
    web: FastAPI, app: Fairlane, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fairlane.audit")
    add = app.registry.find("add")
    await app.enqueue_many([add.call(n) for n in range(5_000)])
    gone = asyncio.Event()
    body = json.dumps({"task": "add", "most": 5_000}).encode()
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        # As in uvicorn, sending to a client that has gone raises nothing.
        if message.get("body") and json.loads(message["body"])["changed"]:
            gone.set()

    headers = {"host": "127.0.0.1", "content-type": "application/json", "accept": "application/x-ndjson"}
    path = f"{API}/jobs:cancel"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await web(scope, receive, send)
    [queue] = [queue for queue in await app.client.queues() if queue.name == "default"]
    _, ended = entries(caplog)
    assert ended["action"] == "cancel_all ended"
    assert 0 < ended["target"]["changed"] <= queue.counts.cancelled < 5_000
