"""PostgreSQL remembers, Redis dispatches: the store on PostgreSQL with other wake-ups.

Every verb is PostgreSQL's own, and every claim is decided there. What differs is how a worker learns that there is a
job: by a token in Redis instead of a NOTIFY (`dispatcher.py`, `work.py`). The pass of the leader that admits jobs also
reconciles tokens with claimable jobs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

from ...model.job import JobState, NewJob
from ...model.maintenance import Admitted
from ..clock import Clock
from ..codes import PENDING
from ..deployment import RedisUrls, split_redis
from ..diagnosis import Finding
from ..postgresql import encoding, migrator
from ..postgresql.address import Address, parse
from ..postgresql.database import Record
from ..postgresql.store import PostgresqlStore
from ..postgresql.transactions import StoredJob
from . import health
from .dispatcher import Claimable, Dispatcher, claimable_of
from .shard import shards_of
from .wakeups import TokenWakeups

QUEUE = "queue:"


class PostgresqlRedisStore(PostgresqlStore):
    """Implements `fairlane.store.port.Store` on PostgreSQL, with tokens in Redis. Open it with `open`."""

    def __init__(self, address: Address, clock: Clock | None, redis: RedisUrls) -> None:
        self._shards = shards_of((redis.high, redis.normal, redis.low), f"{address.database}.{address.schema}")
        self._dispatchers: WeakKeyDictionary[asyncio.AbstractEventLoop, Dispatcher] = WeakKeyDictionary()
        self._tokens = TokenWakeups(self._shards, self._dispatcher)
        super().__init__(address, clock)

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None, create: bool = True) -> PostgresqlRedisStore:
        """Open the schema a URL names. Redis need not answer."""
        postgresql, redis = split_redis(url)
        assert redis is not None, "the URL names no Redis"
        store = cls(parse(postgresql), clock, redis)
        try:
            await migrator.migrate(store._database, create=create)
        except BaseException:
            await store.close()
            raise
        return store

    def _make_wakeups(self) -> TokenWakeups:
        return self._tokens

    def _dispatcher(self) -> Dispatcher:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        dispatcher = self._dispatchers.get(loop)
        if dispatcher is None:
            dispatcher = self._dispatchers[loop] = Dispatcher(self._shards, self._claimable, self._tokens.notify)
        return dispatcher

    async def _claimable(self, queues: list[str] | None) -> Claimable:
        row = await self._database.fetchrow(self._function("read_claimable", 1), queues)
        return claimable_of(row)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def announce(self, topics: Collection[str]) -> None:
        """Publish topics, and push tokens for the jobs that have become claimable in their queues."""
        self._tokens.notify(topics)
        queues = [topic.removeprefix(QUEUE) for topic in topics if topic.startswith(QUEUE)]
        if queues:
            self._dispatcher().count(queues)

    def announce_stored(self, jobs: Sequence[StoredJob]) -> None:
        """Push tokens for jobs of a user's transaction, which has committed."""
        for job in jobs:
            self._dispatcher().push(job.queue, job.priority, job.id)

    def _announce_one(self, job: NewJob, answer: int) -> None:
        self._dispatcher().push(job.queue, job.priority, job.id)

    def _announce_several(self, jobs: Sequence[NewJob], row: Record) -> None:
        self._tokens.notify(row["topics"])
        # Another call had the locks: these are plain jobs, and no lane of theirs is limited. Those that are due cannot
        # be counted before the claim that a token leads to has admitted them.
        arriving = row.get("arriving")
        if not arriving and any(job.lane is not None or not encoding.is_plain(job) for job in jobs):
            # A lane may be at its limit, and a sticky job goes to one worker: only the server knows.
            self._dispatcher().count({job.queue for job in jobs})
            return
        created, states = row["created"] or [True] * len(jobs), row["states"] or [PENDING] * len(jobs)
        ready = [
            job
            for job, new, state in zip(jobs, created, states, strict=True)
            if new and (encoding.is_due(job) if arriving else encoding.state_of(state) is JobState.PENDING)
        ]
        for (queue, priority), count in Counter((job.queue, job.priority) for job in ready).items():
            self._dispatcher().push(queue, priority, ready[-1].id, count)

    def _announce_promoted(self, queues: Sequence[str]) -> None:
        # A queue that had claimable jobs already has no topic: its workers were woken. With tokens, one was.
        self._dispatcher().count(queues)

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        admitted = await super().admit(limit=limit, term=term)
        self._dispatcher().reconcile()
        return admitted

    # -- the store itself --------------------------------------------------------------------------------------------

    async def findings(self) -> list[Finding]:
        """What `fairlane doctor` reports about the servers."""
        return [*await super().findings(), *await health.findings(self._shards)]

    async def counters(self) -> dict[str, int]:
        """What the servers have counted."""
        return {**await super().counters(), **await health.counters(self._shards)}

    async def close(self) -> None:
        dispatcher = self._dispatchers.get(asyncio.get_running_loop())
        if dispatcher is not None:
            await dispatcher.drain()
        await super().close()
        for shard in self._shards:
            await shard.close()
