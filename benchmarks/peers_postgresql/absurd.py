"""Absurd: a polling worker on one connection; a finished task stays in its tables. It has no call for many tasks."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import asyncpg

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url

if TYPE_CHECKING:
    from absurd_sdk import AsyncAbsurd

QUEUE = "bench"


class Sender:
    """Sends through the client."""

    def __init__(self, client: AsyncAbsurd) -> None:
        self._client = client

    async def send(self, number: int) -> None:
        await self._client.spawn("noop", {"number": number}, queue=QUEUE)

    async def send_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            await self.send(number)


class Absurd(Side):
    """Its poll interval is a quarter of a second, and it listens to nobody."""

    package = "absurd-sdk"
    settings: ClassVar[Mapping[str, str]] = {"": f"AsyncAbsurd.start_worker(concurrency={SLOTS})"}
    stored = f"SELECT count(*) FROM absurd.t_{QUEUE}"
    recorded = f"SELECT count(*) FROM absurd.t_{QUEUE} WHERE state = 'completed'"
    share = 0.1

    async def install(self, url: str) -> None:
        from absurdctl import BUNDLED_SCHEMA_SQL

        connection = await asyncpg.connect(url)
        await connection.execute(BUNDLED_SCHEMA_SQL)
        await connection.execute("SELECT absurd.create_queue($1)", QUEUE)
        await connection.close()

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        from absurd_sdk import AsyncAbsurd

        client = AsyncAbsurd(url, queue_name=QUEUE)
        client.register_task("noop", queue=QUEUE)(_nothing)
        yield Sender(client)
        await client.close()

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__)


SIDE = Absurd()


async def _nothing(params: Any, context: object) -> None:
    """The producer has to know the task, but does not run it."""


async def work() -> None:
    """A worker process, until it is told to stop."""
    from absurd_sdk import AsyncAbsurd

    board = Board.mine()
    ran = board.ran
    client = AsyncAbsurd(worker_url(), queue_name=QUEUE)

    async def noop(params: Any, context: object) -> None:
        ran(params["number"])

    client.register_task("noop", queue=QUEUE)(noop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, client.stop_worker)
    board.wait()
    await client.start_worker(concurrency=SLOTS)


if __name__ == "__main__":
    asyncio.run(work())
    sys.exit()
