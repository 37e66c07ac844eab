"""Jobs stored on a user's own connection: they and the user's rows commit together, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fairlane.errors import Conflict, InvalidInput
from fairlane.model.job import CronSlot, Enqueued, Job, JobKind, JobState, NewJob, Priority
from fairlane.model.reading import Filter, Gate
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.clock import ManualClock
from fairlane.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fairlane.db"


@pytest.fixture
async def store(path: Path, clock: ManualClock) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(f"sqlite:///{path}", clock=clock)
    await opened.register(
        NewSession(id="w", kind=SessionKind.WORKER, lease=3600, queues=("default",), slots=Slots(total=10))
    )
    yield opened
    await opened.close()


@pytest.fixture
def connection(store: SqliteStore, path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of a user, with another table in the same file."""
    opened = sqlite3.connect(path)
    opened.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
    opened.commit()
    yield opened
    opened.close()


def order(connection: sqlite3.Connection, id: str) -> None:
    """Write a row of the user's; this begins a transaction, as the module does by itself."""
    connection.execute("INSERT INTO orders VALUES (?)", (id,))


async def job(store: SqliteStore, id: str) -> Job | None:
    [found] = await store.get([id])
    return found


async def gate(store: SqliteStore, id: str) -> Gate | None:
    [position] = await store.positions([id])
    return None if position is None else position.gate


async def claimed(store: SqliteStore, number: int) -> list[str]:
    """What a worker can start and complete now."""
    asks = tuple(Ask(source, p, 10) for p in Priority for source in (None, "default"))
    jobs = await store.claim("w", Claim(number=number, asks=asks, total=10))
    await store.finish("w", [complete(job.held) for job in jobs])
    return [job.id for job in jobs]


