"""RQ: its usual worker, which forks a process for each job; bodies are functions. A finished job stays for 500 s."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from benchmarks.board import Board
from benchmarks.side import Side, module_command, worker_url

if TYPE_CHECKING:
    from rq import Queue


def noop(number: int) -> None:
    """What the worker runs."""
    _board().ran(number)


@cache
def _board() -> Board:
    return Board.mine()


NOOP = "benchmarks.peers_redis.rq.noop"


class Sender:
    """Sends through the queue, in bulk by one pipeline."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def send(self, number: int) -> None:
        self._queue.enqueue(NOOP, number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        self._queue.enqueue_many([self._queue.prepare_data(NOOP, (number,)) for number in numbers])


class Rq(Side):
    """One job at a time."""

    package = "rq"
    settings: ClassVar[Mapping[str, str]] = {"": "Worker, a fork for each job"}
    stored = "return redis.call('LLEN', 'rq:queue:bench') + redis.call('ZCARD', 'rq:finished:bench')"
    recorded = "return redis.call('ZCARD', 'rq:finished:bench')"
    share = 0.02

    async def install(self, url: str) -> None:
        """Nothing has to be there."""

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        yield Sender(_made(url))

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__)


SIDE = Rq()


def _made(url: str) -> Queue:
    from redis import Redis
    from rq import Queue

    return Queue("bench", connection=Redis.from_url(url))


def work() -> None:
    """A worker process."""
    from rq import Worker

    _board().wait()
    queue = _made(worker_url())
    Worker([queue], connection=queue.connection).work(logging_level="WARNING")


if __name__ == "__main__":
    work()
