"""The store is unavailable: 503 with Retry-After, at once."""

from __future__ import annotations

import time

import httpx
import pytest
from fastapi import FastAPI

from fairlane import Fairlane, Settings
from fairlane.errors import StoreUnavailable
from fairlane.http import HttpSettings, create_app

from .conftest import API, client_of
from .test_jobs import is_problem


@pytest.mark.parametrize("url", ["postgresql://nobody@127.0.0.1:9/none", "redis://127.0.0.1:9"])
async def test_an_unavailable_store_is_reported_at_once(url: str) -> None:
    app = Fairlane(settings=Settings(url=url))

    @app.task(name="add")
    async def add(a: int) -> int:
        return a

    async with client_of(create_app(app, settings=HttpSettings())) as http:
        for request in (
            http.build_request("POST", f"{API}/jobs", json={"task": "add", "args": [1]}),
            http.build_request("GET", f"{API}/queues"),
            http.build_request("GET", f"{API}/jobs/x/events"),
            http.build_request("GET", f"{API}/jobs/x/result?wait=30"),
        ):
            began = time.monotonic()
            answer = await http.send(request)
            assert is_problem(answer, 503)
            assert int(answer.headers["retry-after"]) >= 1
            assert time.monotonic() - began < 20
            assert "127.0.0.1" not in answer.text
        ready = await http.get("/readyz")
        assert (ready.status_code, "StoreUnavailable" in ready.text or "Timeout" in ready.text) == (503, True)
        assert (await http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_a_store_that_hangs_is_not_waited_for(
    app: Fairlane, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, web: FastAPI
) -> None:
    import asyncio

    async def hang(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("postgresql://me:secret@host is away")

    quick = create_app(app, settings=HttpSettings(store_seconds=0.1, access="open"))
    async with client_of(quick) as impatient:
        monkeypatch.setattr(app.client, "send", hang)
        body = {"task": "add", "args": [1]}
        assert is_problem(await impatient.post(f"{API}/jobs", json=body), 503)
        monkeypatch.setattr(app.client, "send", away)
        gone = await impatient.post(f"{API}/jobs", json=body)
        assert is_problem(gone, 503)
        assert "secret" not in gone.text
        assert is_problem(await impatient.post(f"{API}/jobs:batch", json=[body]), 503)
        lines = {"Content-Type": "application/x-ndjson"}
        line = await impatient.post(f"{API}/jobs:batch", content=b'{"task":"add","args":[1]}\n', headers=lines)
        assert line.json()["problem"]["status"] == 503
