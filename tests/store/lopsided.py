"""A store with some of everything, most of it in one lane: what statistics are made of."""

from __future__ import annotations

from pathlib import Path

from fairlane.model.job import JobKind, NewJob, Priority, Reason
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete, fail, retry
from fairlane.store.clock import ManualClock
from fairlane.store.sqlite.store import SqliteStore

QUEUES = ("crowd", "calm")


async def fill(path: Path, *, jobs: int) -> None:
    """Make a store at `path` with `jobs` in its longest lane, twice as many without a lane, and a few elsewhere."""
    clock = ManualClock()
    store = await SqliteStore.open(f"sqlite:///{path}", clock=clock)
    rules = (LaneRule(pattern="bulk", limit=2, ordered=False), LaneRule(pattern="line", limit=1))
    await store.configure([SettingsChange(queue="crowd", declared=QueueSettings(lanes=rules))])
    for number in range(3):
        await _worker(store, f"former-{number}")
        await store.leave(f"former-{number}")
    await _worker(store, "worker")
    await store.register(NewSession(id="waiter", kind=SessionKind.WAITER))
    await store.enqueue([NewJob(id=f"bulk-{n}", task="task", queue="crowd", lane="bulk") for n in range(jobs)])
    await store.enqueue([NewJob(id=f"plain-{n}", task="task", queue="crowd") for n in range(2 * jobs)])
    await store.enqueue([job for number in range(min(jobs, 5)) for job in _others(number)])
    await store.enqueue([NewJob(id="to-all", task="task", queue="calm", kind=JobKind.BROADCAST, ttl=60)])
    asks = tuple(Ask(source, p, jobs) for p in Priority for source in (None, *QUEUES))
    claimed = await store.claim("worker", Claim(number=1, asks=asks, total=jobs))
    ended = claimed[: max(3, len(claimed) * 3 // 4)]
    await store.finish("worker", [retry(ended[0].held, 60, Reason.ERROR, "not yet")])
    await store.finish("worker", [fail(ended[1].held, Reason.ERROR, "broken", group="broken")])
    await store.finish("worker", [complete(job.held) for job in ended[2:]])
    await store.cancel(["line-0"])
    await store.release("default", "key-0")
    await store.close()


async def _worker(store: SqliteStore, id: str) -> None:
    await store.register(NewSession(id=id, kind=SessionKind.WORKER, queues=QUEUES, slots=Slots(total=1000)))


def _others(number: int) -> list[NewJob]:
    """A few jobs of the rarer kinds."""
    return [
        NewJob(id=f"user-{number}", task="other", queue="calm", lane=f"user:{number}", priority=Priority.HIGH),
        NewJob(id=f"line-{number}", task="task", queue="crowd", lane="line", priority=Priority.LOW),
        NewJob(id=f"later-{number}", task="task", queue="calm", delay=60),
        NewJob(id=f"brief-{number}", task="task", queue="calm", expires=60),
        NewJob(id=f"sticky-{number}", task="task", queue="calm", sticky=f"key-{number}"),
        NewJob(id=f"unbound-{number}", task="task", queue="calm", sticky=f"key-{number}", pool="nobody"),
        NewJob(id=f"once-{number}", task="task", queue="calm", unique=f"once-{number}"),
        NewJob(id=f"turn-{number}", task="turn", queue="crowd", lane="line", kind=JobKind.TURN, waiter="waiter"),
    ]
