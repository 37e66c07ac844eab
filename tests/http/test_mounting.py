"""The service inside another application, and what begins and ends with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from fairlane import Fairlane
from fairlane.http import create_app, service_of

from .conftest import API, client_of

pytestmark = pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)


async def test_a_mounted_service_names_its_jobs_by_the_whole_path(app: Fairlane) -> None:
    host = FastAPI()
    host.mount("/queue", create_app(app))
    async with client_of(host) as http:
        sent = await http.post(f"/queue{API}/jobs", json={"task": "add", "args": [1]})
        assert sent.status_code == 202
        assert sent.headers["location"].startswith(f"/queue{API}/jobs/")
        assert (await http.get(sent.headers["location"])).json()["state"] == "pending"
        assert (await http.get("/queue/healthz")).text == "ok\n"
        assert (await http.get(f"/queue{API}/openapi.json")).json()["openapi"] == "3.1.0"
        unknown = await http.get("/queue/none")
        assert (unknown.status_code, unknown.headers["content-type"]) == (404, "application/problem+json")


async def test_what_belongs_to_a_service_begins_and_ends_with_it(app: Fairlane) -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def part() -> AsyncIterator[None]:
        seen.append("begun")
        yield
        seen.append("ended")

    web = create_app(app)
    service = service_of(web)
    service.lifespans.append(part)
    service.on_stop.append(lambda: seen.append("stopping"))
    for _ in range(2):
        async with service.lifespan():
            assert not service.stopping
            async with client_of(web) as http:
                assert (await http.get("/readyz")).status_code == 200
        assert service.stopping
    assert seen == ["begun", "stopping", "ended"] * 2
