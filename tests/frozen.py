"""Stops a process as a suspended machine would, but at a moment when others can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fairlane.store import Store

LOOKS = 50


async def freeze(stop: Callable[[], None], proceed: Callable[[], None], store: Store) -> None:
    """Stop a process outside of its writes: one that is stopped while it holds a file's lock stops everybody."""
    for _ in range(LOOKS):
        stop()
        try:
            async with asyncio.timeout(0.5):
                await store.promote()
                return
        except TimeoutError:
            proceed()
    pytest.fail("the process was in the middle of a write each time")
