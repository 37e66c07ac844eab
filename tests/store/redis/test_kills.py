"""A server that is killed again and again under load and keeps what it has acknowledged: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from fairlane.errors import SessionLost, StoreError
from fairlane.model.job import JobState, NewJob, Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, usual_slots
from fairlane.model.states import complete
from fairlane.store import open_store
from fairlane.store.port import Store
from tests.servers import valkey
from tests.sizes import sized

KILLS = sized(4, 30)
BETWEEN = 0.4
BACK_SECONDS = 3.0
ASKS = tuple(Ask("default", priority, 20) for priority in Priority)
Answer = TypeVar("Answer")


class Load:
    """Producers and workers, each repeating calls that were not answered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sent: list[str] = []
        """What the store has acknowledged."""
        self.done: Counter[str] = Counter()
        """How often the completion of a job was accepted."""
        self.claimed_at: list[float] = []
        self.over = False
        self._sending = 0

    async def send(self, name: str) -> None:
        number = 0
        self._sending += 1
        while not self.over:
            number += 1
            ids = [f"{name}-{number}-{part}" for part in range(5)]
            jobs = [NewJob(id=id, task="t", queue="default", payload=b"[]", lane=f"lane-{number % 7}") for id in ids]
            await self._repeated(partial(self._store.enqueue, jobs))
            self.sent += ids
            await asyncio.sleep(0.002)
        self._sending -= 1

    async def work(self, name: str) -> None:
        await self._repeated(partial(self._store.register, _session(name)))
        number = 0
        while not self.over or self._sending or len(self.done) < len(self.sent):
            number += 1
            claim = Claim(number=number, asks=ASKS, total=20)
            jobs = await self._repeated(partial(self._store.claim, name, claim))
            self.claimed_at.append(time.monotonic())
            ends = [complete(job.held, b"1") for job in jobs]
            finished = await self._repeated(partial(self._store.finish, name, ends))
            self.done.update(verdict.id for verdict in finished.verdicts if verdict.accepted)
            if not jobs:
                await asyncio.sleep(0.005)

    async def _repeated(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        while True:
            try:
                return await call()
            except SessionLost:
                raise
            except StoreError:
                await asyncio.sleep(0.02)


def _session(name: str) -> NewSession:
    return NewSession(
        id=name, kind=SessionKind.WORKER, lease=600.0, host="h", pid=1, pool="default", queues=("default",),
        slots=usual_slots(100),
    )  # fmt: skip


async def test_a_server_that_is_killed_under_load_loses_nothing_it_has_acknowledged() -> None:
    with valkey.own_server(durable=True) as server:
        store = await open_store(server.url)
        load = Load(store)
        back: list[float] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in ("a", "b"):
                    tasks.create_task(load.send(f"sender-{name}"))
                    tasks.create_task(load.work(f"worker-{name}"))
                for _ in range(KILLS):
                    await asyncio.sleep(BETWEEN)
                    server.kill()
                    await asyncio.to_thread(server.start)
                    back.append(time.monotonic())
                await asyncio.sleep(BETWEEN)
                load.over = True
            assert len(load.sent) > 20 * KILLS
            assert set(load.done) == set(load.sent)
            assert set(load.done.values()) == {1}
            for start in range(0, len(load.sent), 500):
                found = await store.get(load.sent[start : start + 500])
                assert {job and job.state for job in found} == {JobState.COMPLETED}
            for moment in back:
                assert min(at for at in load.claimed_at if at > moment) - moment < BACK_SECONDS
            assert (await store.recount()).differences == ()
        finally:
            await store.close()
