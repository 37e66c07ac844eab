"""The bare loop: what PostgreSQL alone gives for claiming and finishing jobs over asyncpg, as fast as it honestly goes.

A narrow row that moves, its body apart, and an outcome that takes its place; no lanes, no fair order, no limits, no
retries, no sessions, no wake-ups. Tables are touched by id only and the plans are pinned, because a planner that is
left free may lose half of the rate in the middle of a run. Each finish is fenced, and has a transaction of its own.
"""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import asyncpg
import uuid_utils

from benchmarks.board import Board
from benchmarks.side import Side, module_command, worker_url
from benchmarks.workload import RESULT

BATCH = 100
SCHEMA = """
CREATE TABLE body (id uuid PRIMARY KEY, payload bytea NOT NULL);
CREATE TABLE live (
    id       uuid PRIMARY KEY,
    tag      bigint GENERATED ALWAYS AS IDENTITY,
    session  uuid,
    fence    integer NOT NULL DEFAULT 0,
    priority smallint NOT NULL DEFAULT 1,
    state    smallint NOT NULL DEFAULT 0
);
CREATE INDEX live_ready ON live (priority, tag, id) WHERE state = 0;
CREATE TABLE outcome (id uuid PRIMARY KEY, result bytea NOT NULL, finished timestamptz NOT NULL DEFAULT now());
"""
SETTINGS = {"enable_seqscan": "off", "plan_cache_mode": "force_generic_plan", "jit": "off"}
INSERT = """
WITH given AS (SELECT * FROM unnest($1::uuid[], $2::bytea[]) AS given (id, payload)),
     bodies AS (INSERT INTO body SELECT id, payload FROM given)
INSERT INTO live (id) SELECT id FROM given
"""
CLAIM = """
UPDATE live SET state = 1, session = $1, fence = fence + 1
WHERE id = ANY (ARRAY(
    SELECT id FROM live WHERE state = 0 ORDER BY priority, tag, id LIMIT $2 FOR UPDATE SKIP LOCKED
))
RETURNING id, fence, (SELECT payload FROM body WHERE body.id = live.id) AS payload
"""
FINISH = """
WITH ended AS (
    DELETE FROM live
    WHERE id = ANY ($2::uuid[]) AND session IS NOT DISTINCT FROM $1
        AND ((id, fence) IN (SELECT * FROM unnest($2::uuid[], $3::integer[]))) IS TRUE
    RETURNING id
)
INSERT INTO outcome (id, result) SELECT id, $4 FROM ended
"""


class Sender:
    """Sends over one connection."""

    def __init__(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self._connection = connection

    async def send(self, number: int) -> None:
        await self.send_many((number,))

    async def send_many(self, numbers: Sequence[int]) -> None:
        ids = [uuid.UUID(int=uuid_utils.uuid7().int) for _ in numbers]
        await self._connection.execute(INSERT, ids, [str(number).encode() for number in numbers])


class Bare(Side):
    """One job after the other, a hundred in a claim."""

    package = "asyncpg"
    settings: ClassVar[Mapping[str, str]] = {"": f"claim {BATCH}, run, finish {BATCH}, over one connection"}
    stored = "SELECT (SELECT count(*) FROM live) + (SELECT count(*) FROM outcome)"
    recorded = "SELECT count(*) FROM outcome"
    waits = False

    async def install(self, url: str) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(SCHEMA)
        await connection.close()

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        connection = await asyncpg.connect(url, server_settings=SETTINGS)
        yield Sender(connection)
        await connection.close()

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__)


SIDE = Bare()


async def work() -> None:
    """A worker process: ends its work when nothing is left, and itself when it is told to."""
    board = Board.mine()
    ran = board.ran

    async def noop(number: int) -> None:
        ran(number)

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    board.wait()
    connection = await asyncpg.connect(worker_url(), server_settings=SETTINGS)
    claim, finish = await connection.prepare(CLAIM), await connection.prepare(FINISH)
    session = uuid.uuid4()
    while claimed := await claim.fetch(session, BATCH):
        for each in claimed:
            await noop(int(each["payload"]))
        await finish.fetch(session, [each["id"] for each in claimed], [each["fence"] for each in claimed], RESULT)
    await stopped.wait()
    await connection.close()


if __name__ == "__main__":
    asyncio.run(work())
    sys.exit()
