"""Many at one queue: a worker that comes too late knows it after one call, and an enqueue that finds the locks taken
needs no second transaction and wakes nobody for nothing. No wake-up is lost for that."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from random import Random
from typing import Any

import msgspec
import pytest

from fairlane.model.ids import new_id
from fairlane.model.job import JobState, NewJob, Priority
from fairlane.model.reading import Gate
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.postgresql import encoding
from fairlane.store.postgresql.statements import placed
from fairlane.store.postgresql.store import PostgresqlStore
from fairlane.store.wakeups import queue_topic
from tests.conformance.kit import Kit, Worker
from tests.servers.postgresql import server
from tests.sizes import sized

from .test_contention import waits_for_somebody

pytestmark = pytest.mark.anyio


class Calls:
    """The functions that a store has called, and the queues it has announced."""

    def __init__(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(kit.store, PostgresqlStore)
        self.names: list[str] = []
        self.announced: list[str] = []
        fetchrow, publish = kit.store._database.fetchrow, kit.store.wakeups.publish

        async def counted(query: str, *args: Any, **options: Any) -> Any:
            self.names += re.findall(r"\.(\w+)_[^_]+\(", query) or re.findall(r"\.(\w+)\(", query)
            return await fetchrow(query, *args, **options)

        def noticed(topics: Iterable[str]) -> None:
            topics = list(topics)
            self.announced += [topic for topic in topics if topic.startswith("queue:")]
            publish(topics)

        monkeypatch.setattr(kit.store._database, "fetchrow", counted)
        monkeypatch.setattr(kit.store.wakeups, "publish", noticed)


@pytest.fixture
def calls(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of the store from here on."""
    return Calls(kit, monkeypatch)


@pytest.fixture
async def patient(kit: Kit, other: Any) -> AsyncIterator[None]:
    """A call that waits for a shared lock waits long enough for a test to see it wait."""
    name = await other.fetchval("SELECT oid::regprocedure::text FROM pg_proc WHERE proname ~ '^lock_beside'")
    await other.execute(f"ALTER FUNCTION {name} SET lock_timeout = '60s'")
    yield
    await other.execute(f"ALTER FUNCTION {name} SET lock_timeout = '200ms'")


def told(worker: Worker) -> Claim:
    """The claim of an idle worker that was notified."""
    return msgspec.structs.replace(worker.everything(3), notified=True)


async def lock_queue(connection: Any) -> None:
    """Take the lock of the queue as a call that changes it does."""
    await connection.execute(
        placed(
            "SELECT fairlane.lock_some(NULL, ARRAY[(SELECT id FROM fairlane.queue WHERE name = 'default')])", "fairlane"
        )
    )


async def begin_claim(kit: Kit, connection: Any, worker: Worker) -> str | None:
    """Claim the only job on a connection that has a transaction open."""
    assert isinstance(kit.store, PostgresqlStore)
    number = await kit.store._number("default")
    assert number is not None
    values = (worker.id, *encoding.one_claim_values(told(worker), number, "default"), *kit.store._clock.readings())
    row = await connection.fetchrow(kit.store._function("claim_one", len(values)), *values)
    found: str | None = row["id"]
    return found


async def test_a_worker_that_comes_too_late_makes_one_call(kit: Kit, calls: Calls) -> None:
    workers = [await kit.worker(slots=3) for _ in range(5)]
    await kit.enqueue(id="only")
    assert await workers[0].claim_ids() == ["only"]
    await kit.store.claim(workers[1].id, told(workers[1]))  # reads the number of the queue
    calls.names.clear()
    for worker in workers[1:]:
        assert await kit.store.claim(worker.id, told(worker)) == []
    assert calls.names == ["claim_one"] * 4


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("commits", [True, False])
async def test_a_worker_that_meets_the_claim_of_another_waits_for_its_end_and_then_knows(
    kit: Kit, other: Any, calls: Calls, commits: bool
) -> None:
    first, second = await kit.worker(slots=3), await kit.worker(slots=3)
    assert await kit.store.claim(second.id, told(second)) == []
    await kit.enqueue(id="only")
    calls.names.clear()
    transaction = other.transaction()
    await transaction.start()
    assert await begin_claim(kit, other, first) == "only"
    claiming = asyncio.create_task(kit.store.claim(second.id, told(second)))
    await waits_for_somebody(other)
    await (transaction.commit() if commits else transaction.rollback())
    found = [job.id for job in await claiming]
    if commits:
        assert (found, calls.names) == ([], ["claim_one"])
    else:
        assert found == ["only"], "what the other did not take is still there"


