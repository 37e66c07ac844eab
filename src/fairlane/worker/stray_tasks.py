"""Keeps what bodies start from ending the worker.

``sys.exit()`` in a body is an error of that body, and so is a KeyboardInterrupt that it raises. In a task that a body
has started they would leave through the event loop instead, end the process and give everything back uncharged, to be
run and to end the next process too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..runtime.running_job import current_job_or_none

MARK = "guards_bodies"


def guard_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Make every task that is started inside a body one that cannot end the process."""
    usual = loop.get_task_factory()
    if getattr(usual, MARK, False):
        return  # another worker has been here

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Future[Any]:
        if current_job_or_none() is not None:
            coroutine = _guarded(coroutine)
        if usual is not None:
            return usual(loop, coroutine, **options)
        return asyncio.Task(coroutine, loop=loop, **options)

    setattr(make, MARK, True)
    loop.set_task_factory(make)


async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except SystemExit as exc:
        raise RuntimeError(f"sys.exit({exc.code!r}) in a task that a body started") from exc
    except KeyboardInterrupt as exc:
        raise RuntimeError("KeyboardInterrupt in a task that a body started") from exc
