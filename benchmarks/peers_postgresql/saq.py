"""SAQ on its PostgreSQL queue: its own command line; a finished job's row stays for ten minutes."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url

if TYPE_CHECKING:
    from saq.queue.postgres import PostgresQueue


class Sender:
    """Sends through the queue, which knows no bulk: many are sent at once over its pool of 20 connections."""

    def __init__(self, queue: PostgresQueue) -> None:
        self._queue = queue

    async def send(self, number: int) -> None:
        await self._queue.enqueue("noop", number=number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        await asyncio.gather(*(self.send(number) for number in numbers))


class Saq(Side):
    """With as many concurrent jobs as there are slots."""

    package = "saq"
    settings: ClassVar[Mapping[str, str]] = {"": f"saq, concurrency {SLOTS}, pool of 4 to 20 (default)"}
    stored = "SELECT count(*) FROM saq_jobs"
    recorded = "SELECT count(*) FROM saq_jobs WHERE status = 'complete'"
    share = 0.1

    async def install(self, url: str) -> None:
        async with self.producer(url, ""):
            pass

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        from saq.queue.postgres import PostgresQueue

        queue = PostgresQueue.from_url(url)
        await queue.connect()
        yield Sender(queue)
        await queue.disconnect()

    def command(self, url: str, setting: str) -> list[str]:
        return module_command("saq", f"{__name__}.worker")


SIDE = Saq()


async def noop(context: object, *, number: int) -> None:
    """What the worker runs."""
    _board().ran(number)


@cache
def _board() -> Board:
    return Board.mine()


def __getattr__(name: str) -> dict[str, Any]:
    """`worker`: the settings that its command reads."""
    if name != "worker":
        raise AttributeError(name)
    from saq.queue.postgres import PostgresQueue

    _board().wait()
    return {"queue": PostgresQueue.from_url(worker_url()), "functions": [noop], "concurrency": SLOTS}
