"""Taskiq on a Redis stream, acknowledging: its own command line. What was acknowledged stays in the stream."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url

if TYPE_CHECKING:
    from taskiq_redis import RedisStreamBroker

RECORDED = """
local told = redis.call('XINFO', 'GROUPS', 'taskiq')[1]
local group = {}
for place = 1, #told, 2 do group[told[place]] = told[place + 1] end
return (group['entries-read'] or 0) - group['pending']
"""


class Sender:
    """Sends through the task, which knows no bulk."""

    def __init__(self, task: Any) -> None:
        self._task = task

    async def send(self, number: int) -> None:
        await self._task.kiq(number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            await self._task.kiq(number)


class Taskiq(Side):
    """With as many concurrent jobs as there are slots."""

    package = "taskiq-redis"
    settings: ClassVar[Mapping[str, str]] = {
        "streams": f"taskiq worker --workers 1 --max-async-tasks {SLOTS}, on a stream"
    }
    stored = "return redis.call('XLEN', 'taskiq')"
    recorded = RECORDED
    keeps = False

    async def install(self, url: str) -> None:
        # A group reads what was sent after it was made.
        async with self.producer(url, ""):
            pass

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        broker = _made(url)
        await broker.startup()
        yield Sender(broker.find_task("noop"))
        await broker.shutdown()

    def command(self, url: str, setting: str) -> list[str]:
        options = ("--workers", "1", "--max-async-tasks", str(SLOTS), "--log-level", "WARNING")
        return module_command("taskiq", "worker", f"{__name__}:worker", *options)


SIDE = Taskiq()


def _made(url: str) -> RedisStreamBroker:
    from taskiq_redis import RedisStreamBroker

    broker = RedisStreamBroker(url)

    @broker.task(task_name="noop")
    async def noop(number: int) -> None:
        _board().ran(number)

    return broker


@cache
def _board() -> Board:
    return Board.mine()


@cache
def _worker() -> RedisStreamBroker:
    _board().wait()
    return _made(worker_url())


def __getattr__(name: str) -> RedisStreamBroker:
    """`worker`: the broker that its command names."""
    if name != "worker":
        raise AttributeError(name)
    return _worker()
