"""Numbers of jobs in blocks: what is found by them over the borders of blocks, and what is left when they are empty."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis

from fairlane.model.job import JobState
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.store.clock import ManualClock
from fairlane.store.redis.store import RedisStore
from tests.conformance.kit import Kit
from tests.servers import valkey

BLOCK = 512
PENDING = Filter(state=JobState.PENDING)


@pytest.fixture
async def store() -> AsyncIterator[RedisStore]:
    opened = await RedisStore.open(valkey.server().fresh_namespace(), clock=ManualClock())
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: RedisStore) -> Kit:
    clock = store._functions._clock
    assert isinstance(clock, ManualClock)
    return Kit(store, clock)


async def listed(store: RedisStore, where: Filter, limit: int = 90) -> list[str]:
    """All that is found, page by page."""
    found, cursor = [], None
    while True:
        page = await store.find(where, limit=limit, cursor=cursor)
        found += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            return found


def blocks(store: RedisStore, name: str) -> dict[str, int]:
    """The blocks of a set that are noted, with how many are in each."""
    prefix = store._functions._prefix
    with redis.Redis(port=valkey.server().port, decode_responses=True) as client:
        noted = client.zrange(f"{prefix}{name}", 0, -1)
        there = {key.rpartition("/")[2] for key in client.scan_iter(f"*{prefix[1:-2]}*:{name}*", count=1000)} - {""}
        assert set(noted) == there, "a block is noted that is not there, or the other way round"
        return {block: int(client.scard(f"{prefix}{name}{block}")) for block in noted}


async def test_jobs_are_found_over_the_borders_of_blocks(kit: Kit, store: RedisStore) -> None:
    tasks = ["one", "two", "three"]
    new = [kit.new(task=tasks[number % 3]) for number in range(3 * BLOCK)]
    for start in range(0, len(new), 700):
        await store.enqueue(new[start : start + 700])
    newest = [job.id for job in reversed(new)]
    assert await listed(store, Filter()) == newest
    assert await listed(store, PENDING) == newest
    assert await listed(store, Filter(task="two")) == [job.id for job in reversed(new) if job.task == "two"]
    # Those of a whole block are over, and of the others every second.
    worker = await kit.worker(slots=len(new))
    done = [job for n, job in enumerate(await worker.claim(len(new))) if n % 2 or BLOCK <= n < 2 * BLOCK]
    for start in range(0, len(done), 400):
        await worker.complete(*done[start : start + 400])
    over = {job.id for job in done}
    assert await listed(store, Filter(worker="default/0", state=JobState.COMPLETED)) == [
        id for id in newest if id in over
    ]
    await worker.leave()
    assert await listed(store, PENDING) == [id for id in newest if id not in over]
    assert await listed(store, Filter()) == newest


async def test_one_by_one_they_are_found_as_well(kit: Kit, store: RedisStore) -> None:
    ids = [await kit.enqueue() for _ in range(BLOCK + 10)]
    assert await listed(store, PENDING) == ids[::-1]
    assert blocks(store, "alive/") == {"0": BLOCK - 1, "1": 11}  # numbers begin at 1


async def test_empty_blocks_leave_nothing_and_can_be_filled_again(kit: Kit, store: RedisStore) -> None:
    worker = await kit.worker(slots=10)
    for _ in range(3):
        ids = [await kit.enqueue(), *[job.id for job in await store.enqueue([kit.new() for _ in range(3)])]]
        assert await listed(store, PENDING) == ids[::-1]
        assert blocks(store, "alive/") == {"0": 4}
        await worker.complete(*await worker.claim(10))
        assert blocks(store, "alive/") == {}
    await store.enqueue([kit.new(delay=5)])
    assert blocks(store, "alive/") == {}
    kit.clock.advance(6)
    await store.promote()
    assert blocks(store, "alive/") == {"0": 1}
    await worker.complete(*await worker.claim(10))
    kit.clock.advance(1)
    await store.prune(Retention(completed_seconds=0, history_seconds=0), limit=1_000)
    assert [blocks(store, name) for name in ("alive/", "by:task:1:task/", f"by:session:{worker.id}/")] == [{}] * 3


async def test_a_block_is_noted_again_where_another_server_was_in_charge_meanwhile(kit: Kit, store: RedisStore) -> None:
    await kit.enqueue()
    prefix = store._functions._prefix
    with redis.Redis(port=valkey.server().port) as client:
        # As it is after a failover there and back: this server has cached what the other does not have.
        client.delete(f"{prefix}alive/", f"{prefix}alive/0", f"{prefix}by:task:1:task/", f"{prefix}by:task:1:task/0")
        client.hincrby(f"{prefix}counter", "steps", 1)
    later = await kit.enqueue()
    assert await listed(store, PENDING) == [later]
    assert await listed(store, Filter(task="task")) == [later]
