"""What the client sends, repeats and raises, against a scripted service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest

from fairlane import (
    Cancellation,
    Conflict,
    Fairlane,
    FairlaneError,
    InvalidInput,
    JobCancelled,
    JobFailed,
    JobState,
    NotFound,
    NotSupported,
    QueueFull,
    StoreFull,
    StoreUnavailable,
)
from fairlane.http.client import AccessDenied, AsyncClient, Client
from fairlane.http.transport import ServerEvent, parse_events

app = Fairlane("sqlite:///never-opened.db")
Answer = httpx.Response | Exception


@app.task(queue="images", lane="user:{user}", priority="high")
async def render(user: str, size: int = 1) -> str:
    """A picture."""
    return f"{user}/{size}"


class Service:
    """Responds to requests from a script; the last response repeats."""

    def __init__(self, *script: Answer | Callable[[httpx.Request], httpx.Response]) -> None:
        self.script = list(script)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(request) if callable(answer) else answer

    def client(self, **options: Any) -> AsyncClient:
        return AsyncClient("http://service", "a-token", transport=httpx.MockTransport(self), **options)

    @property
    def bodies(self) -> list[Any]:
        return [msgspec.json.decode(request.content) for request in self.requests if request.content]


def accepted(id: str = "a", created: bool = True) -> httpx.Response:
    return httpx.Response(202, json={"id": id, "created": created, "state": "pending"})


def problem(status: int, **more: Any) -> httpx.Response:
    headers = {"Retry-After": str(more["after"])} if "after" in more else {}
    return httpx.Response(status, json={"title": "a title", "detail": "what to do"} | more, headers=headers)


def shown(**fields: Any) -> httpx.Response:
    return httpx.Response(200, json={"id": "a", "state": "pending"} | fields)


def stream(*events: str) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content="".join(events).encode())


async def test_a_task_is_sent_with_its_options_and_its_result_is_read_as_its_type() -> None:
    service = Service(accepted("chosen"), shown(state="completed", result="ann/3"))
    async with service.client() as client:
        handle = await client.enqueue(render.options(priority="normal", retries=0, id="chosen"), "ann", size=3)
        assert handle.id == "chosen"
        assert handle.created
        assert await handle.result(timeout=30) == "ann/3"
    request = service.requests[0]
    assert (request.method, str(request.url)) == ("POST", "http://service/api/v1/jobs")
    assert "Idempotency-Key" not in request.headers
    assert request.headers["Authorization"] == "Bearer a-token"
    assert service.bodies[0] == {
        "task": render.name,
        "args": ["ann"],
        "kwargs": {"size": 3},
        "options": {
            "id": "chosen",
            "queue": "images",
            "lane": "user:ann",
            # Chosen for this call, although it is the default: the service's task may have another.
            "priority": "normal",
            "retries": 0,
        },
    }


async def test_a_name_is_sent_without_the_task() -> None:
    service = Service(accepted())
    async with service.client() as client:
        await client.enqueue("shop.render", "ann", size=3)
        await client.send("shop.render", ["ann"], lane="user:ann", delay=timedelta(seconds=3), id="mine")
    assert service.bodies == [
        {"task": "shop.render", "args": ["ann"], "kwargs": {"size": 3}, "options": {}},
        {
            "task": "shop.render",
            "args": ["ann"],
            "kwargs": {},
            "options": {"lane": "user:ann", "delay": 3.0, "id": "mine"},
        },
    ]
    assert ["Idempotency-Key" in request.headers for request in service.requests] == [True, False]
    with pytest.raises(InvalidInput, match="arguments"):
        await client.enqueue("shop.render", object())


async def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    service = Service(accepted())
    async with service.client() as client:
        with pytest.raises(InvalidInput, match="size"):
            await client.enqueue(render, "ann", size="large")  # type: ignore[arg-type]  # the mistake
        with pytest.raises(InvalidInput, match="not a function"):
            await client.enqueue(render.function)  # type: ignore[call-overload]  # the mistake
    assert not service.requests


@pytest.mark.parametrize(
    "trouble", [httpx.ConnectError("refused"), httpx.ReadError("cut"), problem(503, after=0), problem(502)]
)
async def test_a_lost_answer_is_asked_for_again_under_the_same_key(trouble: Answer) -> None:
    service = Service(trouble, trouble, accepted())
    async with service.client() as client:
        await client.enqueue(render, "ann")
    assert len(service.requests) == 3
    assert len({request.headers["Idempotency-Key"] for request in service.requests}) == 1
    service = Service(trouble, accepted())
    async with service.client() as client:
        await client.enqueue(render.call("ann"))
    assert service.requests[0].content == service.requests[1].content


async def test_patience_has_an_end() -> None:
    async with Service(httpx.ConnectError("refused")).client(patience=0) as client:
        with pytest.raises(StoreUnavailable, match="cannot reach the service at http://service"):
            await client.enqueue(render, "ann")
    # The service asks for more time than there is: it is not asked again.
    service = Service(problem(503, after=60))
    async with service.client(patience=1) as client:
        with pytest.raises(StoreUnavailable, match="what to do"):
            await client.enqueue(render, "ann")
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(400), InvalidInput),
        (problem(401), AccessDenied),
        (problem(403), AccessDenied),
        (problem(404), NotFound),
        (problem(409), Conflict),
        (problem(413), InvalidInput),
        (problem(409, field="id"), InvalidInput),
        (problem(422, field="options.lane"), InvalidInput),
        (problem(503, field="x", after=99), StoreUnavailable),
        (problem(429, retry_after=7.5), QueueFull),
        (problem(500), FairlaneError),
        (problem(501), NotSupported),
        (problem(507), StoreFull),
        (httpx.Response(418, text="<html>"), FairlaneError),
        (httpx.Response(200, text="<html>"), FairlaneError),
        (httpx.Response(200, json=["not", "a job"]), FairlaneError),
    ],
)
async def test_problems_are_the_errors_of_the_call_in_process(answer: httpx.Response, error: type[Exception]) -> None:
    service = Service(answer)
    async with service.client() as client:
        with pytest.raises(error) as raised:
            await client.enqueue(render, "ann")
    assert len(service.requests) == 1
    if isinstance(raised.value, QueueFull):
        assert raised.value.retry_after == 7.5
    if answer.status_code == 422:
        assert isinstance(raised.value, InvalidInput)
        assert (raised.value.field, raised.value.problem) == ("lane", "what to do")


async def test_a_result_is_waited_for_in_several_requests() -> None:
    service = Service(shown(), shown(state="running"), httpx.ReadError("cut"), shown(state="completed", result=[1]))
    async with service.client() as client:
        assert await client.handle("a/b").result() == [1]
    assert service.requests[0].url.raw_path == b"/api/v1/jobs/a%2Fb/result?wait=0.000"
    assert service.requests[1].url.params["wait"] == "20.000"


async def test_a_result_is_waited_for_through_an_outage() -> None:
    # The service dies in the first long poll, and its patience is over before it is back.
    away = httpx.ConnectError("refused")
    service = Service(shown(), httpx.ReadError("cut"), away, shown(state="completed", result=1))
    async with service.client(patience=0) as client:
        assert await client.handle("a").result() == 1
    service = Service(shown(), away)
    async with service.client(patience=0) as client:
        with pytest.raises(
            TimeoutError, match=r"whether job a has ended within 0\.2 s is unknown: .*refused"
        ) as caught:
            await client.handle("a").result(timeout=0.2)
    assert isinstance(caught.value.__cause__, StoreUnavailable)


async def test_a_moment_needs_a_time_zone_by_name_too() -> None:
    service = Service(httpx.ConnectError("nothing is sent"))
    async with service.client(patience=0) as client:
        with pytest.raises(InvalidInput, match="run_at: has no time zone"):
            await client.send("work", run_at=datetime(2030, 1, 1))  # noqa: DTZ001 - that is the mistake
    assert not service.requests


async def test_other_endings_are_raised() -> None:
    script = [
        shown(state="failed", reason="error", error="Traceback\nValueError: no"),
        shown(state="cancelled", reason="expired"),
        problem(404),
        shown(state="running"),
    ]
    async with Service(*script).client() as client:
        handle = client.handle("a")
        with pytest.raises(JobFailed, match="ValueError: no"):
            await handle.result()
        with pytest.raises(JobCancelled, match="expired"):
            await handle.result()
        with pytest.raises(NotFound):
            await handle.result()
        with pytest.raises(TimeoutError):
            await handle.result(timeout=0)


async def test_a_new_caller_gets_an_error_during_an_outage() -> None:
    async with Service(httpx.ConnectError("refused")).client(patience=0) as client:
        with pytest.raises(StoreUnavailable):
            await client.handle("a").result(timeout=5)
        with pytest.raises(StoreUnavailable):
            await anext(client.handle("a").watch())


async def test_reading_one_job() -> None:
    place = {"ahead": 1, "place": 2, "of": 3, "exact": True, "eta": 4.5, "queue_ahead": 7, "of_exact": True}
    view = shown(
        position=place, eta=4.5, why="1 ahead", progress={"done": 3}, priority="high", payload=[["ann"], {}], lane="l"
    )
    async with Service(view).client() as client:
        handle = client.handle("a")
        position = await handle.position()
        assert position is not None
        assert (position.place, position.of, await handle.eta()) == (2, 3, 4.5)
        assert await handle.why() == "1 ahead"
        assert await handle.state() is JobState.PENDING
        assert await handle.progress() == {"done": 3}
    async with Service(shown(priority="high", payload=[["ann"], {}], lane="l")).client() as client:
        job = await client.handle("a").job()
        assert (job.payload, job.lane, job.priority.label, job.result) == (b'[["ann"],{}]', "l", "high", None)
    async with Service(problem(404)).client() as client:
        assert await client.handle("a").position() is None
        assert await client.handle("a").eta() is None
        with pytest.raises(NotFound):
            await client.handle("a").why()


async def test_a_cancel_is_repeated_and_a_retry_is_not() -> None:
    service = Service(
        httpx.ReadError("cut"),
        httpx.Response(200, json={"id": "a", "answer": "requested"}),
        httpx.Response(202, json={"id": "b", "retry_of": "a"}),
        httpx.ReadError("cut"),
    )
    async with service.client() as client:
        handle = client.handle("a")
        assert await handle.cancel() is Cancellation.REQUESTED
        assert (await handle.retry()).id == "b"
        with pytest.raises(StoreUnavailable):
            await handle.retry()
    assert len(service.requests) == 4


async def test_a_watch_goes_on_where_the_stream_broke() -> None:
    waiting = 'id: 7\nevent: position\ndata: {"state":"pending","position":%s}\n\n'
    place = '{"ahead":%d,"place":%d,"of":3,"exact":true,"eta":null,"queue_ahead":1,"of_exact":true}'
    service = Service(
        stream("retry: 10\n\n", waiting % (place % (1, 2)), ": a heartbeat\n\n", 'id: 9\ndata: {"state":"pen'),
        problem(503, after=0),
        stream("retry: 10\n", waiting % (place % (1, 2)), waiting % (place % (0, 1)), 'data: {"progress":50}\n\n'),
        stream('data: {"state":"running"}\n\n', 'data: {"state":"completed"}\n\n', 'data: {"state":"failed"}\n\n'),
    )
    async with service.client() as client:
        async with asyncio.timeout(10):
            updates = [update async for update in client.handle("a").watch()]
    told = [(u.state.value, u.position and u.position.place, u.progress) for u in updates]
    # Updates from before the break are not repeated, and nothing follows the final state.
    assert told == [
        ("pending", 2, None),
        ("pending", 1, None),
        ("pending", 1, 50),
        ("running", None, 50),
        ("completed", None, 50),
    ]
    assert [request.headers.get("Last-Event-ID") for request in service.requests] == [None, "7", "7", "7"]


async def test_events_of_every_shape_are_read() -> None:
    async def lines() -> Any:
        for line in ["event: a", "data: 1", "data:2", "id: 3", "", ": note", "", "retry: 250", "data", "", "data: cut"]:
            yield line

    assert [event async for event in parse_events(lines())] == [
        ServerEvent("a", "1\n2", "3"),
        ServerEvent("message", "", "3", 0.25),
    ]


async def test_a_watch_ends_with_the_job() -> None:
    running = 'event: state\ndata: {"state":"running"}\n\n'
    outage = 'event: problem\ndata: {"status":503,"detail":"away"}\n\n'
    service = Service(
        stream("retry: 10\n\n", running, outage), stream("retry: 10\n\n", 'event: gone\ndata: {"id":"a"}\n\n')
    )
    async with service.client() as client:
        updates = client.handle("a").watch()
        assert (await anext(updates)).state is JobState.RUNNING
        with pytest.raises(NotFound):
            await anext(updates)
    async with Service(stream(outage)).client() as client:
        with pytest.raises(StoreUnavailable, match="away"):
            await anext(client.handle("a").watch())


async def test_many_calls_are_sent_as_one_batch() -> None:
    service = Service(httpx.Response(202, json={"jobs": [{"id": "a", "created": True}, {"id": "b", "created": False}]}))
    async with service.client() as client:
        calls = [render.call("ann"), render.call("bob")]
        handles = await client.enqueue_many(calls)
    assert [(handle.id, handle.created) for handle in handles] == [("a", True), ("b", False)]
    [body] = service.bodies
    assert [job["options"]["id"] for job in body] == [call.job.id for call in calls]
    assert service.requests[0].url.path == "/api/v1/jobs:batch"


@pytest.mark.parametrize(
    ("url", "token", "field"),
    [("", None, "url"), ("service:80", None, "url"), ("ftp://x", None, "url"), ("http://x", "a\nb", "token")],
)
def test_bad_settings_are_refused(url: str, token: str | None, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        AsyncClient(url, token)
    assert refused.value.field == field


def test_a_password_in_the_address_is_not_shown() -> None:
    client = AsyncClient("http://ann:secret@service/queue?x=1", "a-token")
    assert repr(client) == "<AsyncClient of http://service/queue>"


def test_one_client_serves_several_event_loops() -> None:
    client = Service(shown()).client()

    async def ask() -> JobState:
        return await client.handle("a").state()

    assert asyncio.run(ask()) is asyncio.run(ask()) is JobState.PENDING


def test_the_blocking_client_raises_the_same() -> None:
    with Client("http://127.0.0.1:9", patience=0) as client, pytest.raises(StoreUnavailable):
        client.enqueue(render, "ann")
