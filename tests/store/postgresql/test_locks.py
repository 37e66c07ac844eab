"""Calls cannot deadlock: those that need several locks wait for them in one order, see `functions/locks.sql`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import mixed
from fairlane.errors import Busy
from fairlane.model.job import JobKind, Priority
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from fairlane.model.states import complete, snooze
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.statements import placed
from fairlane.store.postgresql.store import PostgresqlStore
from tests.conformance.kit import Kit
from tests.servers.postgresql import server
from tests.sizes import sized, strict

pytestmark = pytest.mark.anyio

HELD = """SELECT l.objid::bigint, l.granted FROM pg_locks l
JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
WHERE l.locktype = 'advisory' AND l.objid::bigint > 0 AND l.pid <> pg_backend_pid() AND l.mode = 'ExclusiveLock'"""


@pytest.fixture
def url() -> Iterator[str]:
    """An empty database."""
    made = server().fresh_database()
    yield made
    server().done(made)


@strict
async def test_a_mixed_application_under_four_processes_meets_no_deadlock_and_keeps_its_slots_busy(url: str) -> None:
    before = await mixed.deadlocks_of(url)

    outcome = await mixed.measure(url, processes=4, seconds=sized(3.0, 60.0))

    assert await mixed.deadlocks_of(url) == before
    # In a full run this is a figure; else other tests run beside this one, and a deadlock would cost a second each.
    assert outcome.share >= sized(0.2, 0.9), f"{outcome.rate:.1f} jobs/s of {outcome.allowed:.1f}"
    assert outcome.turns > 0
    assert outcome.broadcasts > 0


async def test_every_verb_at_once_from_several_processes_meets_no_deadlock(url: str) -> None:
    before = await mixed.deadlocks_of(url)
    store = await PostgresqlStore.open(url)
    seconds = sized(3, 60)
    impatient = f"{url}?deadlock_timeout=50"
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.store.lock_mix", impatient, str(seed), str(seconds)
        )
        for seed in range(sized(3, 8))
    ]

    assert [await process.wait() for process in processes] == [0] * len(processes)

    assert await mixed.deadlocks_of(url) == before
    assert (await store.recount()).differences == ()
    await store.close()


async def _until_waiting(other: Any, queue: int) -> list[int]:
    """The queues that are locked by a transaction that waits for this one."""
    for _ in range(3_000):
        rows = await other.fetch(HELD)
        if any(number == queue and not granted for number, granted in rows):
            return [number for number, granted in rows if granted]
        await asyncio.sleep(0.01)
    raise AssertionError("nobody waits")


async def _number(other: Any, queue: str) -> int:
    return int(await other.fetchval("SELECT id FROM fairlane.queue WHERE name = $1", queue))


@pytest.mark.parametrize("move", ["complete", "snooze"])
async def test_a_call_that_finishes_in_one_queue_and_claims_from_another_locks_both_in_their_order(
    kit: Kit, other: Any, move: str
) -> None:
    rule = LaneRule(pattern="m:*", limit=1)
    await kit.settings("first", rule)
    await kit.settings("second", rule)
    worker = await kit.worker("first", "second")
    await kit.enqueue(id="done", queue="second", lane="m:1")
    [claimed] = await worker.claim()
    await kit.enqueue(id="next", queue="first", lane="m:1")
    first, second = await _number(other, "first"), await _number(other, "second")
    assert first < second
    ending = complete(claimed.held) if move == "complete" else snooze(claimed.held, 60.0)
    claim = Claim(number=kit.number(), asks=(Ask("first", Priority.NORMAL, 1),), total=1)

    async with other.transaction():
        await other.execute(placed("SELECT fairlane.lock_some(NULL, ARRAY[$1::integer])", "fairlane"), first)
        call = asyncio.create_task(kit.store.finish(worker.id, [ending], claim=claim))
        held = await _until_waiting(other, first)

    answer = await call
    assert held == []
    assert [job.id for job in answer.claimed] == ["next"]


async def test_a_leader_renews_its_term_while_a_pass_of_it_waits_for_a_queue(kit: Kit, other: Any) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="due", delay=0.01)
    term = await kit.store.lead(worker.id, lease=10.0)
    assert term is not None
    await asyncio.sleep(0.02)
    queue = await _number(other, "default")

    async with other.transaction():
        await other.execute(placed("SELECT fairlane.lock_some(NULL, ARRAY[$1::integer])", "fairlane"), queue)
        promoting = asyncio.create_task(kit.store.promote(term=term.number))
        await _until_waiting(other, queue)
        async with asyncio.timeout(30):
            assert await kit.store.lead(worker.id, lease=10.0, term=term.number) == term

    assert (await promoting).promoted == 1


async def test_jobs_are_stored_in_the_order_of_their_ids_whatever_the_order_of_the_call(kit: Kit, other: Any) -> None:
    await kit.enqueue(id="known")
    assert isinstance(kit.store, PostgresqlStore)
    connection = await driver().connect(kit.store._address.dsn)
    insert = "INSERT INTO fairlane.job (enqueued_at, cost, queue, retries, class, kind, id, task, pool, payload) "
    insert += "SELECT 0, 1, queue, 0, 1, 0, $1, 'task', 'default', '' FROM fairlane.job WHERE id = 'known'"
    for number, fields in enumerate(({}, {"sticky": "key"})):
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(insert, f"a{number}")
        jobs = [kit.new(id=f"{letter}{number}", **fields) for letter in "ba"]
        call = asyncio.create_task(kit.store.enqueue(jobs))
        await asyncio.sleep(0.1)
        # The call waits for the id, and holds no lock that the holder of the id could need next.
        async with asyncio.timeout(30):
            await connection.execute(insert, f"b{number}")
        await transaction.rollback()
        assert [each.created for each in await call] == [True, True]
    await connection.close()


async def test_a_release_that_waits_for_an_id_blocks_no_other_call(kit: Kit, other: Any) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="bound", sticky="key")
    insert = "INSERT INTO fairlane.job (enqueued_at, cost, queue, retries, class, kind, id, task, pool, payload) "
    insert += "SELECT 0, 1, queue, 0, 1, 0, 'tidy', 'task', 'default', '' FROM fairlane.job WHERE id = 'bound'"

    async with other.transaction():
        await other.execute(insert)
        release = asyncio.create_task(kit.store.release("default", "key", kit.new(id="tidy", kind=JobKind.CLEANUP)))
        await asyncio.sleep(0.1)
        assert await worker.claim_ids() == ["bound"]
        assert not release.done(), "the claim waited for it"
        with pytest.raises(Busy):
            await release

    assert (await kit.store.recount()).differences == ()


async def test_a_broadcast_waits_only_shortly_for_an_open_transaction_with_the_id_of_a_copy(
    kit: Kit, other: Any
) -> None:
    await kit.worker()
    await kit.enqueue(id="known")
    insert = "INSERT INTO fairlane.job (enqueued_at, cost, queue, retries, class, kind, id, task, pool, payload) "
    insert += "SELECT 0, 1, queue, 0, 1, 0, 'all/0', 'task', 'default', '' FROM fairlane.job WHERE id = 'known'"

    async with other.transaction():
        await other.execute(insert)
        with pytest.raises(Busy):
            async with asyncio.timeout(30):
                await kit.enqueue(id="all", kind=JobKind.BROADCAST)


async def test_cancelling_what_is_being_finished_waits_without_holding_its_queue(kit: Kit, other: Any) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    [claimed] = await worker.claim()
    queue = await _number(other, "default")

    async with other.transaction():
        await other.execute("SELECT 1 FROM fairlane.active_job FOR UPDATE")
        cancelling = asyncio.create_task(kit.store.cancel(["job"]))
        await asyncio.sleep(0.05)
        assert await other.fetchval(placed("SELECT pg_try_advisory_xact_lock(fairlane.space(), $1)", "fairlane"), queue)

    await cancelling
    await worker.complete(claimed)
