"""Chancy: a worker with its executor for coroutines; a finished job stays in its table."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url

if TYPE_CHECKING:
    from chancy import Chancy, Job

FUNCTION = "benchmarks.peers_postgresql.chancy.noop"
EAGER = "eager"


class Sender:
    """Sends through the application."""

    def __init__(self, app: Chancy) -> None:
        self._app = app

    async def send(self, number: int) -> None:
        await self._app.push(_job(number))

    async def send_many(self, numbers: Sequence[int]) -> None:
        async for _ in self._app.push_many([_job(number) for number in numbers], batch_size=len(numbers)):
            pass


class Chancies(Side):
    """Without eager polling it looks for jobs every five seconds only, and once for each notice."""

    package = "chancy"
    settings: ClassVar[Mapping[str, str]] = {
        EAGER: f"Queue(concurrency={SLOTS}, executor=AsyncExecutor, eager_polling=True), logs warnings only"
    }
    stored = "SELECT count(*) FROM chancy_jobs"
    recorded = "SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'"

    async def install(self, url: str) -> None:
        from chancy import Chancy, Queue

        async with Chancy(url) as app:
            await app.migrate()
            await app.declare(
                Queue("default", concurrency=SLOTS, executor=Chancy.Executor.Async, eager_polling=True),
                upsert=True,
            )

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        from chancy import Chancy

        async with Chancy(url) as app:
            yield Sender(app)

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__)


SIDE = Chancies()


async def noop(number: int) -> None:
    """What the worker finds by its name."""
    _board().ran(number)


def _job(number: int) -> Job:
    from chancy import Job

    return Job(func=FUNCTION, kwargs={"number": number})


@cache
def _board() -> Board:
    return Board.mine()


async def work() -> None:
    """A worker process, until it is told to stop."""
    from chancy import Chancy, Worker

    board = Board.mine()
    board.wait()
    # A line for each job is its default; that would be the speed of the log.
    async with Chancy(worker_url()) as app:
        app.log.setLevel(logging.WARNING)
        async with Worker(app) as worker:
            await worker.wait_for_shutdown()


if __name__ == "__main__":
    asyncio.run(work())
    sys.exit()
