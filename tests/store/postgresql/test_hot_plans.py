"""How PostgreSQL carries out what workers and senders ask of it all day: by keys alone, however many jobs there are.

The plans are those that a connection made while the store was nearly empty and has kept since: the worst that happens.
They are looked at with a hundred thousand jobs, and in a full run with a million.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pprint import pformat
from typing import Any

import pytest

from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.statements import placed
from tests.servers.postgresql import server
from tests.sizes import sized

from ..explained import Plan, plans
from ..lopsided_postgresql import fill

FEW = 200
SIZES = sized((100_000,), (100_000, 1_000_000))
BATCH = 50
MOST_ROWS = 30 * BATCH
"""Rows of tables that a call for so many jobs may look at, in all its statements together."""
TABLES = frozenset(("job", "active_job", "outcome", "attempt", "progress", "held_unique", "reserved_id", "binding"))
"""Tables that grow with the number of jobs that exist or existed."""
FLOWS = frozenset(("flow_pkey", "flow_domain_lane_key", "lane_pkey", "lane_queue_key_key"))
"""Indexes that grow with the number of lanes."""


def call(text: str, arguments: int = 0) -> str:
    """A statement of the store, with so many arguments."""
    return placed(text.format(", ".join(f"${n}" for n in range(1, arguments + 1))), "fairlane")


EXCHANGE = call("SELECT * FROM fairlane.exchange({})", 16)
ENQUEUE = call("SELECT * FROM fairlane.enqueue({})", 17)
ENQUEUE_ONE = call("SELECT fairlane.enqueue_one({})", 15)
CANCEL = call("SELECT * FROM fairlane.cancel({})", 1)
PROMOTE = call("SELECT * FROM fairlane.promote(100, NULL)")
ADMIT = call("SELECT * FROM fairlane.admit(100, NULL)")
RENEW = call("SELECT * FROM fairlane.renew('worker', $1, $2, $3, false)")
RESCUE = call("SELECT * FROM fairlane.rescue(100, true, NULL)")

Collected = dict[str, list[Plan]]


class Caller:
    """Calls as the store makes them, on one connection that keeps its plans."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._number = 10
        self._sent = 0
        self._held: tuple[list[str], list[int], list[int]] = ([], [], [])

    def calls(self) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
        """Each by its name; later ones build on earlier ones."""
        yield "send one", self._send_one
        yield "send many", self._send_many
        yield "send many to lanes", lambda: self._send_many([f"user:{n}" for n in range(BATCH)])
        yield "claim", self._exchange
        yield "finish and claim", self._exchange
        yield "cancel", self._cancel
        yield "promote", lambda: self.connection.fetchrow(PROMOTE)
        yield "admit", lambda: self.connection.fetchrow(ADMIT)
        yield "renew", self._renew
        yield "rescue", lambda: self.connection.fetchrow(RESCUE)

    def _id(self) -> str:
        self._sent += 1
        return f"hot-{id(self)}-{self._sent}"

    async def _send_one(self) -> None:
        await self.connection.fetchrow(
            ENQUEUE_ONE, self._id(), "task", "calm", b"[]", "any", None, 1, 1.0, None, 3, None, None, "default", None,
            None,
        )  # fmt: skip

    async def _send_many(self, lanes: list[str] | None = None) -> None:
        ids = [self._id() for _ in range(BATCH)]
        rest = [None] * 11
        await self.connection.fetchrow(
            ENQUEUE, ids, ["task"] * BATCH, ["calm"] * BATCH, [b"[]"] * BATCH, lanes, *rest, "2s"
        )

    async def _exchange(self) -> None:
        self._number += 1
        ids, seqs, fences = self._held
        row = await self.connection.fetchrow(
            EXCHANGE, "worker", ids, seqs, fences, None, [b"null"] * len(ids), None, None, None, None, self._number,
            BATCH, [None, "calm", "crowd"], [1, 1, 1], [BATCH] * 3, [None] * 3,
        )  # fmt: skip
        assert len(row["ids"]) == BATCH
        self._held = (row["ids"], row["seqs"], row["fences"])

    async def _cancel(self) -> None:
        ids = [self._id()]
        await self.connection.fetchrow(
            ENQUEUE, ids, ["task"], ["calm"], [b"[]"], None, *([None] * 11), "2s"
        )  # fmt: skip
        await self.connection.fetchrow(CANCEL, ids)

    async def _renew(self) -> None:
        ids, _, fences = self._held
        await self.connection.fetchrow(RENEW, ids, fences, self._number)


@pytest.fixture(scope="module", params=SIZES, ids=[f"{size:,} jobs" for size in SIZES])
def collected(request: pytest.FixtureRequest) -> Iterator[Collected]:
    """The plans of every call, on a store that has grown since they were made."""
    url = server().fresh_database()
    yield asyncio.run(_collect(url, request.param))
    server().done(url)


async def _collect(url: str, jobs: int) -> Collected:
    connection = await driver().connect(url)
    await fill(connection, FEW)
    # Filling takes longer than a lease, and no session renews meanwhile.
    await connection.execute("UPDATE fairlane.session SET slots = 100000, lease = 1e9")
    await connection.execute("ANALYZE")
    caller = Caller(connection)
    for _ in range(2):
        for _, call in caller.calls():
            await call()
    other = await driver().connect(url)
    await fill(other, jobs)
    # Bindings of workers that are not there: closed now, so that the pass below is one that finds nothing.
    await other.fetchrow(RESCUE)
    await other.close()
    found = {name: await plans(connection, call) for name, call in caller.calls()}
    await connection.close()
    return found


def test_the_plans_were_seen(collected: Collected) -> None:
    for name, found in collected.items():
        assert any(node.index for plan in found for node in plan.nodes), name


def test_no_table_of_jobs_is_read_from_end_to_end(collected: Collected) -> None:
    scans = {name: scanned for name, found in collected.items() if (scanned := _scanned(found))}
    assert not scans, pformat(scans)


def test_no_index_is_read_from_end_to_end(collected: Collected) -> None:
    walks = {name: walked for name, found in collected.items() if (walked := _walked(found))}
    assert not walks, pformat(walks)


def test_no_call_looks_at_more_than_it_is_for(collected: Collected) -> None:
    looked = {name: sum(plan.rows for plan in found) for name, found in collected.items()}
    too_much = {name: rows for name, rows in looked.items() if rows > MOST_ROWS}
    assert not too_much, pformat(looked)


def _scanned(found: list[Plan]) -> set[str]:
    return {table for plan in found for table in plan.scanned & TABLES}


def _walked(found: list[Plan]) -> set[str]:
    """Indexes of large tables that a statement went through without a condition."""
    return {
        node.index
        for plan in found
        for node in plan.nodes
        if node.index and not node.bounded and (node.table in TABLES or node.index in FLOWS) and node.rows > 1
    }
