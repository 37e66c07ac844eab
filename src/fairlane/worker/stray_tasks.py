"""Keeps asyncio tasks that jobs start from ending the worker.

``sys.exit()`` in a job function is an error of that job, and so is a KeyboardInterrupt that it raises. In an asyncio
task that the function has started, they would propagate through the event loop instead and end the process. All its
jobs would be handed back uncharged, run again, and end the next process too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..runtime.running_job import current_job_or_none

MARK = "guards_stray_tasks"


def guard_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Make sure that no asyncio task that a job starts can end the process."""
    usual = loop.get_task_factory()
    if getattr(usual, MARK, False):
        return  # another worker of this loop has done it

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
        raise RuntimeError(f"sys.exit({exc.code!r}) in an asyncio task that the job started") from exc
    except KeyboardInterrupt as exc:
        raise RuntimeError("KeyboardInterrupt in an asyncio task that the job started") from exc
