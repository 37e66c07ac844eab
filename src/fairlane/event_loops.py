"""The event loop of Fairlane's own processes and threads: uvloop where it is installed, otherwise asyncio's own.

This concerns only loops that Fairlane creates. A program with its own event loop chooses it itself; from here it only
gets cheaper reads from sockets (`ease_receiving`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import WeakSet

from .errors import InvalidInput

T = TypeVar("T")
LOOP = "FAIRLANE_LOOP"
LARGER_THAN_A_BUFFER = 2**20
_loops_beside: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop of the kind that FAIRLANE_LOOP selects."""
    wanted = os.environ.get(LOOP, "").strip() or "auto"
    if wanted not in ("auto", "asyncio", "uvloop"):
        raise InvalidInput(LOOP, f"must be auto, asyncio or uvloop, not {wanted!r}")
    if wanted == "asyncio":
        return asyncio.new_event_loop()
    try:
        import uvloop
    except ImportError:
        if wanted == "uvloop":
            raise InvalidInput(LOOP, "uvloop is not installed; pip install 'fairlane[uvloop]'") from None
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_beside(work: Coroutine[Any, Any, T]) -> T:
    """Like `run`, in a background thread of any process: uses uvloop only if it is already imported.

    Such a thread may start at interpreter shutdown, when imports fail, and the process may fork.
    """
    return run(_beside(work)) if "uvloop" in sys.modules else asyncio.run(_beside(work))


async def _beside(work: Coroutine[Any, Any, T]) -> T:
    _loops_beside.add(asyncio.get_running_loop())
    return await work


def is_beside(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop runs in a background thread started by `run_beside`, where latency does not matter."""
    return loop in _loops_beside


def runner() -> asyncio.Runner:
    """A runner that runs coroutines one after the other on such a loop."""
    return asyncio.Runner(loop_factory=new_event_loop)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new loop, as `asyncio.run` does."""
    created = runner()
    try:
        created.get_loop()
    except BaseException:
        # A coroutine that is neither awaited nor closed causes a warning.
        work.close()
        raise
    with created:
        return created.run(work)


def ease_receiving() -> None:
    """Make asyncio read from sockets without a memory mapping for each read.

    asyncio reads into a new buffer of 256 KiB. glibc maps a block of that size and unmaps it after use: three system
    calls and fresh pages for every reply (measured: 50 of the 500 µs of an enqueue). Freeing one larger block raises
    glibc's threshold for the rest of the process, and then the buffer comes from the heap.
    """
    bytes(LARGER_THAN_A_BUFFER)
