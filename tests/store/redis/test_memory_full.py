"""A server whose memory is full: new jobs are refused as a whole, and those that are there run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane import Fairlane, current_job
from fairlane.errors import StoreFull
from fairlane.model.job import JobState, NewJob
from fairlane.model.maintenance import Retention
from fairlane.model.settings import LaneRule
from fairlane.model.states import complete
from fairlane.store.clock import ManualClock
from fairlane.store.diagnosis import Diagnosable, Level
from fairlane.store.redis.store import RedisStore
from fairlane.task import Task
from tests.conformance.kit import Kit
from tests.servers.valkey import ValkeyServer, own_server

pytestmark = pytest.mark.anyio
BUFFERS = 300_000
PAYLOAD = b'["%s"]' % (b"x" * 20_000)


@pytest.fixture(scope="module")
def mine() -> Iterator[ValkeyServer]:
    """A small server."""
    with own_server(options=["--maxmemory", "4mb", "--maxmemory-policy", "noeviction"]) as started:
        yield started


@pytest.fixture
async def kit(mine: ValkeyServer) -> AsyncIterator[Kit]:
    mine.ask("FLUSHDB", "SYNC")
    mine.ask("CONFIG", "SET", "maxmemory", "4mb")
    store = await RedisStore.open(mine.fresh_namespace())
    yield Kit(store, ManualClock())
    await store.close()


async def fill(mine: ValkeyServer, kit: Kit, **fields: str) -> list[str]:
    """Enqueue until there is no room. The ids of those that were taken."""
    ids: list[str] = []
    full = False
    while not full:
        try:
            ids.append(await kit.enqueue(payload=PAYLOAD, **fields))
        except StoreFull:
            full = True
    # The buffers of connections count as well. A little below, so that the server is full without them too.
    mine.ask("CONFIG", "SET", "maxmemory", mine.ask("INFO", "memory")["used_memory"] - BUFFERS)
    return ids


def application(url: str) -> tuple[Fairlane, Task[[str], int]]:
    """An application with everything that is stored when it starts, anew each time as in another process."""
    app = Fairlane(url)
    app.queue("default", limit=5)

    @app.task(name="work")
    async def work(text: str) -> int:
        current_job().progress("half")
        return len(text)

    @app.task(name="tick", every=3_600)
    async def tick() -> None:
        """Does nothing."""

    return app, work


def sizes(mine: ValkeyServer) -> dict[str, int]:
    """How large each key is."""
    return {key: mine.ask("MEMORY", "USAGE", key, "SAMPLES", 0) for key in mine.ask("KEYS", "*")}


async def test_nothing_of_what_was_refused_is_there(mine: ValkeyServer, kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    taken = await fill(mine, kit, lane="user:ann")
    before = sizes(mine)
    batch = [NewJob(id=f"no-{n}", task="novel", queue="fresh", lane=f"l{n}", unique=f"u{n}") for n in range(50)]
    with pytest.raises(StoreFull, match="Raise maxmemory"):
        await kit.store.enqueue(batch)

    assert sizes(mine) == before
    assert await kit.store.get([job.id for job in batch]) == [None] * 50
    assert [queue.name for queue in await kit.store.queues()] == ["default"]
    assert len((await kit.store.recount()).differences) == 0
    [position] = await kit.store.positions([taken[-1]])
    assert position is not None
    assert position.place == len(taken)


async def test_what_is_there_runs_on_and_what_was_refused_finds_room_then(mine: ValkeyServer, kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    ids = await fill(mine, kit, lane="user:ann")
    refused = NewJob(id="again", task="task", payload=PAYLOAD, lane="user:ann")
    assert len(ids) > 80

    # The server is full all the while: a worker comes, claims, renews, finishes and leads.
    worker = await kit.worker()
    term = await kit.store.lead(worker.id, lease=10.0)
    assert term is not None
    for place, id in enumerate(ids[:60]):
        [job] = await worker.claim()
        assert job.id == id
        await worker.renew(job)
        finished = await kit.store.finish(worker.id, [complete(job.held, b'"done"')])
        assert [verdict.accepted for verdict in finished.verdicts] == [True], place
        with pytest.raises(StoreFull):
            await kit.store.enqueue([refused])
    await kit.store.cancel(ids[60:65])
    # An operator can slow down the queue.
    await kit.settings("default", LaneRule(pattern="*", limit=1, max_pending=200), version=1)
    await kit.store.promote(term=term.number)
    await kit.store.rescue(term=term.number)
    assert (await kit.store.recount()).differences == ()
    assert isinstance(kit.store, Diagnosable)
    assert [each.level for each in await kit.store.findings() if each.topic == "memory"] == [Level.ERROR]

    # Retention makes room.
    await kit.store.prune(Retention(completed_count=0, failed_count=0, id_seconds=0), term=term.number)
    [answer] = await kit.store.enqueue([refused])
    assert (answer.created, answer.state) == (True, JobState.PENDING)
    assert await worker.claim_ids() == [ids[65]]
    assert (await kit.store.recount()).differences == ()


async def test_a_worker_that_starts_on_a_full_server_works_it_off(mine: ValkeyServer, kit: Kit) -> None:
    sender, work = application(mine.url)
    calls = [work.call("x" * 20_000) for _ in range(3)]
    ids = [handle.id for handle in await sender.enqueue_many(calls)]
    await fill(mine, kit)
    await sender.close()

    # It opens the store, declares its queue and its schedule, and its bodies report.
    app, work = application(mine.url)
    await asyncio.wait_for(app.worker(slots=10, burst=True).run(), 30)
    assert [await app.client.handle(id).result(timeout=5) for id in ids] == [20_000] * 3
    with pytest.raises(StoreFull):
        await work.enqueue("x")
    await app.close()


async def test_more_memory_is_room_too(mine: ValkeyServer, kit: Kit) -> None:
    await fill(mine, kit)
    mine.ask("CONFIG", "SET", "maxmemory", "8mb")
    assert await kit.enqueue(payload=PAYLOAD)
