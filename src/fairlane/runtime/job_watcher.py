"""Watches jobs for every caller of an event loop that waits for one, with one subscription and one batched read.

A notification that a job changed, or that the order of its limited lane moved, leads to a read of that job. A read of
all watched jobs once a second catches notifications that were lost, and positions in lanes without a limit. So a
thousand waiting callers cost one read a second, not a thousand. A watcher belongs to one event loop and lives only
while a caller there watches a job: nothing is left in a loop that ends, in another thread or after a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from types import TracebackType
from weakref import WeakKeyDictionary

import msgspec

from ..errors import StoreUnavailable
from ..model.job import MOST_JOBS_PER_CALL, WAITING_STATES, Job
from ..model.reading import JobPosition
from ..store.port import Store
from ..store.wakeups import Subscription, job_topic, place_topic
from .connection import Connection

POLL = 1.0
MOST_POSITIONS = 100
"""Positions computed for one read, at 0.3 ms each: a notification that arrives during a full read waits no longer."""
REST = 10
"""A full read is followed by a pause of at least this many times its duration."""
logger = logging.getLogger("fairlane.runtime.job_watcher")


class Snapshot(msgspec.Struct, frozen=True):
    """A job at one moment; `position` only if it was requested, and while the job waits."""

    job: Job | None
    position: JobPosition | None = None


class Watch:
    """One caller's view of one job: enter it, then await `snapshot` after `snapshot`. The first one comes at once."""

    def __init__(self, connection: Connection, id: str, *, places: bool = False) -> None:
        self.id = id
        self.places = places
        self.unseen = True
        self._connection = connection
        self._news = asyncio.Event()
        self._latest: Snapshot | Exception

    async def __aenter__(self) -> Watch:
        here = _watchers.setdefault(asyncio.get_running_loop(), {})
        watcher = here.get(self._connection)
        if watcher is None:
            watcher = here[self._connection] = JobWatcher(self._connection)
        self._watcher = watcher
        watcher.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watcher.remove(self):
            here = _watchers.get(asyncio.get_running_loop(), {})
            if here.get(self._connection) is self._watcher:
                del here[self._connection]
            await self._watcher.stop()

    async def snapshot(self) -> Snapshot:
        """The latest snapshot of the job; waits until there is one that the last call did not return.

        Waits through outages, except the first time: a new caller gets the error.
        """
        await self._news.wait()
        self._news.clear()
        if isinstance(self._latest, Exception):
            raise self._latest
        return self._latest

    def deliver(self, snapshot: Snapshot | Exception) -> None:
        """Give the caller a new snapshot, or the reason why there will be none."""
        self._latest = snapshot
        self.unseen = False
        self._news.set()


