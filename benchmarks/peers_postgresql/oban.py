"""Oban for Python, the free edition: its own instance on uvloop, as its command line does; needs Python 3.12.

A finished job stays in its table.
"""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url

if TYPE_CHECKING:
    from oban import Job, Oban

QUEUE = "bench"


class Sender:
    """Sends through the instance."""

    def __init__(self, oban: Oban) -> None:
        self._oban = oban

    async def send(self, number: int) -> None:
        await self._oban.enqueue(_job(number))

    async def send_many(self, numbers: Sequence[int]) -> None:
        await self._oban.enqueue_many([_job(number) for number in numbers])


class Obans(Side):
    """With as many concurrent jobs as there are slots."""

    package = "oban"
    settings: ClassVar[Mapping[str, str]] = {
        "": f"Oban(queues={{'{QUEUE}': {SLOTS}}}) on uvloop, pool of 1 to 10 (default)"
    }
    stored = "SELECT count(*) FROM oban_jobs"
    recorded = "SELECT count(*) FROM oban_jobs WHERE state = 'completed'"

    async def install(self, url: str) -> None:
        from oban.schema import install

        async with _pool(url) as pool:
            await install(pool)

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        from oban import Oban

        async with _pool(url) as pool:
            yield Sender(Oban(pool=pool, queues={}))

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__)


SIDE = Obans()


@asynccontextmanager
async def _pool(url: str) -> AsyncIterator[object]:
    from oban import Oban

    pool = await Oban.create_pool(dsn=url)
    yield pool
    await pool.close()


@cache
def _board() -> Board:
    return Board.mine()


@cache
def _worker() -> Any:
    from oban import worker

    @worker(queue=QUEUE)
    class Noop:
        """What the worker runs; it is found by its name, which must not depend on how this module was started."""

        __module__ = "benchmarks.peers_postgresql.oban"
        __qualname__ = "Noop"

        async def process(self, job: Job) -> None:
            _board().ran(job.args["number"])

    return Noop


def _job(number: int) -> Job:
    return _worker().new({"number": number})


async def work() -> None:
    """A worker process, until it is told to stop."""
    from oban import Oban

    _worker()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    _board().wait()
    async with _pool(worker_url()) as pool, Oban(pool=pool, queues={QUEUE: SLOTS}):
        await stopped.wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(work())
    sys.exit()