@pytest.mark.usefixtures("patient")
async def test_a_worker_that_meets_an_enqueue_waits_for_its_commit_and_finds_both_jobs(
    kit: Kit, other: Any, calls: Calls
) -> None:
    worker = await kit.worker(slots=3)
    assert await kit.store.claim(worker.id, told(worker)) == []
    await kit.enqueue(id="first")
    assert isinstance(kit.store, PostgresqlStore)
    values = encoding.job_values(kit.new(id="second"), kit.store.wakeups.enqueue_channel)
    async with other.transaction():
        answer = await other.fetchval(kit.store._function("enqueue_one", len(values), "SELECT"), *values)
        assert answer == 1, "it wakes nobody, because the first job is there"
        claiming = asyncio.create_task(kit.store.claim(worker.id, told(worker)))
        await waits_for_somebody(other)
    found = await claiming
    assert [job.id for job in found] == ["first", "second"]


@pytest.mark.usefixtures("patient")
async def test_an_enqueue_beside_claimable_jobs_is_one_transaction_and_wakes_no_worker(
    kit: Kit, other: Any, calls: Calls
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first")
    calls.names.clear()
    for stored in (["second"], ["third", "fourth"]):
        async with other.transaction():
            await lock_queue(other)
            storing = asyncio.create_task(kit.store.enqueue([kit.new(id=id) for id in stored]))
            await waits_for_somebody(other)
        assert [answer.state for answer in await storing] == [JobState.PENDING] * len(stored)
    assert calls.names == ["enqueue_one", "enqueue"]
    assert calls.announced == []
    position = await kit.positions("fourth")
    assert position is not None
    assert position.gate is Gate.ARRIVING
    assert await worker.claim_ids(10) == ["first", "second", "third", "fourth"]
    assert (await kit.store.recount()).differences == ()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("count", [1, 2])
async def test_an_enqueue_that_meets_the_claim_of_the_last_job_wakes_the_workers(
    kit: Kit, other: Any, calls: Calls, count: int
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="last")
    transaction = other.transaction()
    await transaction.start()
    assert await begin_claim(kit, other, worker) == "last"
    calls.announced.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(kit.store.enqueue([kit.new() for _ in range(count)]))
        await waits_for_somebody(other)
        await transaction.commit()
    assert calls.announced == ["queue:default"]


@pytest.mark.usefixtures("patient")
async def test_an_enqueue_of_another_class_wakes_the_workers_that_wait_for_that_class(
    kit: Kit, other: Any, calls: Calls
) -> None:
    await kit.enqueue(id="low", priority=Priority.LOW)
    calls.announced.clear()
    async with other.transaction():
        await lock_queue(other)
        storing = asyncio.create_task(kit.enqueue(id="high", priority=Priority.HIGH))
        await waits_for_somebody(other)
    await storing
    assert calls.announced == ["queue:default"]


@pytest.mark.usefixtures("patient")
async def test_jobs_stored_one_after_the_other_start_in_that_order_although_some_met_a_lock(
    kit: Kit, other: Any, calls: Calls
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="a")
    for stored, next_one in ((["b"], "c"), (["d", "e"], "f")):
        async with other.transaction():
            await lock_queue(other)
            storing = asyncio.create_task(kit.store.enqueue([kit.new(id=id) for id in stored]))
            await waits_for_somebody(other)
        await storing
        # The next call that has the lock admits what was stored before its own.
        await kit.enqueue(id=next_one)
    await kit.store.enqueue([kit.new(id="g", expires=3_600.0), kit.new(id="h")])
    assert await worker.claim_ids(10) == list("abcdefgh")
    assert (await kit.store.recount()).differences == ()


async def test_a_lock_that_stays_taken_delays_an_enqueue_only_briefly_and_wakes_the_workers(
    kit: Kit, other: Any, calls: Calls
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first")
    async with other.transaction():
        await lock_queue(other)
        async with asyncio.timeout(30):
            await kit.enqueue(id="second")
            await kit.store.enqueue([kit.new(id="third"), kit.new(id="fourth")])
    assert set(calls.announced) == {"queue:default"}, "what it could not see, it does not rely on"
    assert await worker.claim_ids(10) == ["first", "second", "third", "fourth"]


@pytest.mark.usefixtures("patient")
async def test_a_job_with_a_due_time_that_met_a_lock_is_scheduled_when_the_call_returns(
    kit: Kit, other: Any, calls: Calls
) -> None:
    await kit.enqueue(id="first")
    async with other.transaction():
        await lock_queue(other)
        storing = asyncio.create_task(kit.enqueue(id="later", delay=5.0))
        await waits_for_somebody(other)
    await storing
    seen = await kit.store.promote()
    assert seen.next_due is not None
    assert 0.0 < seen.next_due <= 5.0
    assert calls.names[-1] == "promote"


async def test_no_job_waits_for_a_poll_however_producers_and_workers_meet() -> None:
    """Workers here never poll, and claim only when notified: a lost wake-up would leave a job for ever."""
    url = server().fresh_database()
    stores = [await PostgresqlStore.open(url) for _ in range(8)]
    rng = Random(1)
    done: set[str] = set()
    slots = 3

    async def work(store: PostgresqlStore, id: str) -> None:
        await store.register(
            NewSession(id=id, kind=SessionKind.WORKER, lease=600.0, queues=("default",), slots=Slots(total=slots))
        )
        subscription = store.wakeups.subscribe([queue_topic("default")])
        number = 0
        try:
            while True:
                await subscription.wait()
                number += 1
                ask = Claim(number=number, asks=(Ask("default", Priority.NORMAL, slots),), total=slots, notified=True)
                claimed = await store.claim(id, ask)
                while claimed:
                    done.update(job.id for job in claimed)
                    number += 1
                    # As a worker does: write results and claim in one call.
                    more = Claim(number=number, asks=(Ask("default", Priority.NORMAL, slots),), total=slots)
                    ended = [complete(job.held) for job in claimed]
                    claimed = list((await store.finish(id, ended, claim=more)).claimed)
        finally:
            subscription.close()

    async def produce(store: PostgresqlStore, number: int) -> int:
        await asyncio.sleep(rng.random() * 0.004)
        batch = rng.choice((1, 1, 1, 2))
        await store.enqueue([NewJob(id=new_id(), task="t", lane=f"lane-{number % 3}") for _ in range(batch)])
        return batch

    working = [asyncio.create_task(work(store, f"w{n}")) for n, store in enumerate(stores[:4])]
    try:
        async with asyncio.timeout(60):
            while len(await stores[7].sessions()) < 4 and not any(task.done() for task in working):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        expected = 0
        for _ in range(sized(150, 3_000)):
            expected += sum(await asyncio.gather(*(produce(store, n) for n, store in enumerate(stores[4:]))))
            async with asyncio.timeout(60):
                while len(done) < expected and not any(task.done() for task in working):
                    await asyncio.sleep(0.001)
            assert [task for task in working if task.done()] == []
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        for store in stores:
            await store.close()
        server().done(url)
