"""What the type checker must see: arguments and results flow through every way to send a job. Checked, never run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, assert_type

from fairlane import (
    BlockingHandle,
    BroadcastHandle,
    Call,
    Cancellation,
    Fairlane,
    Handle,
    JobState,
    Position,
    Release,
    RunningJob,
    RunningWorker,
    Turn,
    Update,
    current_job,
    current_worker,
)
from fairlane.http import AsyncClient, Client

app = Fairlane("sqlite:///never-opened.db")


@app.task(queue="images", lane="user:{user}", retries=3, timeout=120)
async def render(user: str, prompt: str, *, size: int = 512) -> bytes:
    """A coroutine function with settings."""
    return prompt.encode() * size


@app.task
async def ping() -> float:
    """A coroutine function, bare."""
    return 0.0


@app.task(isolate=True)
def resize(path: str, factor: float) -> tuple[int, int]:
    """A plain function with settings."""
    return (len(path), int(factor))


@app.task(retry_on=(ConnectionError, TimeoutError), no_retry_on=ConnectionRefusedError)
async def fetch(url: str) -> str:
    """Retried by the class of the error."""
    return url


@app.on_worker_start
async def connect(worker: RunningWorker) -> None:
    """A hook that is a coroutine function."""
    worker.state.pool = [worker.isolated]


@app.on_worker_stop
def disconnect(worker: RunningWorker) -> None:
    """A hook that is a plain function."""
    worker.state.pool.clear()


@app.around_job
def timed(job: RunningJob) -> Iterator[None]:
    """A hook that is a generator."""
    assert_type(job.attempt, int)
    yield


@app.around_job
async def watched(job: RunningJob) -> AsyncGenerator[None, Any]:
    """A hook that is an async generator, and wants the result."""
    result = yield
    assert_type(result, Any)


assert_type(current_worker(), RunningWorker)


@app.task
def purge(model: str) -> None:
    """A plain function, bare."""


async def results_have_the_type_of_the_function() -> None:
    assert_type(await render.enqueue("ann", "a cat"), Handle[bytes])
    assert_type(await (await render.enqueue("ann", "a cat", size=64)).result(timeout=60), bytes)
    assert_type(await (await ping.enqueue()).result(), float)
    assert_type(await (await resize.enqueue("a", 0.5)).result(), tuple[int, int])
    assert_type(await (await render.options(priority="high", delay=30).enqueue("b", "c")).result(), bytes)
    assert_type(await (await (await resize.enqueue("a", 1)).retry()).result(), tuple[int, int])


async def tasks_are_called_as_their_functions_are() -> None:
    running = render("ann", "a cat")
    _: Coroutine[Any, Any, bytes] = running
    assert_type(await running, bytes)
    assert_type(await ping(), float)
    assert_type(resize("a", 2.0), tuple[int, int])


async def calls_keep_their_type() -> None:
    assert_type(render.call("ann", "a cat"), Call[bytes])
    assert_type(await app.enqueue_many([resize.call(p, 0.5) for p in "abc"]), list[Handle[tuple[int, int]]])
    broadcast = await app.broadcast(ping.call())
    assert_type(broadcast, BroadcastHandle[float])
    assert_type(await broadcast.result(), dict[str, JobState])
    assert_type(await broadcast.children(), dict[str, Handle[float]])
    assert_type(await app.enqueue_on(object(), resize.call("a", 0.5)), list[Handle[tuple[int, int]]])
    assert_type(await app.release("plan-7", cleanup=purge.call("m")), Release)
    assert_type(await app.handle("id", render).result(), bytes)
    assert_type(await app.handle("id").result(), Any)


async def handles_tell() -> None:
    handle = await ping.enqueue()
    assert_type(await handle.position(), Position | None)
    assert_type(await handle.eta(), float | None)
    assert_type(await handle.why(), str)
    assert_type(await handle.cancel(), Cancellation)
    async for update in handle.watch():
        assert_type(update, Update)
    async with app.turn("flux", queue="models", on_position=print) as turn:
        assert_type(turn, Turn)


async def a_body_asks_for_its_transaction() -> None:
    assert_type(await current_job().transaction(), Any)


def blocking_code_has_the_same_types() -> None:
    assert_type(render.blocking.enqueue("ann", "a cat"), BlockingHandle[bytes])
    assert_type(render.blocking.enqueue("ann", "a cat").result(timeout=1), bytes)
    assert_type(resize.options(worker=2).blocking.enqueue("a", 0.5).result(), tuple[int, int])
    assert_type(app.blocking.enqueue(ping.call()).result(), float)
    assert_type(app.blocking.enqueue_many([ping.call()]), list[BlockingHandle[float]])
    assert_type(app.blocking.enqueue_on(object(), ping.call(), ping.call()), list[BlockingHandle[float]])
    assert_type(app.blocking.broadcast(ping.call()).children(), dict[str, BlockingHandle[float]])
    assert_type(app.blocking.handle("id", render).result(), bytes)
    for update in ping.blocking.enqueue().watch():
        assert_type(update, Update)
    with app.blocking.turn("flux", on_position=print) as turn:
        assert_type(turn, Turn)


async def over_http(client: AsyncClient, blocking: Client) -> None:
    """Types flow through the service as well."""
    assert_type(await client.enqueue(render, "ann", "a cat", size=3), Handle[bytes])
    assert_type(await client.enqueue(resize.options(priority="high"), "a.png", 0.5), Handle[tuple[int, int]])
    assert_type(await client.enqueue(ping.call()), Handle[float])
    assert_type(await client.enqueue("shop.render", "ann"), Handle[Any])
    assert_type(await client.enqueue_many([ping.call()]), list[Handle[float]])
    assert_type(client.handle("id", render), Handle[bytes])
    assert_type(blocking.enqueue(render, "ann", "a cat"), BlockingHandle[bytes])
    assert_type(blocking.enqueue(ping).result(timeout=5), float)
    await client.enqueue(render, "ann")  # type: ignore[call-overload]  # an argument is missing
    await client.enqueue(render, "ann", 3)  # type: ignore[call-overload]  # the second argument is text
