"""PgQueuer: its own runner on uvloop, as its command line does; a job's row is deleted and its end is logged."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import asyncpg

from benchmarks.board import Board
from benchmarks.side import Side, module_command, worker_url

if TYPE_CHECKING:
    from pgqueuer import PgQueuer
    from pgqueuer.queries import Queries

ENTRYPOINT = "noop"
OPTIONS = {
    "batch 500": (500, None, 1),
    "batch 500, pool of 10": (500, None, 10),
    "batch 100, 200 slots": (100, 200, 1),
    "batch 10 (default)": (10, None, 1),
}
"""Jobs in a claim, the most that run at once, connections."""


class Sender:
    """Sends over one connection."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def send(self, number: int) -> None:
        await self._queries.enqueue(ENTRYPOINT, str(number).encode())

    async def send_many(self, numbers: Sequence[int]) -> None:
        count = len(numbers)
        payloads: list[bytes | None] = [str(number).encode() for number in numbers]
        await self._queries.enqueue([ENTRYPOINT] * count, payloads, [0] * count)


class Pgqueuer(Side):
    """As its documentation starts it; only "200 slots" bounds how many jobs run at once."""

    package = "pgqueuer"
    settings: ClassVar[Mapping[str, str]] = {
        name: f"pgqueuer.run on uvloop, batch_size={batch}, max_concurrent_tasks={limit}, {connections} connection(s)"
        for name, (batch, limit, connections) in OPTIONS.items()
    }
    stored = "SELECT count(DISTINCT job_id) FROM pgqueuer_log WHERE status = 'queued'"
    recorded = "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"

    async def install(self, url: str) -> None:
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        connection = await asyncpg.connect(url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        connection = await asyncpg.connect(url)
        yield Sender(Queries(AsyncpgDriver(connection)))
        await connection.close()

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__, setting)


SIDE = Pgqueuer()


async def work(setting: str) -> None:
    """A worker process, until it is told to stop."""
    import pgqueuer
    from pgqueuer import Job, PgQueuer

    batch, limit, connections = OPTIONS[setting]
    board = Board.mine()
    ran = board.ran

    @asynccontextmanager
    async def manager() -> AsyncIterator[PgQueuer]:
        if connections == 1:
            made = PgQueuer.from_asyncpg_connection(await asyncpg.connect(worker_url()))
        else:
            pool = await asyncpg.create_pool(worker_url(), min_size=connections, max_size=connections)
            made = PgQueuer.from_asyncpg_pool(pool)

        @made.entrypoint(ENTRYPOINT)
        async def noop(job: Job) -> None:
            ran(int(job.payload or b""))

        yield made

    board.wait()
    await pgqueuer.run(manager, batch_size=batch, max_concurrent_tasks=limit)


if __name__ == "__main__":
    import uvloop

    uvloop.run(work(sys.argv[1]))
