"""Reading from PostgreSQL: the same answers as from SQLite, each in one round trip and out of one snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fairlane.model.job import KEPT_ATTEMPTS, JobKind, JobState, NewJob
from fairlane.model.listings import LineCursor
from fairlane.model.reading import Filter, Gate
from fairlane.model.schedule import Schedule, Timetable
from fairlane.model.settings import LaneRule
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from fairlane.store.postgresql import ended, lane_order, positions, reading, service_times
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.statements import placed, queries
from tests.conformance.kit import Kit
from tests.servers.stores import KINDS, EmptyStores, empty_stores, second_postgresql

from ..twins import Twins

SERVERS = [kind for kind in (KINDS[1], second_postgresql()) if kind is not None]
STEPS = 160
LOOK_EVERY = 12

pytestmark = pytest.mark.anyio


@pytest.fixture(params=SERVERS)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Empty stores on each version of the server."""
    with empty_stores(request.param, tmp_path) as given:
        yield given


@pytest.fixture
def url(stores: EmptyStores) -> str:
    """The URL of an empty store."""
    return stores.next()


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the store."""
    return ManualClock()


@pytest.fixture
async def store(url: str, clock: ManualClock) -> AsyncIterator[Store]:
    """An empty store."""
    opened = await open_store(url, clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
async def connection(url: str) -> AsyncIterator[Any]:
    """Another connection to the same database."""
    opened = await driver().connect(url)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: Store, clock: ManualClock) -> Kit:
    """The store with short words."""
    return Kit(store, clock)


# -- the same answers ----------------------------------------------------------------------------------------------


async def test_a_life_reads_as_it_does_from_sqlite(
    request: pytest.FixtureRequest, store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    # Another life on each version.
    seed = SERVERS.index(request.node.callspec.params["stores"])
    other = await open_store(f"sqlite:///{tmp_path / 'twin.db'}", clock=clock)
    try:
        twins = Twins(store, other, clock, seed)
        await twins.begin()
        for number in range(STEPS):
            await twins.step()
            if number % LOOK_EVERY == 0:
                await twins.compare()
        await twins.compare_pages()
    finally:
        await other.close()


# -- each call -----------------------------------------------------------------------------------------------------


Read = Callable[[reading.View], Awaitable[object]]
READINGS: dict[str, Read] = {
    "get": lambda view: reading.get(view, ["job-1", "job-2", "unknown"]),
    "find": lambda view: reading.find(view, Filter(), 10, None),
    "find with three filters": lambda view: reading.find(
        view, Filter(queue="default", task="task", state=JobState.PENDING), 1, None
    ),
    "positions": lambda view: positions.read_positions(view, ["job-1", "job-2", "unknown"]),
    "queues": reading.queues,
    "lanes": lambda view: reading.lanes(view, "default", 10),
    "lane_line": lambda view: lane_order.lane_line(view, "default", "user", 10, LineCursor()),
    "ended": lambda view: ended.read_ended(view, ended.EndedCursor(ended.Snapshot(0.0, 0, 1, 0.0, 0)).text, 10),
    "sessions": reading.sessions,
    "session": lambda view: reading.session(view, "worker"),
    "bindings": lambda view: reading.bindings(view, None, None, 10),
    "bindings of a key": lambda view: reading.bindings(view, "default", "plan", 10),
    "leader": reading.leader,
    "schedules": reading.schedules,
    "service": lambda view: service_times.service(view, "default", 1),
}


class Counted:
    """A connection that counts its statements."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.statements = 0

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> Any:
        self.statements += 1
        return await self._connection.fetch(sql, *args, timeout=timeout)

    async def fetchrow(self, sql: str, *args: Any, timeout: float | None = None) -> Any:
        self.statements += 1
        return await self._connection.fetchrow(sql, *args, timeout=timeout)


def view_of(source: reading.Source) -> reading.View:
    """What a store reads through, with the time of the server."""
    return reading.View(source, queries("fairlane"), None, None)


@pytest.fixture
async def busy(kit: Kit) -> Kit:
    """A store with some of what can be read."""
    worker = await kit.worker(id="worker", slots=2)
    await kit.enqueue_all([kit.new(lane="ann") for _ in range(5)])
    await worker.complete(*await worker.claim(1))
    await worker.claim(1)
    await kit.enqueue(sticky="plan")
    await kit.store.declare([Schedule(name="daily", timetable=Timetable(every=60.0), job=b"{}")])
    await kit.store.lead("worker", lease=10)
    return kit


@pytest.mark.parametrize("reading", READINGS)
async def test_a_call_is_one_round_trip(busy: Kit, connection: Any, reading: str) -> None:
    source = Counted(connection)

    assert await READINGS[reading](view_of(source)) != []

    assert source.statements == 1


async def test_nothing_that_reads_writes(busy: Kit, connection: Any) -> None:
    # Not even on a standby.
    await connection.execute("SET default_transaction_read_only = on")

    for read in READINGS.values():
        assert await read(view_of(connection)) != []


