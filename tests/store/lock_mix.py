"""One of several processes that call every verb of a PostgreSQL store at random, all at once.

``python -m tests.store.lock_mix URL SEED SECONDS`` ends with an error when a call fails in a way it should not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, cast

from fairlane.errors import Busy, Conflict, InvalidInput, NotFound, Stale, StoreUnavailable
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.store import PostgresqlStore
from fairlane.store.sqlite.store import SqliteStore

from .crash_mix import LANES, OWN_TASK, REFUSALS, VERBS, Actor, Log

ACTORS = 6
SHARED_IDS = 40
"""Ids that every process uses, so that calls meet at the same names."""
LEFT_OUT = frozenset({"reopen", "read", "recount"})


class LockActor(Actor):
    """One caller. Its jobs often have ids that other callers use at the same time."""

    connection: Any = None

    def new(self, **fields: Any) -> Any:
        job = super().new(**fields)
        if self.rng.random() < 0.3:
            return type(job)(**{name: getattr(job, name) for name in job.__struct_fields__} | {"id": self._shared_id()})
        return job

    def _shared_id(self) -> str:
        return f"shared-{self.rng.randrange(SHARED_IDS)}-{int(time.time())}"

    async def act(self, *, alone: bool) -> None:
        names = {verb.__name__: weight for verb, weight in VERBS.items() if verb.__name__ not in LEFT_OUT}
        name = self.rng.choices(list(names), list(names.values()))[0]
        try:
            if not self.worker:
                await self.enter()
            await getattr(self, name)()
        except Stale:
            self.worker = ""
        except (*REFUSALS, Busy, Conflict, NotFound, InvalidInput):
            return
        except StoreUnavailable as exc:
            # No call may fail because of concurrent ones.
            raise AssertionError(f"{name}: {exc}") from exc

    async def finish(self) -> None:
        # Jobs that another call of this session has ended meanwhile are not its own any more.
        jobs = [self.held.pop(id) for id in self.rng.sample(sorted(self.held), min(len(self.held), 5))]
        following = self.next_claim() if self.rng.random() < 0.7 else None
        finished = await self.store.finish(self.worker, [self.some_move(job) for job in jobs], claim=following)
        self.held |= {job.id: job for job in finished.claimed}

    async def maintenance(self) -> None:
        # Grants are handed on by the step that frees them, also here: but not those of a lane that is being resized.
        await self.store.promote(limit=50)
        await self.store.admit()
        await self.store.rescue()

    async def enqueue_on(self) -> None:
        """In a transaction of the caller, which stays open for a moment."""
        if self.connection is None:
            self.connection = await driver().connect(self.url)
        store = cast("PostgresqlStore", self.store)
        jobs = [self.new(task=OWN_TASK, lane=self.rng.choice(LANES)) for _ in range(3)]
        await store.transactions.prepare(jobs)
        async with self.connection.transaction():
            await store.transactions.enqueue_on(self.connection, jobs)
            await asyncio.sleep(0.002)


async def main(url: str, seed: int, seconds: float) -> None:
    """Several callers in one process, which share a store object half of the time."""
    deadline = time.monotonic() + seconds
    stores = [await PostgresqlStore.open(url) for _ in range(2)]
    log = Log(Path(os.devnull))

    async def call(number: int) -> None:
        rng = Random(seed * 100 + number)
        store = cast("SqliteStore", stores[number % 2])
        actor = LockActor(url, Path(), store, log, rng, f"{seed}-{number}")
        while time.monotonic() < deadline:
            await actor.act(alone=False)
        if actor.connection is not None:
            await actor.connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(ACTORS):
            group.create_task(call(number))
    for store in stores:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
