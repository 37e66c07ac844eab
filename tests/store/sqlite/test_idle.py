"""Idle workers write nothing but renewals, and readers never wait for writers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fairlane.errors import TermLost
from fairlane.model.job import JobKind, NewJob, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.clock import ManualClock
from fairlane.store.sqlite.store import SqliteStore

from ..lock_holder import lock_held_elsewhere

pytestmark = pytest.mark.anyio

TIMES = 20
LONG = 100_000.0
PATIENCE = 45.0
SETTINGS = SettingsChange(
    queue="default",
    declared=QueueSettings(limit=3, lanes=(LaneRule(pattern="one", limit=1), LaneRule(pattern="shut", paused=True))),
    version=4,
    override=QueueOverride(max_pending=50),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fairlane.db"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(path: Path, clock: ManualClock) -> AsyncIterator[SqliteStore]:
    """A store with nothing to do: final jobs, jobs that no worker can start, a worker and a leader."""
    store = await SqliteStore.open(f"sqlite:///{path}", clock=clock)
    await store.configure([SETTINGS])
    await store.register(worker("worker", slots=5))
    await store.lead("leader", lease=LONG)
    for number in range(12):
        await store.enqueue([NewJob(id=f"done-{number}", task="task", lane=f"user-{number % 3}")])
    while claimed := await store.claim("worker", claim(next(_numbers), total=5)):
        await store.finish("worker", [complete(job.held) for job in claimed])
    await store.enqueue([NewJob(id=f"one-{number}", task="task", lane="one") for number in range(3)])
    await store.enqueue(
        [
            NewJob(id="shut", task="task", lane="shut"),
            NewJob(id="later", task="task", delay=50_000),
            NewJob(id="perishable", task="task", lane="one", expires=50_000),
            NewJob(id="elsewhere", task="task", queue="unserved"),
            NewJob(id="unbound", task="task", pool="nobody", sticky="plan"),
            NewJob(id="absent", task="task", worker=7),
            NewJob(id="everybody", task="task", kind=JobKind.BROADCAST, queue="news", ttl=50_000),
        ]
    )
    await store.enqueue([NewJob(id="bound", task="task", sticky="key", lane="one")])
    # The first of lane one, and the copy of the broadcast: they go on running.
    assert len(await store.claim("worker", claim(next(_numbers), total=5))) == 2
    clock.advance(10)
    # Whatever there was to tidy up is tidied up now.
    for _ in range(2):
        await store.promote()
        await store.admit()
        await store.rescue()
        await store.prune(Retention())
    yield store
    await store.close()


def worker(id: str, *, slots: int) -> NewSession:
    queues = ("default", "nothing-here")
    return NewSession(id=id, kind=SessionKind.WORKER, lease=LONG, queues=queues, slots=Slots(total=slots))


def claim(number: int, *, total: int) -> Claim:
    sources = (None, "default", "nothing-here", "never-heard-of")
    return Claim(number=number, asks=tuple(Ask(s, p, total) for p in Priority for s in sources), total=total)


def _count() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


_numbers = _count()

Call = Callable[[SqliteStore], Awaitable[object]]


async def _refused(store: SqliteStore) -> None:
    with pytest.raises(TermLost):
        await store.promote(term=99)


IDLE: dict[str, Call] = {
    "claim": lambda store: store.claim("worker", claim(next(_numbers), total=2)),
    "finish nothing and claim": lambda store: store.finish("worker", [], claim=claim(next(_numbers), total=2)),
    "promote": lambda store: store.promote(),
    "admit": lambda store: store.admit(),
    "rescue": lambda store: store.rescue(),
    "prune": lambda store: store.prune(Retention()),
    "stand while another leads": lambda store: store.lead("standby", lease=10.0),
    "extend a term one does not have": lambda store: store.lead("standby", lease=10.0, term=1),
    "resign a term that is not": lambda store: store.resign(99),
    "a pass under a lost term": _refused,
    "configure the same": lambda store: store.configure([SETTINGS]),
    "declare nothing": lambda store: store.declare([]),
    "enqueue what is known": lambda store: store.enqueue([NewJob(id="later", task="task", delay=50_000)]),
    "cancel what has ended": lambda store: store.cancel(["done-1"]),
}
"""Calls that find nothing to do."""

READS: dict[str, Call] = {
    "leader": lambda store: store.leader(),
    "get": lambda store: store.get(["done-1", "later"]),
    "find": lambda store: store.find(Filter(queue="default")),
    "positions": lambda store: store.positions(["one-2", "later", "shut", "bound"]),
    "queues": lambda store: store.queues(),
    "lanes": lambda store: store.lanes("default"),
    "sessions": lambda store: store.sessions(),
    "bindings": lambda store: store.bindings(),
    "declare": lambda store: store.declare([]),
    "migrate": lambda store: store.migrate(),
}
"""Calls that only look."""


class Witness:
    """Another connection, which notices every commit that changed something."""

    def __init__(self, path: Path) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._path = path
        self._connection = sqlite3.connect(path)

    def sight(self) -> tuple[int, int, int, int]:
        [version] = self._connection.execute("PRAGMA data_version").fetchone()
        log, file = self._log.stat(), self._path.stat()
        return version, log.st_size, log.st_mtime_ns, file.st_mtime_ns

    def close(self) -> None:
        self._connection.close()


@contextmanager
def witness(path: Path) -> Iterator[Witness]:
    found = Witness(path)
    try:
        yield found
    finally:
        found.close()


async def test_the_witness_notices_a_write(store: SqliteStore, path: Path) -> None:
    with witness(path) as other:
        before = other.sight()
        await store.enqueue([NewJob(id="news", task="task", queue="unserved")])
        version, log, *_ = other.sight()
    assert version != before[0]
    assert log > before[1]


@pytest.mark.parametrize("name", IDLE)
async def test_a_call_with_nothing_to_do_changes_nothing_in_the_file(
    store: SqliteStore, path: Path, clock: ManualClock, name: str
) -> None:
    with witness(path) as other:
        before = other.sight()
        for _ in range(TIMES):
            await IDLE[name](store)
            clock.advance(1)
        assert other.sight() == before


async def test_idle_calls_made_at_once_change_nothing_either(store: SqliteStore, path: Path) -> None:
    with witness(path) as other:
        before = other.sight()
        await asyncio.gather(*(call(store) for _ in range(TIMES) for call in IDLE.values()))
        assert other.sight() == before


async def test_a_claim_that_starts_something_is_written(store: SqliteStore, path: Path) -> None:
    await store.enqueue([NewJob(id="work", task="task")])
    with witness(path) as other:
        before = other.sight()
        assert [job.id for job in await store.claim("worker", claim(next(_numbers), total=1))] == ["work"]
        assert other.sight() != before


@contextmanager
def writing_elsewhere(path: Path) -> Iterator[None]:
    """Another process is in the middle of a write: it holds the lock of the writers, and SQLite's own."""
    with lock_held_elsewhere(path):
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE fairlane_counter SET value = value")
            yield
            connection.execute("ROLLBACK")
        finally:
            connection.close()


@pytest.mark.parametrize("name", READS)
async def test_a_reader_waits_for_no_writer(store: SqliteStore, path: Path, name: str) -> None:
    with writing_elsewhere(path):
        async with asyncio.timeout(PATIENCE):
            await READS[name](store)


async def test_a_writer_does_wait_for_another(store: SqliteStore, path: Path) -> None:
    with writing_elsewhere(path):
        waiting = asyncio.ensure_future(store.promote())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
    async with asyncio.timeout(PATIENCE):
        await waiting
