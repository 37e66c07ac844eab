"""Hooks at both ends of a worker, the state that its jobs share, and the same in child processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from fairlane import Fairlane, FairlaneError, RunningJob, RunningWorker, current_worker
from fairlane.worker import lifetime

from . import hooked
from .hook_kit import both, coroutine, ran
from .yard import QUICK

# -- both ends of a worker -------------------------------------------------------------------------------------------


@both
async def test_state_of_a_start_hook_is_available_to_jobs_hooks_and_stop_hooks(app: Fairlane, task: Any) -> None:
    told: list[str] = []

    @app.on_worker_start
    async def connect(worker: RunningWorker) -> None:
        worker.state.pool = ["a connection"]

    @app.on_worker_start
    def prepare(worker: RunningWorker) -> None:
        assert worker is current_worker()
        worker.state.pool.append("another")

    @app.on_worker_stop
    def first(worker: RunningWorker) -> None:
        told.append("first declared, last run")

    @app.on_worker_stop
    async def second(worker: RunningWorker) -> None:
        told.append(f"{len(worker.state.pool)} to close")

    @app.around_job
    async def hook(job: RunningJob) -> AsyncIterator[None]:
        told.append(f"around {len(current_worker().state.pool)}")
        yield

    job = await ran(app, task(app, lambda: len(current_worker().state.pool)))
    assert (job.result, told) == (b"2", ["around 2", "2 to close", "first declared, last run"])
    with pytest.raises(FairlaneError, match="outside a worker"):
        current_worker()


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_start_hook_that_raises_keeps_the_worker_from_starting(
    app: Fairlane, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def connect(worker: RunningWorker) -> None:
        raise ConnectionError("no database")

    async def connect_later(worker: RunningWorker) -> None:
        connect(worker)

    app.on_worker_start(connect if kind == "plain" else connect_later)
    app.on_worker_start(lambda worker: told.append("the next one"))
    app.on_worker_stop(lambda worker: told.append("stop"))
    work = coroutine(app, lambda: told.append("body"))
    handle = await work.enqueue()
    with pytest.raises(FairlaneError, match=r"does not start.*connect.* raised ConnectionError: no database"):
        await app.worker(burst=True).run()
    assert told == []
    assert (await handle.job()).fence == 0
    assert [session for session in await app.client.sessions() if session.worker] == []
    [record] = [r for r in caplog.records if "does not start" in r.getMessage()]
    assert record.exc_info is not None


async def test_stop_hooks_run_after_the_jobs_have_ended_and_their_errors_stop_no_other(
    app: Fairlane, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    begun = asyncio.Event()

    @app.on_worker_stop
    def last(worker: RunningWorker) -> None:
        told.append("stop")

    @app.on_worker_stop
    async def broken(worker: RunningWorker) -> None:
        raise OSError("cannot close")

    @app.task(name="nap")
    async def nap() -> None:
        begun.set()
        await asyncio.sleep(0.2)
        told.append("body")

    worker = app.worker(slots=2)
    serving = asyncio.create_task(worker.run())
    await nap.enqueue()
    await asyncio.wait_for(begun.wait(), 20)
    worker.stop()
    await serving
    assert told == ["body", "stop"]
    assert "on_worker_stop hook" in caplog.text
    assert "cannot close" in caplog.text


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_start_hook_that_does_not_end_keeps_no_worker_from_stopping(
    app: Fairlane, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    begun, let_go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def connect_later(worker: RunningWorker) -> None:
        begun.set()
        await asyncio.sleep(3_600)

    def connect(worker: RunningWorker) -> None:
        loop.call_soon_threadsafe(begun.set)
        let_go.wait(30)

    app.on_worker_start(connect if kind == "plain" else connect_later)
    app.on_worker_stop(lambda worker: told.append("stop"))
    coroutine(app, lambda: told.append("body"))
    worker = app.worker(grace=0.2)
    serving = asyncio.create_task(worker.run())
    await asyncio.wait_for(begun.wait(), 20)
    worker.stop()
    await asyncio.wait_for(serving, 10)
    let_go.set()
    assert told == []
    assert [session for session in await app.client.sessions() if session.worker] == []
    assert "stopped before its on_worker_start hooks had ended" in caplog.text


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_stop_hook_that_does_not_end_is_left_behind(
    app: Fairlane, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifetime, "STOP_SECONDS", 0.1)
    let_go = threading.Event()

    async def hang_later(worker: RunningWorker) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)

    def hang(worker: RunningWorker) -> None:
        let_go.wait(60)

    app.on_worker_stop(hang if kind == "plain" else hang_later)
    coroutine(app, lambda: None)
    began = time.monotonic()
    await app.worker(burst=True).run()
    assert time.monotonic() - began < 20
    assert "took too long and was left behind" in caplog.text
    let_go.set()


async def test_a_worker_without_hooks_has_a_state_too(app: Fairlane) -> None:
    assert (await ran(app, coroutine(app, lambda: vars(current_worker().state)))).result == b"{}"


# -- child processes -------------------------------------------------------------------------------------------------


@pytest.fixture
async def notes(
    store_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], list[str]]]:
    """The application of the module `hooked` at this store, and what its hooks have written down."""
    file = tmp_path / "notes"
    monkeypatch.setenv("HOOKED_NOTES", str(file))
    before = hooked.app.settings
    hooked.app.settings = msgspec.structs.replace(before, url=store_url, intervals=QUICK)
    yield lambda: file.read_text().splitlines()
    await hooked.app.close()
    hooked.app.settings = before


@pytest.mark.parametrize("task", [hooked.plain, hooked.later], ids=["plain", "coroutine"])
async def test_hooks_run_in_child_processes(notes: Callable[[], list[str]], task: Any) -> None:
    job = await ran(hooked.app, task)
    assert job.error is None
    said = ["hello from " + job.task + ", twice", "pool of a child", "True"]
    assert msgspec.json.decode(job.result or b"") == said
    assert notes() == [
        "start False",
        "start True",
        f"inner saw {said}",
        "stop True pool of a child",
        "stop False pool of the worker",
    ]


async def test_hooks_in_a_child_process_see_what_its_body_raised(notes: Callable[[], list[str]]) -> None:
    job = await ran(hooked.app, hooked.explode)
    assert job.error_group == "ValueError in explode"
    assert "outer saw ValueError" in notes()