class JobWatcher:
    """All watches of one event loop on one store, and the task that reads their jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._watches: dict[str, set[Watch]] = {}
        self._lane_topics: dict[str, str] = {}
        """For jobs whose position is watched, the topic of their lane."""
        self._due: dict[str, None] = {}
        """Jobs to read, in this order."""
        self._news = asyncio.Event()
        self._subscribed: frozenset[str] = frozenset()
        self._unavailable = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def watched(self) -> int:
        """How many jobs are watched."""
        return len(self._watches)

    def add(self, watch: Watch) -> None:
        """Watch a job for one more caller."""
        self._watches.setdefault(watch.id, set()).add(watch)
        self._due[watch.id] = None
        self._news.set()
        if self._task.done():
            # It ended with an error, which the callers of that time got. A new caller justifies another try.
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, watch: Watch) -> bool:
        """Watch a job for one caller less. True when that was the last one of this watcher."""
        watches = self._watches[watch.id]
        watches.discard(watch)
        if not watches:
            del self._watches[watch.id]
            self._lane_topics.pop(watch.id, None)
        return not self._watches

    async def stop(self) -> None:
        """End the task, and wait until its subscription is closed."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            store = await self._connection.store()
            subscription = store.wakeups.subscribe(())
            self._subscribed = frozenset()
            listener = asyncio.create_task(self._listen(subscription))
            try:
                await self._watch(store, subscription)
            finally:
                listener.cancel()
                subscription.close()
        except Exception as exc:
            for watch in self._all_watches():
                watch.deliver(exc)

    async def _listen(self, subscription: Subscription) -> None:
        while True:
            topics = await subscription.wait(POLL)
            moved = (id for id in self._watches if job_topic(id) in topics or self._lane_topics.get(id) in topics)
            self._due |= dict.fromkeys(moved)
            if self._due:
                self._news.set()

    async def _watch(self, store: Store, subscription: Subscription) -> None:
        clock = asyncio.get_running_loop().time
        full_read_at = (began := clock()) + POLL
        while True:
            if not self._due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(full_read_at):
                        await self._news.wait()
            self._news.clear()
            if clock() >= full_read_at:
                self._due |= dict.fromkeys(self._watches)
                full_read_at = (began := clock()) + POLL
            # Subscribe before reading: a change after the read is then notified.
            self._subscribe_to_all(subscription)
            if ids := self._next():
                started = clock()
                await self._read(store, ids)
                full_read = (clock() - started) / len(ids) * len(self._watches)
                full_read_at = max(full_read_at, began + (REST + 1) * full_read)
            if self._subscribe_to_all(subscription):
                # Lanes that were found by this read may have moved before the subscription began.
                self._due |= dict.fromkeys(self._lane_topics)

    def _next(self) -> list[str]:
        """The jobs of the next read. A job that is notified meanwhile is appended to `_due` again, once."""
        found: list[str] = []
        taken = positions = 0
        for id in self._due:
            positions += any(watch.places for watch in self._watches.get(id, ()))
            if positions > MOST_POSITIONS or len(found) == MOST_JOBS_PER_CALL:
                break
            taken += 1
            if id in self._watches:
                found.append(id)
        for id in [*itertools.islice(self._due, taken)]:
            del self._due[id]
        return found

    def _subscribe_to_all(self, subscription: Subscription) -> bool:
        """Subscribe to the topics of all watched jobs. True when they have changed."""
        topics = frozenset((*map(job_topic, self._watches), *self._lane_topics.values()))
        if topics == self._subscribed:
            return False
        self._subscribed = topics
        subscription.listen(topics)
        return True

    async def _read(self, store: Store, ids: list[str]) -> None:
        try:
            jobs = dict(zip(ids, await store.get(ids), strict=True))
            waiting = [id for id, job in jobs.items() if job is not None and self._wants_position(job)]
            positions = dict(zip(waiting, await store.positions(waiting), strict=True)) if waiting else {}
        except StoreUnavailable as exc:
            if not self._unavailable:
                logger.warning("the store is unavailable; callers that wait for a job go on waiting: %s", exc)
            self._unavailable = True
            for watch in [w for id in ids for w in self._watches.get(id, ()) if w.unseen]:
                watch.deliver(exc)
            return
        self._unavailable = False
        for id in waiting:
            job = jobs[id]
            if job is not None and job.lane is not None and id in self._watches:
                self._lane_topics[id] = place_topic(job.queue, job.lane)
        for id, job in jobs.items():
            for watch in self._watches.get(id, ()):
                watch.deliver(Snapshot(job, positions.get(id)))

    def _wants_position(self, job: Job) -> bool:
        return job.state in WAITING_STATES and any(watch.places for watch in self._watches.get(job.id, ()))

    def _all_watches(self) -> Iterator[Watch]:
        for watches in self._watches.values():
            yield from watches


_watchers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Connection, JobWatcher]] = WeakKeyDictionary()


def watched_jobs(connection: Connection) -> int:
    """How many jobs are watched through a connection, in all event loops of the process."""
    # Another thread may start or end a watcher meanwhile; the caller asks again in a moment.
    with contextlib.suppress(RuntimeError):
        return sum(here[connection].watched for here in list(_watchers.values()) if connection in here)
    return 0
