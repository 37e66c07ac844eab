"""Waiting for conditions, instead of sleeping for a fixed time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

GENEROUS = 30.0


async def until(true: Callable[[], bool], timeout: float = GENEROUS) -> None:
    """Wait until `true()`."""
    async with asyncio.timeout(timeout):
        while not true():
            await asyncio.sleep(0.005)


async def until_awaited(true: Callable[[], Awaitable[bool]], timeout: float = GENEROUS) -> None:
    """Wait until `await true()`."""
    async with asyncio.timeout(timeout):
        while not await true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(coroutine: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[object]]:
    """Run it beside the block. It is cancelled at the end, and its error is raised here."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
