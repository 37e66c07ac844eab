"""A random mix of every verb of a store, told to a log that survives the death of its process.

Each line of the log is one write to a file opened for appending, so it is there as soon as the write has returned,
whatever happens to the process then:

- ``begin ACTOR VERB`` and ``end ACTOR VERB``   around each call
- ``ack ID``            the store has taken the job
- ``final ID STATE``    the store has said that the job ended so
- ``never ID``          the transaction with this job was rolled back
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from fairlane.errors import IndexTaken, InvalidInput, NotFound, Stale
from fairlane.model.ids import new_id
from fairlane.model.job import Claimed, Held, JobKind, JobState, NewJob, Priority, Reason, Verdict
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.retry import may_retry
from fairlane.model.schedule import Schedule, Timetable
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import Transition, cancel, complete, fail, hand_back, retry, snooze
from fairlane.store.sqlite.store import SqliteStore

QUEUES = ("crowd", "calm")
LANES = (None, None, "narrow", "wide", "user:1", "user:2", "free")
LEASE = 0.3
OWN_TASK = "own"
REFUSALS = (IndexTaken, InvalidInput, NotFound, Stale)
"""Errors that a store may raise for a caller that does not know the whole state."""


class Log:
    """The log of one process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, *words: str) -> None:
        """Append a line."""
        os.write(self._file, (" ".join(words) + "\n").encode())

    @contextmanager
    def verb(self, actor: str, name: str) -> Iterator[None]:
        """Mark the beginning and the end of a call."""
        self.write("begin", actor, name)
        yield
        self.write("end", actor, name)


