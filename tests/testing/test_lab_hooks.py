"""Hooks in a lab: they run there as they do in a worker, a lab's `drain` being the life of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane import Fairlane, FairlaneError, RunningJob, RunningWorker, Settings, current_worker, testing


def apart(word: str) -> str:
    """A body that would run in a child process."""
    return word


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def app(told: list[str]) -> Fairlane:
    """An application with hooks of both kinds."""
    app = Fairlane(settings=Settings(url="sqlite:////nowhere/at/all.db"))

    @app.on_worker_start
    async def connect(worker: RunningWorker) -> None:
        await asyncio.sleep(0)
        worker.state.pool = "the pool"

    @app.on_worker_start
    def prepare(worker: RunningWorker) -> None:
        told.append(f"start in {threading.current_thread().name}")

    @app.on_worker_stop
    def disconnect(worker: RunningWorker) -> None:
        told.append(f"stop {worker.state.pool}")

    @app.around_job
    async def outer(job: RunningJob) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        told.append("outer")
        yield

    @app.around_job
    def inner(job: RunningJob) -> Iterator[None]:
        result = yield
        told.append(f"inner saw {result} in {threading.current_thread().name}")
        if result == "bad":
            raise PermissionError("not that")

    @app.task(name="plain")
    def plain(word: str) -> str:
        told.append(f"body in {threading.current_thread().name}")
        return word

    @app.task(name="later")
    async def later(word: str) -> str:
        return f"{word} from {current_worker().state.pool}"

    app.task(name="apart", isolate=True)(apart)
    return app


async def test_hooks_run_around_the_jobs_of_a_drain(app: Fairlane, told: list[str]) -> None:
    async with testing.embedded(app) as lab:
        task = app.registry.find("later")
        assert await lab.run(await task.enqueue("hello")) == "hello from the pool"
        assert told[1:] == ["outer", "inner saw hello from the pool in MainThread", "stop the pool"]


def test_plain_hooks_run_in_the_thread_of_a_blocking_test(app: Fairlane, told: list[str]) -> None:
    with testing.embedded_blocking(app) as lab:
        assert lab.run(app.registry.find("plain").blocking.enqueue("hello")) == "hello"
    assert told == [
        "start in MainThread",
        "outer",
        "body in MainThread",
        "inner saw hello in MainThread",
        "stop the pool",
    ]


@pytest.mark.parametrize("name", ["plain", "apart"])
async def test_what_a_hook_raises_is_raised_in_the_test(app: Fairlane, name: str) -> None:
    async with testing.embedded(app) as lab:
        await app.registry.find(name).enqueue("bad")
        with pytest.raises(PermissionError, match="not that"):
            await lab.drain(errors="raise")


async def test_a_start_hook_that_raises_ends_the_drain(app: Fairlane) -> None:
    @app.on_worker_start
    def broken(worker: RunningWorker) -> None:
        raise ConnectionError("no database")

    async with testing.embedded(app) as lab:
        await app.registry.find("plain").enqueue("hello")
        with pytest.raises(FairlaneError, match="no database"):
            await lab.drain()
        assert [job.fence for job in await lab.jobs()] == [0]
