"""Awa: a Rust engine under a Python client; a finished job's row moves to a history that is kept for a day."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url

if TYPE_CHECKING:
    from awa import AsyncClient, Job

QUEUE = "bench"


@dataclass
class Noop:
    """The arguments of a job."""

    number: int


class Sender:
    """Sends through the client: one job by INSERT, many by COPY."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def send(self, number: int) -> None:
        await self._client.insert(Noop(number), queue=QUEUE)

    async def send_many(self, numbers: Sequence[int]) -> None:
        await self._client.enqueue_many_copy([Noop(number) for number in numbers], queue=QUEUE)


class Awa(Side):
    """As its documentation starts it."""

    package = "awa-pg"
    settings: ClassVar[Mapping[str, str]] = {
        "": f"AsyncClient.start([('{QUEUE}', {SLOTS})]) on queue storage; more claimers are no faster"
    }
    stored = "SELECT count(*) FROM awa.jobs"
    recorded = "SELECT count(*) FROM awa.jobs WHERE state = 'completed'"

    async def install(self, url: str) -> None:
        from awa import AsyncClient

        async with AsyncClient(url) as client:
            await client.migrate()
            await client.install_queue_storage()

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        from awa import AsyncClient

        async with AsyncClient(url) as client:
            yield Sender(client)

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__)


SIDE = Awa()


async def work() -> None:
    """A worker process, until it is told to stop."""
    from awa import AsyncClient

    board = Board.mine()
    ran = board.ran
    client = AsyncClient(worker_url())

    @client.task(Noop, queue=QUEUE)
    async def noop(job: Job[Noop]) -> None:
        ran(job.args.number)

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    board.wait()
    await client.start([(QUEUE, SLOTS)])
    await stopped.wait()
    await client.shutdown()


if __name__ == "__main__":
    asyncio.run(work())
    sys.exit()
