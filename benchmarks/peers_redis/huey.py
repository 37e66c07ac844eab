"""Huey: its own command line with threads; bodies are functions. A job is taken from the list before it runs."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from threading import Lock
from typing import Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import Side, module_command, worker_url

THREADS = 4
"""More of them only wait for each other."""


class Sender:
    """Sends through the task, which knows no bulk."""

    def __init__(self, task: Any) -> None:
        self._task = task

    async def send(self, number: int) -> None:
        self._task(number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._task(number)


class Huey(Side):
    """Nothing is known of a job that was begun: its end is when it is no longer in the list."""

    package = "huey"
    settings: ClassVar[Mapping[str, str]] = {f"{THREADS} threads": f"huey_consumer -k thread -w {THREADS}"}
    stored = "return redis.call('LLEN', 'huey.redis.bench')"
    recorded = "return ARGV[1] - redis.call('LLEN', 'huey.redis.bench')"
    acknowledges = False
    keeps = False

    async def install(self, url: str) -> None:
        """Nothing has to be there."""

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        yield Sender(_made(url)[1])

    def command(self, url: str, setting: str) -> list[str]:
        options = ("-k", "thread", "-w", str(THREADS), "--quiet")
        return module_command("huey.bin.huey_consumer", f"{__name__}.worker", *options)


SIDE = Huey()
LOCK = Lock()


def _made(url: str) -> tuple[Any, Any]:
    from huey import RedisHuey

    queue = RedisHuey("bench", url=url)

    @queue.task(name="noop")
    def noop(number: int) -> None:
        with LOCK:
            _board().ran(number)

    return queue, noop


@cache
def _board() -> Board:
    return Board.mine()


@cache
def _worker() -> Any:
    _board().wait()
    return _made(worker_url())[0]


def __getattr__(name: str) -> Any:
    """`worker`: what its command names."""
    if name != "worker":
        raise AttributeError(name)
    return _worker()
