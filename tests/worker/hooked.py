"""An application with hooks, as a module that child processes import."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from pathlib import Path

from fairlane import Fairlane, RunningJob, RunningWorker, current_job, current_worker

app = Fairlane("sqlite:///never-opened.db")
said: ContextVar[str] = ContextVar("said", default="nothing")


def note(words: str) -> None:
    """Write down what happens, for the test, which is another process."""
    file = os.environ.get("HOOKED_NOTES")
    if file is not None:
        with Path(file).open("a") as notes:
            notes.write(f"{words}\n")


@app.on_worker_start
async def connect(worker: RunningWorker) -> None:
    await asyncio.sleep(0)
    worker.state.pool = f"pool of {'a child' if worker.isolated else 'the worker'}"
    note(f"start {worker.isolated}")


@app.on_worker_start
def prepare(worker: RunningWorker) -> None:
    worker.state.ready = worker.state.pool


@app.on_worker_stop
def disconnect(worker: RunningWorker) -> None:
    note(f"stop {worker.isolated} {worker.state.pool}")


@app.around_job
async def outer(job: RunningJob) -> AsyncIterator[None]:
    await asyncio.sleep(0)
    said.set(f"hello from {job.task}")
    try:
        yield
    except BaseException as exc:
        note(f"outer saw {type(exc).__name__}")
        raise


@app.around_job
def inner(job: RunningJob) -> Iterator[None]:
    assert job is current_job()
    said.set(said.get() + ", twice")
    result = yield
    note(f"inner saw {result}")


@app.task(name="plain", isolate=True)
def plain() -> list[str]:
    return [said.get(), current_worker().state.ready, str(current_worker().isolated)]


@app.task(name="later", isolate=True)
async def later() -> list[str]:
    await asyncio.sleep(0)
    return [said.get(), current_worker().state.ready, str(current_worker().isolated)]


@app.task(name="explode", isolate=True, retries=0)
def explode() -> None:
    raise ValueError("the fuse was lit")