async def test_a_committed_job_arrives_with_the_next_admission_and_then_starts(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    order(connection, "o")
    [answer] = store.enqueue_on(connection, [NewJob(id="a", task="task", payload=b"[[1],{}]")])
    assert answer == Enqueued("a", True, JobState.PENDING)
    # It is not visible to others before the commit.
    assert await job(store, "a") is None
    connection.commit()
    found = await job(store, "a")
    assert found is not None
    assert (found.state, found.payload, found.arrival) == (JobState.PENDING, b"[[1],{}]", None)
    assert await gate(store, "a") is Gate.ARRIVING
    assert await claimed(store, 1) == []
    assert (await store.admit()).admitted == 1
    assert await gate(store, "a") is Gate.NONE
    assert await claimed(store, 2) == ["a"]
    assert (await store.admit()).admitted == 0
    assert connection.execute("SELECT id FROM orders").fetchall() == [("o",)]
    assert not (await store.recount()).differences


async def test_a_rolled_back_job_never_existed(store: SqliteStore, connection: sqlite3.Connection) -> None:
    order(connection, "o")
    store.enqueue_on(connection, [NewJob(id="a", task="task", queue="new-queue")])
    connection.rollback()
    assert await job(store, "a") is None
    assert (await store.admit()).admitted == 0
    assert "new-queue" not in {reading.name for reading in await store.queues()}
    assert connection.execute("SELECT id FROM orders").fetchall() == []
    [answer] = await store.enqueue([NewJob(id="a", task="task")])
    assert answer.created


async def test_a_connection_without_a_transaction_is_refused(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    with pytest.raises(InvalidInput, match="no open transaction") as refusal:
        store.enqueue_on(connection, [NewJob(id="a", task="task")])
    assert refusal.value.field == "connection"
    assert not connection.in_transaction
    assert await job(store, "a") is None


async def test_a_transaction_begun_by_hand_will_do(store: SqliteStore, path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN")
    store.enqueue_on(connection, [NewJob(id=id, task="task") for id in "abc"])
    connection.execute("COMMIT")
    connection.close()
    assert (await store.admit()).admitted == 3
    assert await claimed(store, 1) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "job",
    [
        NewJob(id="a", task="task", kind=JobKind.BROADCAST),
        NewJob(id="a", task="task", kind=JobKind.TURN, lane="l", waiter="w"),
        NewJob(id="a", task="task", cron=CronSlot("hourly", 3600.0)),
    ],
)
async def test_what_needs_more_than_an_insert_is_refused(
    store: SqliteStore, connection: sqlite3.Connection, job: NewJob
) -> None:
    order(connection, "o")
    with pytest.raises(InvalidInput, match="plain jobs"):
        store.enqueue_on(connection, [job])
    # The user's transaction is not ended.
    connection.commit()
    assert await store.get(["a"]) == [None]
    assert connection.execute("SELECT id FROM orders").fetchall() == [("o",)]


async def test_an_id_that_exists_is_answered_and_other_content_under_it_refused(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    await store.enqueue([NewJob(id="a", task="task", delay=60)])
    order(connection, "o")
    assert store.enqueue_on(connection, [NewJob(id="a", task="task", delay=60)]) == [
        Enqueued("a", False, JobState.SCHEDULED)
    ]
    with pytest.raises(Conflict, match="other content"):
        store.enqueue_on(connection, [NewJob(id="b", task="task"), NewJob(id="a", task="other")])
    # A refusal is for all of a call, and leaves the user's own rows alone.
    connection.commit()
    assert await job(store, "b") is None
    assert connection.execute("SELECT id FROM orders").fetchall() == [("o",)]
    assert not (await store.recount()).differences


async def test_a_unique_value_is_taken_with_the_commit_and_a_duplicate_is_answered(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    once = NewJob(id="a", task="task", unique="once")
    order(connection, "o")
    store.enqueue_on(connection, [once])
    connection.rollback()
    order(connection, "o")
    store.enqueue_on(connection, [once])
    assert store.enqueue_on(connection, [NewJob(id="b", task="task", unique="once")])[0].id == "a"
    connection.commit()
    [answer] = await store.enqueue([NewJob(id="c", task="task", unique="once")])
    assert answer == Enqueued("a", False, JobState.PENDING)
    await store.admit()
    assert await claimed(store, 1) == ["a"]
    [answer] = await store.enqueue([NewJob(id="c", task="task", unique="once")])
    assert answer.created, "its end gives the value back"
    assert not (await store.recount()).differences


async def test_a_connection_to_another_file_is_refused(store: SqliteStore, tmp_path: Path) -> None:
    elsewhere = sqlite3.connect(tmp_path / "elsewhere.db")
    elsewhere.execute("BEGIN")
    with pytest.raises(InvalidInput, match="another file"):
        store.enqueue_on(elsewhere, [NewJob(id="a", task="task")])
    elsewhere.close()


async def test_the_row_and_text_factories_of_the_user_are_kept(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    connection.row_factory = sqlite3.Row
    connection.text_factory = bytes
    order(connection, "o")
    store.enqueue_on(connection, [NewJob(id="a", task="task")])
    assert connection.execute("SELECT id FROM orders").fetchone()["id"] == b"o"
    connection.commit()
    assert (await store.admit()).admitted == 1


async def test_an_arriving_job_obeys_its_delay_lane_and_expiry_from_its_admission_on(
    store: SqliteStore, connection: sqlite3.Connection, clock: ManualClock
) -> None:
    lanes = (LaneRule(pattern="narrow", limit=1),)
    await store.configure([SettingsChange(queue="default", declared=QueueSettings(lanes=lanes))])
    order(connection, "o")
    store.enqueue_on(
        connection,
        [
            NewJob(id="later", task="task", delay=60),
            NewJob(id="first", task="task", lane="narrow"),
            NewJob(id="second", task="task", lane="narrow"),
            NewJob(id="sticky", task="task", sticky="plan"),
            NewJob(id="brief", task="task", expires=10),
        ],
    )
    connection.commit()
    clock.advance(30)
    assert (await store.admit()).admitted == 5
    assert await gate(store, "later") is Gate.DUE
    assert await gate(store, "second") is Gate.LANE
    assert (await store.promote()).expired == 1
    assert sorted(await claimed(store, 1)) == ["first", "sticky"]
    assert await claimed(store, 2) == ["second"]
    [binding] = await store.bindings(key="plan")
    assert binding.index == 0
    clock.advance(30)
    assert (await store.promote()).promoted == 1
    assert await claimed(store, 3) == ["later"]
    assert not (await store.recount()).differences


async def test_calls_wait_for_the_end_of_a_users_transaction(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    order(connection, "o")
    store.enqueue_on(connection, [NewJob(id="a", task="task")])
    call = asyncio.ensure_future(store.enqueue([NewJob(id="b", task="task")]))
    # Readers do not wait.
    assert await job(store, "a") is None
    assert not call.done()
    connection.commit()
    [answer] = await call
    assert answer.created
    assert None not in await store.get(["a", "b"])


async def test_an_arriving_job_can_be_found_and_cancelled(store: SqliteStore, connection: sqlite3.Connection) -> None:
    order(connection, "o")
    store.enqueue_on(connection, [NewJob(id="a", task="task"), NewJob(id="b", task="task", delay=60)])
    connection.commit()
    page = await store.find(Filter(state=JobState.PENDING))
    assert "a" in {found.id for found in page.jobs}
    assert await store.cancel(["a", "b"]) == [JobState.CANCELLED] * 2
    assert (await store.admit()).admitted == 0
    assert await claimed(store, 1) == []
    assert not (await store.recount()).differences


async def test_a_recount_beside_arriving_jobs_finds_nothing_amiss(
    store: SqliteStore, connection: sqlite3.Connection
) -> None:
    order(connection, "o")
    store.enqueue_on(connection, [NewJob(id="a", task="task")])
    connection.commit()
    recount = await store.recount()
    assert recount.differences == ()
    assert recount.jobs == 1
