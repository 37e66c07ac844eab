"""Which event loop Fairlane's own processes and threads run on: uvloop where it is installed, else asyncio's own.

Only loops that Fairlane makes are meant. A program with an event loop of its own chooses that itself; what it gets from
here is an asyncio whose reading is cheaper (`ease_receiving`).
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
    """An event loop of the kind that is wanted."""
    wanted = os.environ.get(LOOP, "").strip() or "auto"
    if wanted not in ("auto", "asyncio", "uvloop"):
        raise InvalidInput(LOOP, f"{wanted!r} is none of auto, asyncio, uvloop")
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
    """The same as `run`, in a thread of a process that need not be ours: uvloop only if it is here already.

    Such a thread may start as the process ends, when nothing can be imported any more, and the process may fork.
    """
    return run(_beside(work)) if "uvloop" in sys.modules else asyncio.run(_beside(work))


async def _beside(work: Coroutine[Any, Any, T]) -> T:
    _loops_beside.add(asyncio.get_running_loop())
    return await work


def is_beside(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop is that of a thread beside the program's own work, where nobody waits for an answer in a hurry."""
    return loop in _loops_beside


def runner() -> asyncio.Runner:
    """What runs coroutines one after the other on such a loop."""
    return asyncio.Runner(loop_factory=new_event_loop)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop made for it, as `asyncio.run` does."""
    with runner() as made:
        return made.run(work)


def ease_receiving() -> None:
    """Let asyncio read from sockets without asking the kernel for memory each time.

    It reads into a new buffer of 256 KiB. glibc maps memory for so large a block and gives it back after use: three
    calls of the kernel and fresh pages for every answer (measured: 50 of the 500 µs of an enqueue). It stops doing so
    once a larger block was freed, for the rest of the process.
    """
    bytes(LARGER_THAN_A_BUFFER)
