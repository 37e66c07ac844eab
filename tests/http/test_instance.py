"""The client and the old API against a real service with a worker inside, in one process and on every store."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from fairlane import (
    Conflict,
    Fairlane,
    FairlaneError,
    InvalidInput,
    JobFailed,
    JobState,
    NotFound,
    QueueFull,
    current_job,
)
from fairlane.http import AccessDenied, AsyncClient, HttpSettings, serve_app, service_of
from fairlane.http.instance import Instance
from fairlane.task import Task


class Shop:
    """An application, its complete instance, and a way to call it."""

    def __init__(self, url: str, **options: Any) -> None:
        self.app = Fairlane(url)
        self.app.queue("small", max_pending=1)

        @self.app.task(name="double", retries=0)
        async def double(number: int, times: int = 1) -> list[int]:
            current_job().progress({"percent": 50})
            return [2 * number] * times

        @self.app.task(name="boom", retries=0)
        async def boom() -> None:
            raise ValueError("no luck\nat all")

        self.double = double
        self.web = serve_app(self.app, legacy_task=_nothing(self.app), **options)

    def client(self, token: str | None = None) -> AsyncClient:
        return AsyncClient("http://localhost", token, transport=httpx.ASGITransport(self.web))

    @property
    def browser(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://localhost", transport=httpx.ASGITransport(self.web))


def _nothing(app: Fairlane) -> Task[[], None]:
    @app.task(name="nothing", retries=0)
    async def nothing() -> None: ...

    return nothing


@asynccontextmanager
async def open_shop(url: str, **options: Any) -> AsyncIterator[Shop]:
    shop = Shop(url, **options)
    async with service_of(shop.web).lifespan():
        yield shop


async def test_a_handle_over_http_is_a_handle(store_url: str) -> None:
    async with open_shop(store_url) as shop, shop.client() as client:
        handle = await client.enqueue(shop.double, 21, times=2)
        assert await handle.result(timeout=10) == [42, 42]
        local = shop.app.handle(handle.id, shop.double)
        there, here = await handle.job(), await local.job()
        # Fields that the service does not return: the back-off, the session and the headers.
        for field in here.__struct_fields__:
            if field not in ("backoff", "session", "headers"):
                assert getattr(there, field) == getattr(here, field), field
        assert await handle.why() == await local.why()
        assert await handle.state() is await local.state() is JobState.COMPLETED
        assert await handle.progress() == await local.progress() == {"percent": 50}
        assert await handle.position() is None
        assert await handle.eta() is None
        assert [u async for u in handle.watch()] == [u async for u in local.watch()]
        assert await (await handle.retry()).result(timeout=10) == [42, 42]


async def test_one_call_is_one_job_wherever_it_is_sent(store_url: str) -> None:
    async with open_shop(store_url, workers=0) as shop, shop.client() as client:
        call = shop.double.call(1)
        first, second, third = await client.enqueue(call), await shop.app.enqueue(call), await client.enqueue(call)
        assert {first.id, second.id, third.id} == {call.job.id}
        assert [first.created, second.created, third.created] == [True, False, False]
        with pytest.raises(Conflict):
            await client.enqueue(shop.double.options(id=call.job.id), 2)
        calls = [shop.double.call(n) for n in range(3)]
        assert [h.created for h in await client.enqueue_many(calls)] == [True] * 3
        assert [h.created for h in await client.enqueue_many(calls)] == [False] * 3
        with pytest.raises(InvalidInput, match="not a task"):
            await client.enqueue("treble", 1)
        with pytest.raises(InvalidInput, match="number"):
            await client.enqueue("double", number="one")
        small = shop.double.options(queue="small")
        await client.enqueue(small, 1)
        with pytest.raises(QueueFull):
            await client.enqueue(small, 2)
        position = await client.handle(call.job.id).position()
        assert position is not None
        assert (position.place, position.of) == (1, 4)


async def test_a_token_that_is_not_accepted_is_an_error_of_its_own(store_url: str) -> None:
    async with open_shop(store_url, settings=HttpSettings(access="tokens")) as shop:
        async with shop.client("wrong") as client:
            with pytest.raises(AccessDenied):
                await client.enqueue(shop.double, 1)
        _, secret = await shop.app.client.make_token("caller", ["enqueue"])
        await service_of(shop.web).access.refresh()
        async with shop.client(secret) as client:
            handle = await client.enqueue(shop.double, 1)
            with pytest.raises(AccessDenied):
                await handle.state()
        async with shop.browser as browser:
            assert (await browser.get("/task")).status_code == 401


async def test_the_old_api_can_be_switched_off(store_url: str) -> None:
    async with open_shop(store_url, settings=HttpSettings(legacy=False)) as shop, shop.browser as browser:
        assert (await browser.get("/task")).status_code == 404
        assert (await browser.get("/task/some-id")).status_code == 404
    async with open_shop(store_url) as shop, shop.browser as browser:
        answer = await browser.get("/task")
        assert answer.status_code == 200
        assert answer.json()["priority"] == "low"
        for path in ("/task/", "/task/%00", "/task/" + 300 * "a", "/task?priority=%00", "/task?priority=low%0a"):
            assert 400 <= (await browser.get(path)).status_code < 500, path
        assert len((await shop.app.client.find()).jobs) == 1


async def test_a_failed_and_a_cancelled_job_are_reported_in_the_old_words(store_url: str) -> None:
    async with open_shop(store_url) as shop, shop.browser as browser, shop.client() as client:

        async def status(id: str) -> dict[str, Any]:
            found: dict[str, Any] = (await browser.get(f"/task/{id}")).json()
            return found

        failed = await client.enqueue("boom")
        with pytest.raises(JobFailed, match="ValueError: no luck"):
            await failed.result(timeout=10)
        told = await status(failed.id)
        assert (told["status"], told["error"]) == ("failed", "ValueError: no luck")
        assert told["latency"] > 0
        waiting = await client.enqueue(shop.double.options(delay=60), 1)
        assert (await status(waiting.id))["status"] == "queued"
        assert (await status(waiting.id))["worker"] is None
        await waiting.cancel()
        told = await status(waiting.id)
        assert (told["status"], told["error"]) == ("failed", "cancelled (by_user)")
        with pytest.raises(NotFound):
            await client.handle("unknown").cancel()


def test_the_old_api_needs_a_task_without_arguments(store_url: str) -> None:
    app = Fairlane(store_url)

    @app.task(name="needy")
    async def needy(what: str) -> None: ...

    other = Fairlane(store_url)
    with pytest.raises(InvalidInput, match="legacy_task: needy runs without arguments"):
        serve_app(app, legacy_task="needy")
    with pytest.raises(InvalidInput, match="legacy_task"):
        serve_app(other, legacy_task=needy)
    with pytest.raises(InvalidInput, match="workers"):
        serve_app(app, workers=-1)


async def test_an_instance_is_ready_while_its_worker_claims(store_url: str) -> None:
    async with open_shop(store_url, workers=2) as shop, shop.browser as browser:
        assert (await browser.get("/readyz")).status_code == 200
        assert len(await shop.app.client.sessions()) == 2
        service_of(shop.web).stop()
        answer = await browser.get("/readyz")
        assert (answer.status_code, "stopping" in answer.text) == (503, True)
        assert (await browser.get("/healthz")).status_code == 200


async def test_a_worker_that_cannot_start_keeps_the_instance_from_starting(store_url: str) -> None:
    shop = Shop(store_url)

    @shop.app.on_worker_start
    async def fail(worker: object) -> None:
        raise RuntimeError("no model here")

    with pytest.raises(FairlaneError, match="no model here"):
        async with service_of(shop.web).lifespan():
            pass


async def test_an_instance_whose_worker_has_ended_stops(store_url: str) -> None:
    shop = Shop(store_url, workers=0)
    asked = asyncio.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    try:
        instance = Instance(shop.app)
        async with instance.running():
            # As if it could not register again.
            instance.workers[0].stop(now=True)
            async with asyncio.timeout(10):
                await asked.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        await shop.app.close()
