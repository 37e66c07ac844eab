"""A server whose memory is full: new jobs are refused as a whole, and those that are there run on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane.backends.redis.store import RedisStore
from fairlane.clock import ManualClock
from fairlane.errors import StoreFull
from fairlane.finding import Examined, Level
from fairlane.job import JobState, NewJob
from fairlane.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.states import complete
from fairlane.upkeep import Retention
from tests.conformance.kit import Kit
from tests.servers.valkey import ValkeyServer, own_server

pytestmark = pytest.mark.anyio
PAYLOAD = b'["%s"]' % (b"x" * 20_000)


@pytest.fixture(scope="module")
def mine() -> Iterator[ValkeyServer]:
    """A small server."""
    with own_server(options=["--maxmemory", "4mb", "--maxmemory-policy", "noeviction"]) as started:
        yield started


@pytest.fixture
async def kit(mine: ValkeyServer) -> AsyncIterator[Kit]:
    mine.ask("FLUSHDB")
    store = await RedisStore.open(mine.fresh_namespace())
    yield Kit(store, ManualClock())
    await store.close()


async def fill(kit: Kit, **fields: str) -> list[str]:
    """Enqueue until there is no room. The ids of those that were taken."""
    ids: list[str] = []
    for _ in range(1_000):
        try:
            ids.append(await kit.enqueue(payload=PAYLOAD, **fields))
        except StoreFull:
            return ids
    raise AssertionError("the server is never full")


def sizes(mine: ValkeyServer) -> dict[str, int]:
    """How large each key is."""
    return {key: mine.ask("MEMORY", "USAGE", key, "SAMPLES", 0) for key in mine.ask("KEYS", "*")}


async def test_nothing_of_what_was_refused_is_there(mine: ValkeyServer, kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    taken = await fill(kit, lane="user:ann")
    before = sizes(mine)
    batch = [NewJob(id=f"no-{n}", task="novel", queue="fresh", lane=f"l{n}", unique=f"u{n}") for n in range(50)]
    with pytest.raises(StoreFull, match="Raise maxmemory"):
        await kit.store.enqueue(batch)
    with pytest.raises(StoreFull):
        await kit.store.configure([SettingsChange(queue="fresh", declared=QueueSettings(limit=3), version=1)])

    assert sizes(mine) == before
    assert await kit.store.get([job.id for job in batch]) == [None] * 50
    assert [queue.name for queue in await kit.store.queues()] == ["default"]
    assert len((await kit.store.recount()).differences) == 0
    [standing] = await kit.store.standing([taken[-1]])
    assert standing is not None
    assert standing.place == len(taken)


async def test_what_is_there_runs_on_and_what_was_refused_finds_room_then(mine: ValkeyServer, kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    ids = await fill(kit, lane="user:ann")
    refused = NewJob(id="again", task="task", payload=PAYLOAD, lane="user:ann")
    assert len(ids) > 60

    # The server is full all the while: a worker comes, claims, renews, finishes and leads.
    worker = await kit.worker()
    term = await kit.store.lead(worker.id, lease=10.0)
    assert term is not None
    for place, id in enumerate(ids[:40]):
        [job] = await worker.claim()
        assert job.id == id
        await worker.renew(job)
        finished = await kit.store.finish(worker.id, [complete(job.held, b'"done"')])
        assert [verdict.accepted for verdict in finished.verdicts] == [True], place
        with pytest.raises(StoreFull):
            await kit.store.enqueue([refused])
    await kit.store.cancel(ids[40:45])
    await kit.store.promote(term=term.number)
    await kit.store.rescue(term=term.number)
    assert (await kit.store.recount()).differences == ()
    assert isinstance(kit.store, Examined)
    assert [each.level for each in await kit.store.findings() if each.topic == "memory"] == [Level.ERROR]

    # Retention makes room.
    await kit.store.prune(Retention(completed_count=0, failed_count=0, id_seconds=0), term=term.number)
    [answer] = await kit.store.enqueue([refused])
    assert (answer.created, answer.state) == (True, JobState.PENDING)
    assert await worker.claim_ids() == [ids[45]]
    assert (await kit.store.recount()).differences == ()


async def test_more_memory_is_room_too(mine: ValkeyServer, kit: Kit) -> None:
    await fill(kit)
    mine.ask("CONFIG", "SET", "maxmemory", "8mb")
    try:
        assert await kit.enqueue(payload=PAYLOAD)
    finally:
        mine.ask("CONFIG", "SET", "maxmemory", "4mb")
