"""Looks at jobs for everybody in an event loop who waits for one: by one subscription and one batched read.

A hint that a job changed, or that the line of its limited lane moved, leads to a look at that job. A look at all of
them once a second is the net for hints that were lost, and for places in lanes without a limit. So a thousand waiting
callers cost one read a second, not a thousand. All of it belongs to one event loop and lives only while somebody there
watches: nothing is left over in a loop that ends, in another thread or after a fork.
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
PLACES = 100
"""Places of one look, which cost 0.3 ms each: news in the middle of a look at everything waits for these alone."""
REST = 10
"""A look at everything is followed by at least this many times as long without one."""
logger = logging.getLogger("fairlane.runtime.job_watcher")


class Look(msgspec.Struct, frozen=True):
    """A job at one moment; `standing` only where it was asked for, and while the job waits."""

    job: Job | None
    standing: JobPosition | None = None


class Watch:
    """One caller's eye on one job: enter it, then ask for `look` after `look`. The first one comes at once."""

    def __init__(self, connection: Connection, id: str, *, places: bool = False) -> None:
        self.id = id
        self.places = places
        self.unseen = True
        self._connection = connection
        self._news = asyncio.Event()
        self._look: Look | Exception

    async def __aenter__(self) -> Watch:
        here = _watching.setdefault(asyncio.get_running_loop(), {})
        watching = here.get(self._connection)
        if watching is None:
            watching = here[self._connection] = Watching(self._connection)
        self._watching = watching
        watching.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watching.remove(self):
            here = _watching.get(asyncio.get_running_loop(), {})
            if here.get(self._connection) is self._watching:
                del here[self._connection]
            await self._watching.stop()

    async def look(self) -> Look:
        """The job as it was seen last; waits until it was looked at since the last call.

        Outages are waited through, but not by the first look: whoever just came is told.
        """
        await self._news.wait()
        self._news.clear()
        if isinstance(self._look, Exception):
            raise self._look
        return self._look

    def show(self, look: Look | Exception) -> None:
        """Give the caller a new look, or the reason why there will be none."""
        self._look = look
        self.unseen = False
        self._news.set()


class Watching:
    """All watches of one event loop on one store, and the task that looks for them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._watches: dict[str, set[Watch]] = {}
        self._lines: dict[str, str] = {}
        """Jobs whose place is watched, with the topic of their lane."""
        self._due: dict[str, None] = {}
        """Jobs to look at, in this order."""
        self._news = asyncio.Event()
        self._listening: frozenset[str] = frozenset()
        self._out_of_reach = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, watch: Watch) -> None:
        """Look for one more."""
        self._watches.setdefault(watch.id, set()).add(watch)
        self._due[watch.id] = None
        self._news.set()
        if self._task.done():
            # It ended by an error, which those who watched were told; a newcomer is worth another try.
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, watch: Watch) -> bool:
        """Look for one less; answers whether that was the last."""
        watches = self._watches[watch.id]
        watches.discard(watch)
        if not watches:
            del self._watches[watch.id]
            self._lines.pop(watch.id, None)
        return not self._watches

    async def stop(self) -> None:
        """End the task, and wait until its subscription is closed."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            store = await self._connection.store()
            ear = store.wakeups.subscribe(())
            self._listening = frozenset()
            listener = asyncio.create_task(self._listen(ear))
            try:
                await self._look_on(store, ear)
            finally:
                listener.cancel()
                ear.close()
        except Exception as exc:
            for watch in self._everybody():
                watch.show(exc)

    async def _listen(self, ear: Subscription) -> None:
        while True:
            heard = await ear.wait(POLL)
            moved = (id for id in self._watches if job_topic(id) in heard or self._lines.get(id) in heard)
            self._due |= dict.fromkeys(moved)
            if self._due:
                self._news.set()

    async def _look_on(self, store: Store, ear: Subscription) -> None:
        clock = asyncio.get_running_loop().time
        everything_at = (began := clock()) + POLL
        while True:
            if not self._due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(everything_at):
                        await self._news.wait()
            self._news.clear()
            if clock() >= everything_at:
                self._due |= dict.fromkeys(self._watches)
                everything_at = (began := clock()) + POLL
            # Listening first: what changes after the look is then heard.
            self._listen_to_all(ear)
            if ids := self._next():
                started = clock()
                await self._look_at(store, ids)
                whole = (clock() - started) / len(ids) * len(self._watches)
                everything_at = max(everything_at, began + (REST + 1) * whole)
            if self._listen_to_all(ear):
                # Lanes that only this look has told of may have moved before they were listened to.
                self._due |= dict.fromkeys(self._lines)

    def _next(self) -> list[str]:
        """The jobs of the next look. What is heard meanwhile goes to the end of the line, once."""
        found: list[str] = []
        taken = places = 0
        for id in self._due:
            places += any(watch.places for watch in self._watches.get(id, ()))
            if places > PLACES or len(found) == MOST_JOBS_PER_CALL:
                break
            taken += 1
            if id in self._watches:
                found.append(id)
        for id in [*itertools.islice(self._due, taken)]:
            del self._due[id]
        return found

    def _listen_to_all(self, ear: Subscription) -> bool:
        """Listen to what is watched; answers whether that is new."""
        topics = frozenset((*map(job_topic, self._watches), *self._lines.values()))
        if topics == self._listening:
            return False
        self._listening = topics
        ear.listen(topics)
        return True

    async def _look_at(self, store: Store, ids: list[str]) -> None:
        try:
            jobs = dict(zip(ids, await store.get(ids), strict=True))
            waiting = [id for id, job in jobs.items() if job is not None and self._wants_place(job)]
            standings = dict(zip(waiting, await store.positions(waiting), strict=True)) if waiting else {}
        except StoreUnavailable as exc:
            if not self._out_of_reach:
                logger.warning("the store cannot be reached; whoever waits for a job waits on: %s", exc)
            self._out_of_reach = True
            for watch in [w for id in ids for w in self._watches.get(id, ()) if w.unseen]:
                watch.show(exc)
            return
        self._out_of_reach = False
        for id in waiting:
            job = jobs[id]
            if job is not None and job.lane is not None and id in self._watches:
                self._lines[id] = place_topic(job.queue, job.lane)
        for id, job in jobs.items():
            for watch in self._watches.get(id, ()):
                watch.show(Look(job, standings.get(id)))

    def _wants_place(self, job: Job) -> bool:
        return job.state in WAITING_STATES and any(watch.places for watch in self._watches.get(job.id, ()))

    def _everybody(self) -> Iterator[Watch]:
        for watches in self._watches.values():
            yield from watches


_watching: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Connection, Watching]] = WeakKeyDictionary()