class Actor:
    """One caller, which acts as a worker, a waiter, a manager and an operator, and calls verbs at random."""

    def __init__(self, url: str, path: Path, store: SqliteStore, log: Log, rng: Random, name: str) -> None:
        self.url = url
        self.path = path
        self.store = store
        self.log = log
        self.rng = rng
        self.name = name
        self.made = 0
        self.sent: list[NewJob] = []
        self.held: dict[str, Claimed] = {}
        self.turns: list[str] = []
        self.number = 0
        self.worker = self.waiter = ""
        self.connection: sqlite3.Connection | None = None

    async def enter(self) -> None:
        """Become a worker and a waiter."""
        index = self.rng.choice((None, None, None, 0, 1))
        self.held.clear()
        self.turns.clear()
        self.number = 0
        self.worker = self.waiter = ""
        worker = NewSession(
            id=new_id(), kind=SessionKind.WORKER, lease=LEASE, index=index, queues=QUEUES, slots=Slots(total=20)
        )
        waiter = NewSession(id=new_id(), kind=SessionKind.WAITER, lease=LEASE)
        with self.log.verb(self.name, "register"):
            await asyncio.gather(self.store.register(worker), self.store.register(waiter))
        self.worker, self.waiter = worker.id, waiter.id

    async def act(self, *, alone: bool) -> None:
        """Call one verb. The store is closed only by a caller that is alone in its process."""
        verb = self.rng.choices(list(VERBS), list(VERBS.values()))[0]
        if verb is Actor.reopen and not alone:
            return
        if not self.worker:
            await self.enter()
        try:
            with self.log.verb(self.name, verb.__name__):
                await verb(self)
        except Stale:
            await self.enter()
        except REFUSALS:
            return

    # -- jobs ------------------------------------------------------------------------------------------------

    def new(self, **fields: Any) -> NewJob:
        """A job under an id of its own."""
        self.made += 1
        fields = {"task": "task", "queue": self.rng.choice(QUEUES), **fields}
        return NewJob(id=f"{self.name}-{self.made}", **fields)

    def some_job(self) -> NewJob:
        """A job with a few of all the fields there are."""
        rng = self.rng
        placed = rng.choices(({}, {"sticky": f"key-{rng.randrange(5)}"}, {"worker": rng.randrange(2)}), (8, 2, 1))[0]
        late = rng.choices(({}, {"delay": 0.02}, {"delay": 0.5}), (8, 1, 1))[0]
        once = rng.choices(({}, {"unique": f"once-{rng.randrange(6)}", "unique_for": 0.2}), (9, 1))[0]
        return self.new(
            lane=rng.choice(LANES),
            priority=rng.choice(tuple(Priority)),
            cost=rng.choice((1.0, 5.0)),
            expires=rng.choices((None, 0.05, 60.0), (8, 1, 1))[0],
            retries=rng.randrange(3),
            payload=b'"' + b"x" * rng.choices((20, 20_000), (20, 1))[0] + b'"',
            **placed,
            **late,
            **once,
        )

    async def send(self, jobs: list[NewJob]) -> None:
        """Enqueue, and log which jobs the store has accepted."""
        for answer in await self.store.enqueue(jobs):
            self.log.write("ack", answer.id)

    async def enqueue(self) -> None:
        jobs = [self.some_job() for _ in range(self.rng.choice((1, 1, 1, 4, 20)))]
        await self.send(jobs)
        self.sent += jobs

    async def enqueue_again(self) -> None:
        for job in self.sent[-1:]:
            await self.send([job])

    async def enqueue_turn(self) -> None:
        turn = self.new(lane=self.rng.choice(("narrow", "wide")), kind=JobKind.TURN, waiter=self.waiter)
        await self.send([turn])
        self.turns.append(turn.id)

    async def enqueue_broadcast(self) -> None:
        await self.send([self.new(kind=JobKind.BROADCAST, ttl=self.rng.choice((0.0, 0.1)))])

    async def enqueue_on(self) -> None:
        """On the caller's connection, together with a row of the caller's table."""
        if self.connection is None:
            self.connection = sqlite3.connect(self.path, isolation_level=None, timeout=20)
        job = self.new(task=OWN_TASK, lane=self.rng.choice(LANES))
        self.connection.execute("BEGIN IMMEDIATE")
        self.store.enqueue_on(self.connection, [job])
        self.connection.execute("INSERT INTO notes VALUES (?)", (job.id,))
        if self.rng.random() < 0.3:
            self.connection.execute("ROLLBACK")
            self.log.write("never", job.id)
        else:
            self.connection.execute("COMMIT")
            self.log.write("ack", job.id)

    def next_claim(self) -> Claim:
        self.number += 1
        asks = [Ask(source, p, 10) for p in Priority for source in (None, *QUEUES)]
        return Claim(number=self.number, asks=tuple(asks), total=self.rng.randrange(1, 10))

    async def claim(self) -> None:
        self.held |= {job.id: job for job in await self.store.claim(self.worker, self.next_claim())}

    def some_move(self, job: Claimed) -> Transition:
        held, delay = job.held, self.rng.choice((0.0, 0.02))
        moves: tuple[Transition, ...] = (
            complete(held, b'"done"'),
            complete(held),
            fail(held, Reason.ERROR, "it broke"),
            retry(held, delay, Reason.TIMEOUT, "too slow") if may_retry(job.attempt, job.retries) else complete(held),
            snooze(held, delay),
            hand_back(held),
            cancel(held),
        )
        return self.rng.choice(moves)

    def told(self, verdict: Verdict) -> None:
        if verdict.state is not None and verdict.state.final:
            self.log.write("final", verdict.id, verdict.state.value)

    async def finish(self) -> None:
        jobs = self.rng.sample(list(self.held.values()), min(len(self.held), self.rng.choice((1, 3, 10))))
        following = self.next_claim() if self.rng.random() < 0.5 else None
        moves = [self.some_move(job) for job in jobs]
        finished = await self.store.finish(self.worker, moves, claim=following)
        for verdict in finished.verdicts:
            self.told(verdict)
            del self.held[verdict.id]
        self.held |= {job.id: job for job in finished.claimed}

    async def finish_turn(self) -> None:
        for job in await self.store.get(self.turns):
            if job is not None and job.state is JobState.RUNNING:
                finished = await self.store.finish(self.waiter, [complete(Held(job.id, job.fence))])
                self.told(finished.verdicts[0])
                self.turns.remove(job.id)

    async def progress(self) -> None:
        await self.store.progress(self.worker, [(job.held, b"0.5") for job in self.held.values()])

    async def cancel(self) -> None:
        state = self.rng.choice((None, JobState.PENDING, JobState.RUNNING, JobState.SCHEDULED))
        page = await self.store.find(Filter(state=state), limit=3)
        ids = [job.id for job in page.jobs]
        for id, now in zip(ids, await self.store.cancel(ids), strict=True):
            if now.final:
                self.log.write("final", id, now.value)

    async def release(self) -> None:
        cleanup = self.new(kind=JobKind.CLEANUP) if self.rng.random() < 0.7 else None
        await self.store.release("default", f"key-{self.rng.randrange(5)}", cleanup)

    # -- sessions --------------------------------------------------------------------------------------------

    async def renew(self) -> None:
        await self.store.renew(self.waiter, [], claim=0)
        held = [job.held for job in self.held.values()]
        # Sometimes a reply was lost, and claims that are not named are taken back.
        named = held[1:] if self.rng.random() < 0.2 else held
        renewal = await self.store.renew(self.worker, named, claim=self.number, stopping=self.rng.random() < 0.05)
        for id in [*(h.id for h in renewal.lost), *renewal.taken_back]:
            self.held.pop(id, None)

    async def leave(self) -> None:
        worker, self.worker = self.worker, ""
        held = [job.held for job in self.held.values()]
        await self.store.leave(worker, begun=self.rng.choice((None, [], held[:1])))
        await self.store.leave(self.waiter)

    # -- the manager's and the operator's --------------------------------------------------------------------

    async def maintenance(self) -> None:
        """The passes of the leader, with a term."""
        term = await self.store.lead(self.worker, lease=LEASE)
        number = term.number if term is not None and term.session == self.worker else None
        await self.store.promote(limit=50, term=number)
        admitted = await self.store.admit(term=number)
        assert admitted.repaired == 0, f"{admitted.repaired} grants were not handed on"
        await self.store.rescue(term=number)
        await self.store.prune(Retention(), term=number)
        if number is not None:
            await self.store.resign(number)

    async def configure(self) -> None:
        rng = self.rng
        rules = (
            LaneRule(pattern="narrow", limit=1),
            LaneRule(pattern="wide", limit=rng.choice((2, 3)), ordered=rng.random() < 0.3),
            LaneRule(pattern="user:*", limit=rng.choice((None, 1, 2)), weight=rng.choice((1.0, 2.0))),
        )
        settings = QueueSettings(lanes=rules, limit=rng.choice((None, None, 8)), paused=rng.random() < 0.1)
        await self.store.configure([SettingsChange(queue=rng.choice(QUEUES), declared=settings)])

    async def declare(self) -> None:
        await self.store.declare([Schedule(name="hourly", timetable=Timetable(every=3600), job=b"{}")])

    async def read(self) -> None:
        page = await self.store.find(Filter(queue=self.rng.choice((None, *QUEUES))), limit=5)
        ids = [job.id for job in page.jobs]
        await self.store.get(ids)
        await self.store.positions(ids)
        await self.store.queues()
        await self.store.lanes("crowd")
        await self.store.sessions()
        await self.store.bindings()
        await self.store.leader()

    async def recount(self) -> None:
        recount = await self.store.recount()
        assert not recount.differences, recount.differences

    async def reopen(self) -> None:
        """Close the file, which empties the write-ahead log, and open it again."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        await self.store.close()
        self.store = await SqliteStore.open(self.url)
        await self.store.migrate()


VERBS: dict[Callable[[Actor], Awaitable[None]], int] = {
    Actor.enqueue: 20,
    Actor.enqueue_again: 3,
    Actor.enqueue_turn: 4,
    Actor.enqueue_broadcast: 2,
    Actor.enqueue_on: 3,
    Actor.claim: 12,
    Actor.finish: 20,
    Actor.finish_turn: 4,
    Actor.progress: 3,
    Actor.cancel: 5,
    Actor.release: 4,
    Actor.renew: 5,
    Actor.leave: 2,
    Actor.maintenance: 8,
    Actor.configure: 4,
    Actor.declare: 1,
    Actor.read: 2,
    Actor.recount: 2,
    Actor.reopen: 3,
}
"""Each verb with how often it comes."""
