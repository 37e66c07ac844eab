"""Celery: its own command line with two processes; bodies are functions, and acknowledged when they have ended."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import Side, module_command, worker_url

if TYPE_CHECKING:
    from celery import Celery

PROCESSES = 2


class Sender:
    """Sends through the task, which knows no bulk."""

    def __init__(self, task: Any) -> None:
        self._task = task

    async def send(self, number: int) -> None:
        self._task.delay(number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._task.delay(number)


class Queue(Side):
    """A process runs one job at a time."""

    package = "celery"
    settings: ClassVar[Mapping[str, str]] = {
        f"prefork {PROCESSES}": f"celery worker --concurrency {PROCESSES}, task_acks_late"
    }
    stored = "return redis.call('LLEN', 'celery') + redis.call('HLEN', 'unacked')"
    recorded = "return ARGV[1] - redis.call('LLEN', 'celery') - redis.call('HLEN', 'unacked')"
    share = 0.25
    keeps = False

    async def install(self, url: str) -> None:
        """Nothing has to be there."""

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        app = _made(url)
        yield Sender(app.tasks["noop"])
        app.close()

    def command(self, url: str, setting: str) -> list[str]:
        options = ("--concurrency", str(PROCESSES), "--loglevel", "WARNING", "--hostname", "bench-%i@%h")
        return module_command("celery", "--app", f"{__name__}:worker", "worker", *options)


SIDE = Queue()


def _made(url: str) -> Celery:
    from celery import Celery

    app = Celery("bench", broker=url)
    app.conf.task_acks_late = True
    # It is going to be the default, and says so at length.
    app.conf.broker_connection_retry_on_startup = True

    @app.task(name="noop")
    def noop(number: int) -> None:
        _child().ran(number)

    return app


@cache
def _child() -> Board:
    """The board of a process that runs bodies: called there only, because each of them has its own place."""
    from billiard import current_process

    return Board.mine(1 + current_process().index)


@cache
def _worker() -> Celery:
    Board.mine().wait()
    return _made(worker_url())


def __getattr__(name: str) -> Celery:
    """`worker`: the application that its command names."""
    if name != "worker":
        raise AttributeError(name)
    return _worker()
