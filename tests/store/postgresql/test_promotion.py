"""Passes of the promoter on a real server: concurrent ones, interrupted ones, and over an outage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from fairlane.errors import FairlaneError, StoreUnavailable
from fairlane.manager.manager import Manager
from fairlane.model.intervals import Intervals
from fairlane.model.job import JobState, Priority
from fairlane.store.clock import ManualClock
from fairlane.store.postgresql.statements import placed
from fairlane.store.postgresql.store import PostgresqlStore
from tests.conformance.kit import Kit
from tests.manager.waiting import running, until, until_awaited
from tests.servers.postgresql import Server, own_server

pytestmark = pytest.mark.anyio
SHORT = Intervals().scaled(0.1)
DELAY = 0.2
JOBS = 40
LOCKS = """
SELECT (SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
        WHERE d.datname = current_database() AND l.locktype = 'advisory')
     + (SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL)
"""
"""Locks that are held, and transactions that are open. A connection that is being opened has one for a moment too."""
SPOIL = """
CREATE FUNCTION public.spoil() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'spoiled'; END $$;
CREATE TRIGGER spoil BEFORE UPDATE ON fairlane.active_job FOR EACH ROW WHEN (OLD.seq = {})
EXECUTE FUNCTION public.spoil();
"""


async def due(kit: Kit, count: int = JOBS) -> list[str]:
    """Due jobs that were not promoted."""
    jobs = [kit.new(id=f"job-{n:02}", delay=0.01) for n in range(count)]
    await kit.store.enqueue(jobs)
    await asyncio.sleep(0.02)
    return [job.id for job in jobs]


async def nothing_is_held(other: Any) -> None:
    """Wait until the store holds no lock and no transaction."""

    async def free() -> bool:
        return bool(await other.fetchval(LOCKS) == 0)

    await until_awaited(free)


async def states(kit: Kit, ids: list[str]) -> list[JobState]:
    """The states of jobs that exist."""
    return [job.state for job in await kit.store.get(ids) if job is not None]


# -- beside each other -----------------------------------------------------------------------------------------------


async def test_a_pass_that_met_another_one_takes_nothing_twice_and_comes_back(kit: Kit, other: Any) -> None:
    ids = await due(kit)
    async with other.transaction():
        # A pass that has done its work and has not committed yet.
        assert (
            await other.fetchval(placed("SELECT promoted FROM fairlane.promote($1, NULL)", "fairlane"), JOBS // 2)
            == JOBS // 2
        )
        second = asyncio.create_task(kit.store.promote(limit=JOBS // 2))
        await asyncio.sleep(0.1)
        assert await states(kit, ids) == [JobState.SCHEDULED] * JOBS
    met = await asyncio.wait_for(second, 10)
    rest = await kit.store.promote(limit=JOBS)

    assert met.promoted + rest.promoted == JOBS // 2
    assert met.more, "a pass that found its jobs taken by another runs again at once"
    assert await states(kit, ids) == [JobState.PENDING] * JOBS
    arrivals = [job.arrival for job in await kit.store.get(ids) if job is not None]
    assert len(set(arrivals)) == JOBS
    assert (await kit.store.recount()).differences == ()


async def test_a_pass_promotes_all_its_jobs_in_one_transaction(kit: Kit, other: Any) -> None:
    await due(kit)

    assert (await kit.store.promote()).promoted == JOBS

    assert await other.fetchval("SELECT count(DISTINCT xmin::text) FROM fairlane.active_job") == 1
    await nothing_is_held(other)


async def test_a_pass_that_fails_in_the_middle_leaves_everything_as_it_was_and_holds_nothing(
    kit: Kit, other: Any
) -> None:
    ids = await due(kit)
    before = await kit.store.get(ids)
    number = await other.fetchval("SELECT seq FROM fairlane.job WHERE id = $1", ids[JOBS // 2])
    await other.execute(SPOIL.format(number))
    try:
        with pytest.raises(FairlaneError, match="spoiled"):
            await kit.store.promote()
        assert await kit.store.get(ids) == before
        await nothing_is_held(other)
    finally:
        await other.execute("DROP FUNCTION public.spoil() CASCADE")

    assert (await kit.store.promote()).promoted == JOBS
    assert (await kit.store.recount()).differences == ()


async def test_a_leader_holds_no_lock_and_no_transaction_between_its_passes(kit: Kit, other: Any) -> None:
    manager = Manager(kit.store, session="one", intervals=SHORT)
    async with running(manager.run()):
        await kit.store.enqueue([kit.new(delay=0.02 * n) for n in range(1, 21)])
        await until(lambda: manager.counts["promoted"] == 20)
        looks = [await other.fetchval(LOCKS) for _ in range(50)]

    assert looks.count(0) > len(looks) * 0.8


async def test_a_due_time_is_the_servers_whatever_the_clock_of_the_sender_says(
    kit: Kit, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3_600.0)
    id = await kit.enqueue(delay=30.0)
    now = await other.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")

    assert (await kit.job(id)).due_at == pytest.approx(now + 30.0, abs=5.0)
    assert (await kit.store.promote()).promoted == 0


# -- over an outage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mine() -> Iterator[Server]:
    """A server that may be stopped."""
    with own_server(durable=False) as started:
        yield started


@pytest.mark.parametrize("outage", ["stopped", "frozen"])
async def test_jobs_that_come_due_in_an_outage_stay_scheduled_and_arrive_once_when_it_is_over(
    mine: Server, outage: str
) -> None:
    url = mine.fresh_database()
    store = await PostgresqlStore.open(url)
    kit = Kit(store, ManualClock())
    manager = Manager(store, session="one", intervals=SHORT)
    async with running(manager.run()):
        await until(lambda: manager.leads)
        jobs = [kit.new(delay=DELAY - 0.001 * n, priority=Priority(n % 3)) for n in range(JOBS)]
        await store.enqueue(jobs)
        with ExitStack() as over:
            if outage == "stopped":
                await asyncio.to_thread(mine.stop)
                over.callback(mine.start)
                begun = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    await store.promote()
                assert time.monotonic() - begun < 10
            else:
                over.enter_context(mine.frozen())
            await asyncio.sleep(3 * DELAY)
            assert manager.counts["promoted"] == 0
        ids = [job.id for job in jobs]

        async def all_arrived() -> bool:
            with suppress(StoreUnavailable):
                return await states(kit, ids) == [JobState.PENDING] * JOBS
            return False

        await until_awaited(all_arrived)

    # A pass that the server made when it went on is not counted if its answer came after the end of the term.
    assert manager.counts["promoted"] in (0, JOBS)
    found = [job for job in await store.get(ids) if job is not None]
    # All were due, so one pass took them: by class, and in it by due time, which fell from job to job.
    order = sorted(range(JOBS), key=lambda n: found[n].arrival or 0)
    assert order == sorted(range(JOBS), key=lambda n: (n % 3, -n))
    assert (await store.recount()).differences == ()
    await store.close()
    mine.done(url)
