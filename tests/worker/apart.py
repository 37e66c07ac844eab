"""Short names for running jobs in child processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fairlane.model.job import Claimed, Held, JobKind, Priority
from fairlane.model.retry import Backoff
from fairlane.task import Task
from fairlane.worker import body
from fairlane.worker.isolation import Crashed, Isolation


def claimed(*args: Any, **fields: Any) -> Claimed:
    """A job as a worker holds it."""
    known: dict[str, Any] = {
        "id": "job-1",
        "fence": 3,
        "attempt": 2,
        "task": "task",
        "queue": "default",
        "lane": None,
        "priority": Priority.NORMAL,
        "payload": msgspec.json.encode([args, {}]),
        "retries": 3,
        "backoff": Backoff(),
        "timeout": None,
        "kind": JobKind.JOB,
        "sticky": None,
        "suspect": False,
        "limited": False,
        "headers": None,
    }
    return Claimed(**(known | fields))


class Runner:
    """Runs jobs and records their progress."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self.reports: list[tuple[Held, bytes]] = []

    async def ending(self, task: Task[..., Any], *args: Any, **fields: Any) -> body.Ending | Crashed:
        return await self.isolation.run(task, claimed(*args, **fields), report=self._report)

    def _report(self, held: Held, value: bytes) -> None:
        self.reports.append((held, value))

    async def result(self, task: Task[..., Any], *args: Any, **fields: Any) -> Any:
        ending = await self.ending(task, *args, **fields)
        assert isinstance(ending, body.Returned), ending
        return json.loads(ending.result)


async def until(seen: Callable[[], bool]) -> None:
    """Wait until a condition holds that is not notified, such as a file of another process."""
    async with asyncio.timeout(30):
        while not seen():
            await asyncio.sleep(0.01)


async def gone(pid: int) -> None:
    """Wait until there is no such process."""
    await until(lambda: not running(pid))


async def number_in(path: Path) -> int:
    """The number that another process writes into a file."""
    await until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())  # noqa: ASYNC240 - a few bytes


def running(pid: int) -> bool:
    """Whether a process lives; a zombie, which its parent has not looked after, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
