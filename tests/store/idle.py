"""A worker on Redis whose claim returned nothing, and which is pushed the next job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fairlane.model.job import Claimed, JobState, Priority
from fairlane.model.session import Claim
from fairlane.model.slots import Ask
from fairlane.model.states import complete
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from fairlane.store.redis.store import RedisStore
from fairlane.store.wakeups import queue_topic, worker_topic
from tests.conformance.kit import Kit, Worker
from tests.servers import valkey

LISTENING = [queue_topic("default"), queue_topic("other")]


class Idle:
    """A worker that listens, claims with numbers of its own, and waits. The kit has another store object."""

    def __init__(self, kit: Kit, store: RedisStore, worker: Worker) -> None:
        self.kit = kit
        self.store = store
        self.worker = worker
        self.subscription = store.wakeups.subscribe([*LISTENING, worker_topic(worker.name)])

    async def claim(self, number: int, total: int = 10, store: Store | None = None) -> list[Claimed]:
        asks = tuple(Ask(source, p, total) for p in Priority for source in (None, "default", "other"))
        return await (store or self.store).claim(self.worker.id, Claim(number=number, asks=asks, total=total))

    async def seen(self) -> None:
        """Wait until the server sees that this process is there."""
        channel = f"{self.store._address.prefix}ahead:{self.worker.id}"
        async with asyncio.timeout(30):
            while not self.store.wakeups.show(channel):
                await asyncio.sleep(0.005)

    async def notified(self) -> bool:
        """Whether a hint or a pushed job has arrived."""
        return bool(await self.subscription.wait(10))


@asynccontextmanager
async def opened(url: str, clock: ManualClock) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(url, clock=clock)
    yield store
    await store.close()


@asynccontextmanager
async def idle_worker() -> AsyncIterator[Idle]:
    """Its claim 1 returned nothing. For the store, the kit is another process."""
    url, clock = valkey.server().fresh_namespace(), ManualClock()
    async with opened(url, clock) as here, opened(url, clock) as there:
        kit = Kit(there, clock)
        # The first job of all takes the general path, because it creates the queue, the task and the lane.
        first = await kit.enqueue()
        other = await kit.enqueue(queue="other")
        worker = await kit.worker("default", "other")
        await worker.finish(*[complete(job.held) for job in await worker.claim(2)])
        assert [await kit.state(id) for id in (first, other)] == [JobState.COMPLETED] * 2
        mine = Idle(kit, here, worker)
        assert await mine.claim(100) == []
        await mine.seen()
        assert await mine.claim(101) == []
        yield mine
        mine.subscription.close()


async def sound(kit: Kit) -> None:
    assert (await kit.store.recount()).differences == ()
