"""Stops a process as a suspended machine would, but at a moment when others can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fairlane.store.port import Store

LOOKS = 50
MOMENT = 0.05


async def freeze(stop: Callable[[], None], proceed: Callable[[], None], store: Store, pid: int | None = None) -> None:
    """Stop a process outside of its writes: one that is stopped while it holds a file's lock stops all others.

    A thread of it that waits for the lock may still get it before it stands still, so the look at the store comes after
    all have stopped; without its `pid`, after a moment.
    """
    for _ in range(LOOKS):
        stop()
        try:
            async with asyncio.timeout(0.5):
                if pid is None:
                    await store.promote()
                    await asyncio.sleep(MOMENT)
                while pid is not None and not _stands_still(pid):
                    await asyncio.sleep(0.001)
                await store.promote()
                return
        except TimeoutError:
            proceed()
    pytest.fail("the process was in the middle of a write each time")


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process have stopped."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)
