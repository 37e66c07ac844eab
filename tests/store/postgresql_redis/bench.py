"""A store on PostgreSQL and Redis, what its lists hold, and workers that only wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from fairlane.model.job import Claimed, Priority
from fairlane.model.session import Claim
from fairlane.store.clock import ManualClock
from fairlane.store.deployment import with_redis
from fairlane.store.postgresql_redis import shard
from fairlane.store.postgresql_redis.store import PostgresqlRedisStore
from fairlane.store.postgresql_redis.work import TokenWork
from tests.conformance.kit import Kit, Worker
from tests.servers.valkey import ValkeyServer

PATIENCE = 60.0
ALL = frozenset(Priority)


async def until(holds: Callable[[], Any | Awaitable[Any]], what: str) -> Any:
    """Wait for a condition. Returns its value."""
    found = None
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                found = holds()
                if asyncio.iscoroutine(found):
                    found = await found
                if found:
                    return found
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"it never came to pass that {what}") from None


def never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls wait for a frozen server until it continues."""
    monkeypatch.setattr(shard, "CALL_SECONDS", 10 * PATIENCE)
    monkeypatch.setattr(shard, "ANSWER_SECONDS", 10 * PATIENCE)


class Waiting:
    """A worker that waits for tokens, and claims only when the test says so."""

    def __init__(self, store: PostgresqlRedisStore, worker: Worker) -> None:
        self.worker = worker
        self.woken = 0
        work = store.wakeups.work(list(worker.session.queues), self._wake)
        assert isinstance(work, TokenWork)
        self.work = work
        work.listen(worker.name)

    def _wake(self) -> None:
        self.woken += 1

    async def offer(self, *classes: Priority) -> None:
        """Wait with room for these classes. Returns when the server knows."""
        self.work.offer(frozenset(classes))
        await until(
            lambda: all(
                popper._blocked_on is not None and popper._blocked_on >= popper._wanted
                for popper in self.work._poppers
                if popper._wanted
            ),
            "it blocks on its lists",
        )
        # The calls are written; a moment until they are read.
        await asyncio.sleep(0.02)

    async def wakes(self, times: int) -> None:
        """Wait until it was woken this many times."""
        await until(lambda: self.woken >= times, f"the worker is woken {times} times")

    async def claim(self, total: int = 1) -> list[Claimed]:
        """Claim as a worker does after it was woken."""
        self.work.claiming()
        claim: Claim = self.worker.everything(total)
        jobs = await self.worker.kit.store.claim(self.worker.id, claim)
        self.work.claimed(claim, jobs)
        return jobs


class Bench:
    """What a test of tokens needs."""

    def __init__(self, store: PostgresqlRedisStore, server: ValkeyServer, url: str = "") -> None:
        self.url = url
        self.store = store
        self.server = server
        self.kit = Kit(store, ManualClock())
        self._waiting: list[Waiting] = []

    def tokens(self, queue: str = "default", priority: Priority = Priority.NORMAL) -> list[str]:
        """The traces of the tokens of a list, the next to be popped first."""
        [shard] = [shard for shard in self.store._shards if priority in shard.priorities]
        found = self.server.ask("LRANGE", shard.keys.list(queue, priority), 0, -1)
        return [token.partition(" ")[2] for token in found]

    async def has_tokens(self, count: int, queue: str = "default", priority: Priority = Priority.NORMAL) -> list[str]:
        """Wait for this number of tokens."""
        await until(lambda: len(self.tokens(queue, priority)) == count, f"{queue} has {count} tokens of {priority}")
        return self.tokens(queue, priority)

    async def settled(self) -> None:
        """Wait until no call to Redis is in progress."""
        dispatcher = self.store._dispatcher()
        await until(lambda: not dispatcher._tasks, "nothing is on its way")

    async def sweep(self) -> None:
        """A pass of the leader, with its effects in Redis."""
        await self.store.admit()
        await self.settled()

    async def lose_tokens(self) -> None:
        """Remove the tokens of the default list, once no count on its way can push another."""
        await self.settled()
        self.server.ask("DEL", self.store._shards[0].keys.list("default", Priority.NORMAL))

    def wipe(self) -> None:
        """Lose everything in Redis."""
        self.server.ask("FLUSHALL")

    async def waiting(self, *queues: str, slots: int = 10, **fields: Any) -> Waiting:
        """A worker that can wait for tokens."""
        made = Waiting(self.store, await self.kit.worker(*queues, slots=slots, **fields))
        self._waiting.append(made)
        return made

    async def counted(self, name: str) -> int:
        """A counter of tokens."""
        return (await self.store.counters())[f"tokens_{name}"]

    async def close(self) -> None:
        """Close everything."""
        for each in self._waiting:
            each.work.close()
        await self.store.close()


async def trusted(bench: Bench, worker: Waiting) -> None:
    """Have the leader sweep until a worker relies on tokens: the sign of a sweep expires within seconds."""

    async def relies() -> bool:
        await bench.sweep()
        return worker.work.patience > 1.0

    await until(relies, "the worker relies on tokens")


@contextlib.asynccontextmanager
async def bench_at(database: str, server: ValkeyServer) -> AsyncIterator[Bench]:
    """A bench on an empty database and a server."""
    url = with_redis(database, {"redis": server.fresh_namespace()})
    bench = Bench(await PostgresqlRedisStore.open(url), server, url)
    try:
        yield bench
    finally:
        await bench.close()
