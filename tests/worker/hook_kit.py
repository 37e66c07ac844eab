"""Tasks of both kinds, whose functions a test provides, and a way to run one job of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fairlane import Backoff, Fairlane, Job

AT_ONCE = Backoff(base=0, most=0)


def coroutine(app: Fairlane, body: Callable[[], Any], **settings: Any) -> Any:
    """A task that is a coroutine function."""

    async def work() -> Any:
        await asyncio.sleep(0)
        return body()

    return app.task(name="work", backoff=AT_ONCE, **settings)(work)


def plain(app: Fairlane, body: Callable[[], Any], **settings: Any) -> Any:
    """A task that is a plain function, which runs in a thread."""

    def work() -> Any:
        return body()

    return app.task(name="work", backoff=AT_ONCE, **settings)(work)


both = pytest.mark.parametrize("task", [coroutine, plain])


async def ran(app: Fairlane, task: Any) -> Job:
    """The job of a task once a worker has run all there is."""
    handle = await task.enqueue()
    await app.worker(slots=2, burst=True).run()
    job: Job = await handle.job()
    return job


def explode() -> None:
    raise ValueError("the fuse was lit")
