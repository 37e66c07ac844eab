"""HTTP services on a store of every kind, called in process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from fairlane import Fairlane, Intervals, Settings, current_job
from fairlane.http import HttpSettings, create_app

QUICK = replace(Intervals().scaled(0.1), lease=6.0)
API = "/api/v1"


@pytest.fixture
async def app(store_url: str) -> AsyncIterator[Fairlane]:
    """An application with a few tasks."""
    app = make_app(store_url)
    yield app
    await app.close()


def make_app(url: str) -> Fairlane:
    """The tasks that the tests send."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    app.queue("small", max_pending=2)
    app.queue("pictures").lane("model:*", limit=1)

    @app.task(name="add")
    async def add(a: int, b: int = 1) -> int:
        return a + b

    @app.task(name="render", lane="user:{user}")
    async def render(user: str, size: float = 1.0) -> str:
        return f"{user}.png"

    @app.task(name="boom", retries=0)
    async def boom() -> None:
        raise ValueError("no luck\nat all")

    @app.task(name="steps")
    async def steps(count: int) -> int:
        for step in range(count):
            current_job().progress({"step": step})
            await asyncio.sleep(0.05)
        return count

    return app


@pytest.fixture
def web(app: Fairlane) -> FastAPI:
    """Its service, open for this machine."""
    return create_app(app, settings=HttpSettings(heartbeat=0.2, token_seconds=0.001, store_seconds=10))


def client_of(web: FastAPI, **options: Any) -> httpx.AsyncClient:
    """A client that calls a service in process."""
    transport = httpx.ASGITransport(web, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", **options)


@pytest.fixture
async def http(web: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the service."""
    async with client_of(web) as client:
        yield client


async def burst(app: Fairlane) -> None:
    """Run what there is."""
    await app.worker(burst=True, slots=2).run()


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Wait until `check` holds."""
    async with asyncio.timeout(seconds):
        while not await check():
            await asyncio.sleep(0.01)