async def test_readers_wait_for_no_writer(busy: Kit, connection: Any) -> None:
    async with connection.transaction():
        await connection.execute(placed("SELECT fairlane.lock_alone()", "fairlane"))
        for table in (
            "job",
            "active_job",
            "outcome",
            "queue",
            "session",
            "flow",
            "ready_lane",
            "domain",
            "binding",
            "leader",
            "schedule",
        ):
            await connection.execute(f"SELECT * FROM fairlane.{table} FOR UPDATE")
        async with asyncio.timeout(5):
            await busy.store.get(["job-1"])
            await busy.store.find(Filter())
            await busy.store.positions(["job-3"])
            await busy.store.queues()
            await busy.store.lanes("default")
            await busy.store.sessions()
            await busy.store.bindings()
            await busy.store.leader()
            await busy.store.declare([])


async def test_where_a_job_stands_is_read_out_of_one_snapshot(kit: Kit, connection: Any) -> None:
    for _ in range(3):
        await kit.enqueue(lane="ann")
    await kit.positions("job-3")
    async with connection.transaction():
        # The call has begun, but not counted yet, when the jobs ahead of this one leave.
        await connection.execute("LOCK TABLE fairlane.flow IN ACCESS EXCLUSIVE MODE")
        reading = asyncio.create_task(kit.positions("job-3"))
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'fairlane.flow'::regclass"
        while not await connection.fetchval(waiting):
            await asyncio.sleep(0.005)
        await connection.execute(
            "DELETE FROM fairlane.active_job WHERE seq < (SELECT max(seq) FROM fairlane.active_job)"
        )
    position = await reading

    assert position is not None
    assert (position.place, position.of) == (3, 3)
    after = await kit.positions("job-3")
    assert after is not None
    assert (after.place, after.of) == (1, 1)


# -- what only this store can get wrong ----------------------------------------------------------------------------


async def test_a_job_that_is_stored_and_not_admitted_is_pending_in_every_reading(kit: Kit, connection: Any) -> None:
    await kit.enqueue()
    async with connection.transaction():
        # No job can be admitted while another call holds the store lock exclusively.
        await connection.execute(placed("SELECT fairlane.lock_alone()", "fairlane"))
        await kit.enqueue()
    [position] = await kit.store.positions(["job-2"])
    [queue] = await kit.store.queues()

    assert position is not None
    assert (position.gate, position.place) == (Gate.ARRIVING, None)
    assert await kit.state("job-2") is JobState.PENDING
    assert [job.id for job in (await kit.store.find(Filter(state=JobState.PENDING))).jobs] == ["job-2", "job-1"]
    assert queue.counts.pending == 2


async def test_the_last_attempts_are_kept_in_their_order(kit: Kit) -> None:
    worker = await kit.worker(lease=1e6)
    await kit.enqueue(retries=100)
    for _ in range(KEPT_ATTEMPTS + 5):
        kit.clock.advance(1)
        await worker.retry(*await worker.claim())
    await worker.complete(*await worker.claim())

    attempts = (await kit.job("job-1")).attempts

    assert [attempt.fence for attempt in attempts] == list(range(7, KEPT_ATTEMPTS + 7))
    assert [attempt.outcome for attempt in attempts] == ["retry"] * (KEPT_ATTEMPTS - 1) + ["completed"]


async def test_times_are_exact_whatever_the_database_is_set_to(url: str, connection: Any) -> None:
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f'ALTER DATABASE "{name}" SET extra_float_digits = 0')
    clock = ManualClock(1_700_000_000.123456)
    store = await open_store(url, clock=clock)
    try:
        kit = Kit(store, clock)
        worker = await kit.worker()
        await kit.enqueue()
        await worker.retry(*await worker.claim(), delay=60.000001)
        position = await kit.positions("job-1")
        [attempt] = (await kit.job("job-1")).attempts
    finally:
        await store.close()
        await connection.execute(f'ALTER DATABASE "{name}" RESET extra_float_digits')

    assert attempt.started_at == clock.now()
    assert position is not None
    assert (position.now, position.until) == (clock.now(), clock.now() + 60.000001)


async def test_a_schedule_that_this_machine_cannot_read_does_not_hide_the_others(kit: Kit, connection: Any) -> None:
    timetable = Timetable(every=60.0)
    known = [Schedule(name=name, timetable=timetable, job=b"{}") for name in ("b", "a", "B")]
    await kit.store.declare(known)
    await connection.execute("UPDATE fairlane.schedule SET timetable = '{\"cron\":\"x\"}' WHERE name = 'a'")

    assert [stored.schedule.name for stored in await kit.store.declare([])] == ["B", "b"]


async def test_a_turn_counts_among_what_its_waiter_runs(kit: Kit) -> None:
    # It takes no slot, so it is in none of the counts that a session's row has.
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    waiter = await kit.waiter()
    for _ in range(2):
        await kit.enqueue(kind=JobKind.TURN, lane="doc", waiter=waiter.id)

    [session] = await kit.store.sessions()

    assert session.running == (0, 1, 0)


async def test_pages_of_many_windows_miss_nothing(kit: Kit) -> None:
    jobs = [
        NewJob(id=f"job-{n}", task="rare" if n % 37 == 0 else "task", queue="calm" if n % 3 else "crowd")
        for n in range(900)
    ]
    await kit.enqueue_all(jobs)
    wanted = [job.id for job in reversed(jobs) if (job.task, job.queue) == ("rare", "calm")]

    found: list[str] = []
    cursor: str | None = None
    for _ in range(len(wanted)):
        page = await kit.store.find(Filter(task="rare", queue="calm", state=JobState.PENDING), limit=4, cursor=cursor)
        found += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break

    assert found == wanted
