"""Event streams: the true state first, every change that matters, the end; heartbeats, limits, slow readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fairlane import Fairlane
from fairlane.http import HttpSettings, create_app, service_of
from fairlane.model.job import Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots

from .conftest import API
from .test_jobs import is_problem, send

Message = MutableMapping[str, Any]


class Stream:
    """A stream that is read chunk by chunk: in process, httpx returns only complete responses."""

    def __init__(self, web: FastAPI, path: str, **headers: str) -> None:
        self._web = web
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self._leave = asyncio.Event()
        self.blocked: asyncio.Event | None = None
        raw = [(b"host", b"localhost"), *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items())]
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "headers": raw,
            "query_string": query.encode(),
            "root_path": "",
            "client": ("127.0.0.1", 1),
            "http_version": "1.1",
            "scheme": "http",
            "server": ("localhost", 80),
        }
        self.status = 0

    async def __aenter__(self) -> Stream:
        self.task = asyncio.create_task(self._web(self._scope, self._receive, self._send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave.set()
        await asyncio.wait_for(self.task, 10)

    async def _receive(self) -> Message:
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.blocked is not None:
            await self.blocked.wait()
        self._parts.put_nowait(message)

    async def parts(self) -> AsyncIterator[str]:
        while True:
            message = await asyncio.wait_for(self._parts.get(), 20)
            if message["type"] == "http.response.body":
                if message["body"]:
                    yield message["body"].decode()
                if not message.get("more_body"):
                    return

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any], str | None]]:
        async for part in self.parts():
            fields = dict(line.partition(": ")[::2] for line in part.strip().split("\n"))
            if "event" in fields:
                yield fields["event"], json.loads(fields["data"]), fields.get("id")


async def test_a_stream_sends_the_state_first_then_changes_and_ends_with_the_result(
    http: httpx.AsyncClient, web: FastAPI, app: Fairlane
) -> None:
    before = await send(http, "add", 1, lane="model:a", queue="pictures")
    # For a second, so that a busy machine sees some of its steps.
    id = await send(http, "steps", 20, lane="model:a", queue="pictures")
    seen: list[tuple[str, dict[str, Any], str | None]] = []
    async with Stream(web, f"{API}/jobs/{id}/events") as stream:
        events = stream.events()
        seen.append(await anext(events))
        kind, first, _ = seen[0]
        assert (kind, first["state"], first["position"]["place"], first["position"]["of"]) == ("state", "pending", 2, 2)
        await http.post(f"{API}/jobs/{before}/cancel")
        seen.append(await anext(events))
        assert (seen[1][0], seen[1][1]["position"]["place"]) == ("position", 1)
        worker = asyncio.create_task(app.worker(burst=True, slots=2).run())
        seen += [each async for each in events]
        await worker
    kinds = [kind for kind, _, _ in seen]
    assert "progress" in kinds
    _, last, name = seen[-1]
    assert (last["state"], last["final"], last["result"]) == ("completed", True, 20)
    assert name is not None
    assert name.startswith("final-")
    async with Stream(web, f"{API}/jobs/{id}/events", last_event_id="0815") as again:
        [(kind, told, _)] = [each async for each in again.events()]
        assert (kind, told["result"]) == ("state", 20)
    done = await http.get(f"{API}/jobs/{id}/events", headers={"Last-Event-ID": name})
    assert done.status_code == 204


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_a_silent_stream_gets_heartbeats_and_ends_when_the_service_stops(
    http: httpx.AsyncClient, web: FastAPI
) -> None:
    id = await send(http, "add", 1)
    async with Stream(web, f"{API}/jobs/{id}/events") as stream:
        parts = stream.parts()
        assert "retry: " in await anext(parts)
        assert "event: state" in await anext(parts)
        assert await anext(parts) == ": alive\n\n"
        assert service_of(web).open_streams == 1
        poll = asyncio.create_task(http.get(f"{API}/jobs/{id}/result", params={"wait": 30}))
        await asyncio.sleep(0.05)
        service_of(web).stop()
        assert [part async for part in parts if not part.startswith(":")] == []
        assert (await asyncio.wait_for(poll, 30)).status_code == 202
    assert service_of(web).open_streams == 0


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_a_slow_reader_is_cut_off_and_nothing_is_queued_for_it(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(slow_reader=0.1, token_seconds=0.001))
    handle = await app.registry.find("steps").enqueue(1)
    stream = Stream(web, f"{API}/jobs/{handle.id}/events")
    async with stream:
        parts = stream.parts()
        await anext(parts)
        await anext(parts)
        stream.blocked = asyncio.Event()
        await handle.cancel()
        await asyncio.wait_for(stream.task, 30)
    assert service_of(web).open_streams == 0


class ReadsNoEnd(Stream):
    """A client whose buffers are full when the stream is complete."""

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await asyncio.Event().wait()
        await super()._send(message)


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_a_reader_that_is_slow_at_the_end_is_cut_off_too(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(slow_reader=0.1))
    handle = await app.registry.find("steps").enqueue(1)
    await handle.cancel()
    async with ReadsNoEnd(web, f"{API}/jobs/{handle.id}/events") as stream:
        await asyncio.wait_for(asyncio.shield(stream.task), 30)
    assert service_of(web).open_streams == 0


class ChangesMany(ReadsNoEnd):
    """The same client, which cancels every job and asks for the progress."""

    def __init__(self, web: FastAPI) -> None:
        super().__init__(web, f"{API}/jobs:cancel", content_type="application/json", accept="application/x-ndjson")
        self._scope["method"] = "POST"
        self._body = b'{"all": true}'

    async def _receive(self) -> Message:
        body, self._body = self._body, b""
        return {"type": "http.request", "body": body, "more_body": False} if body else await super()._receive()


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_a_reader_of_a_bulk_change_that_is_slow_at_the_end_is_cut_off(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(slow_reader=0.1))
    handle = await app.registry.find("steps").enqueue(1)
    async with ChangesMany(web) as stream:
        await asyncio.wait_for(asyncio.shield(stream.task), 30)
    assert service_of(web).open_streams == 0
    assert (await handle.job()).state.final


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_one_caller_has_so_many_streams(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(streams_per_caller=1))
    handle = await app.registry.find("steps").enqueue(1)
    async with Stream(web, f"{API}/jobs/{handle.id}/events") as first:
        await anext(first.parts())
        async with Stream(web, f"{API}/jobs/{handle.id}/events") as second:
            assert "too many open streams" in await anext(second.parts())
            assert second.status == 429


async def test_all_streams_of_the_system_share_one_read(
    http: httpx.AsyncClient, app: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = create_app(app, settings=HttpSettings(sample=0.05))
    looks = 0
    real = app.client.queues

    async def counted() -> Any:
        nonlocal looks
        looks += 1
        return await real()

    monkeypatch.setattr(app.client, "queues", counted)
    async with Stream(web, f"{API}/events") as one, Stream(web, f"{API}/events") as two:
        events, others = one.events(), two.events()
        kind, first, _ = await anext(events)
        assert kind == "queues"
        assert first["store"] == "up"
        await anext(others)
        looked = looks
        await send(http, "add", 1)
        for each in (events, others):
            async for kind, told, _ in each:
                if kind != "queues":
                    continue
                [queue] = [queue for queue in told["queues"] if queue["name"] == "default"] or [{"pending": 0}]
                if queue["pending"]:
                    break
        assert looks - looked < 40
    await asyncio.sleep(0.1)
    after = looks
    await asyncio.sleep(0.2)
    assert looks == after


async def test_a_long_poll_answers_when_the_job_ends(http: httpx.AsyncClient, app: Fairlane) -> None:
    id = await send(http, "add", 1)
    poll = asyncio.create_task(http.get(f"{API}/jobs/{id}/result", params={"wait": 20}))
    await asyncio.sleep(0.05)
    await app.worker(burst=True).run()
    answer = await asyncio.wait_for(poll, 30)
    assert (answer.status_code, answer.json()["result"]) == (200, 2)
    assert is_problem(await http.get(f"{API}/jobs/{id}/result", params={"wait": -1}), 422, "wait")


async def test_a_request_to_stop_is_delivered_although_the_state_is_the_same(
    http: httpx.AsyncClient, web: FastAPI, app: Fairlane
) -> None:
    id = await send(http, "steps", 1)
    store = await app.connection.store()
    await store.register(
        NewSession(id="w", kind=SessionKind.WORKER, lease=60, queues=("default",), slots=Slots(total=1))
    )

    [first] = await store.claim("w", Claim(number=1, asks=(Ask("default", Priority.NORMAL, 1),), total=1))
    async with Stream(web, f"{API}/jobs/{id}/events") as stream:
        events = stream.events()
        kind, told, _ = await anext(events)
        assert (kind, told["state"], told["fence"], told["cancel_requested"]) == (
            "state",
            "running",
            first.fence,
            False,
        )
        assert told["attempt"] == 1
        await http.post(f"{API}/jobs/{id}/cancel")
        kind, told, _ = await anext(events)
        assert (kind, told["state"], told["cancel_requested"]) == ("state", "running", True)


@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_a_topic_survives_an_unexpected_error(
    app: Fairlane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    web = create_app(app, settings=HttpSettings(sample=0.02))
    real = app.client.queues

    async def broken() -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(app.client, "queues", broken)
    async with Stream(web, f"{API}/events") as stream:
        events = stream.events()
        _, told, _ = await anext(events)
        assert told["store"] == "away"
        assert "cannot make queues events" in caplog.text
        monkeypatch.setattr(app.client, "queues", real)
        async with asyncio.timeout(30):
            while told["store"] == "away":
                kind, told, _ = await anext(events)
                assert kind in ("queues", "workers")


async def test_a_queue_is_watched_from_its_first_moment(app: Fairlane) -> None:
    web = create_app(app, settings=HttpSettings(sample=60))
    async with Stream(web, f"{API}/events") as others:
        assert (await anext(others.events()))[1]["store"] == "up"
        await app.enqueue_many([app.registry.find("add").options(queue="fresh").call(1, 2)])
        async with Stream(web, f"{API}/queues/fresh/events") as stream:
            _, told, _ = await anext(stream.events())
            assert (told["store"], told["queue"]["name"]) == ("up", "fresh")
