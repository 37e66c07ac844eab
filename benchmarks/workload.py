"""What every benchmark needs: a store of its own, jobs of the usual size, and a worker that claims them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from fairlane.model.ids import new_id
from fairlane.model.job import Claimed, NewJob, Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Slots, asks
from fairlane.model.states import Transition, complete
from fairlane.store import open_store
from fairlane.store.port import Store

QUEUE = "bench"
PAYLOAD = b'[["' + b"x" * 180 + b'"],{}]'
RESULT = b'"done"'


@dataclass(frozen=True)
class Run:
    """One run of the benchmarks: where its files go, and whether it is a short one."""

    directory: Path
    quick: bool = False

    def file(self, name: str) -> Path:
        """A path nobody has used yet."""
        return self.directory / f"{name}-{new_id()}.db"


class Pace(NamedTuple):
    """How fast jobs went through."""

    rate: float
    """Jobs per second."""
    processor: float
    """Processor seconds per job, all threads together; a busy machine hardly changes it."""


class Stopwatch:
    """Runs from the moment it is made."""

    def __init__(self) -> None:
        self._processor = time.process_time()
        self._wall = time.perf_counter()

    def pace(self, jobs: int) -> Pace:
        """The pace of `jobs` jobs since the start."""
        wall = time.perf_counter() - self._wall
        return Pace(jobs / wall, (time.process_time() - self._processor) / jobs)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Store]:
    """An empty store on the real clock."""
    store = await open_store(f"sqlite:///{path}")
    try:
        yield store
    finally:
        await store.close()


def job(lane: str | None = None, priority: Priority = Priority.NORMAL) -> NewJob:
    """One job of the usual size."""
    return NewJob(id=new_id(), task="bench", queue=QUEUE, payload=PAYLOAD, lane=lane, priority=priority)


async def load(store: Store, jobs: Iterable[NewJob]) -> None:
    """Enqueue any number of jobs."""
    waiting = iter(jobs)
    while batch := list(islice(waiting, 1_000)):
        await store.enqueue(batch)


async def configure(store: Store, *rules: LaneRule) -> None:
    """Set up the lanes of the queue."""
    declared = QueueSettings(lanes=rules)
    await store.configure([SettingsChange(queue=QUEUE, declared=declared, version=1)])


class Worker:
    """A session that asks as a real worker does, and whose bodies take no time."""

    def __init__(self, store: Store, session: str, slots: Slots) -> None:
        self._store = store
        self._session = session
        self._slots = slots
        self._number = 0
        self._rng = Random(7)

    @classmethod
    async def start(cls, store: Store, slots: int) -> Worker:
        """Register a worker of the queue."""
        session = NewSession(
            id=new_id(),
            kind=SessionKind.WORKER,
            lease=86_400.0,
            queues=(QUEUE,),
            slots=Slots(total=slots),
        )
        await store.register(session)
        return cls(store, session.id, Slots(total=slots))

    async def claim(self, total: int) -> list[Claimed]:
        """Claim up to `total` jobs."""
        return await self._store.claim(self._session, self._call(total))

    async def finish(self, claimed: Sequence[Claimed]) -> None:
        """Complete jobs; every one must be accepted."""
        await self.end([complete(each.held, RESULT) for each in claimed])

    async def finish_and_claim(self, claimed: Sequence[Claimed], total: int) -> list[Claimed]:
        """Complete jobs and claim the next ones in the same step."""
        return await self.end([complete(each.held, RESULT) for each in claimed], self._call(total))

    async def drain(self, batch: int) -> int:
        """Run everything there is, `batch` at a time; how many jobs that were."""
        done = 0
        claimed = await self.claim(batch)
        while claimed:
            done += len(claimed)
            claimed = await self.finish_and_claim(claimed, batch)
        return done

    async def end(self, transitions: Sequence[Transition], call: Claim | None = None) -> list[Claimed]:
        """End jobs; every ending must be accepted."""
        answer = await self._store.finish(self._session, transitions, claim=call)
        refused = [verdict for verdict in answer.verdicts if not verdict.accepted]
        if refused:
            raise AssertionError(f"{len(refused)} endings were refused, such as {refused[0]}")
        return list(answer.claimed)

    def _call(self, total: int) -> Claim:
        self._number += 1
        wishes = asks(self._slots, (0, 0, 0), (), {None: 1, QUEUE: 1}, self._rng)
        return Claim(number=self._number, asks=tuple(wishes), total=total)
