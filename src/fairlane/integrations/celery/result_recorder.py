"""Writes results for jobs that ended without Celery: one Celery worker at a time does it.

That worker refreshes an entry in the result backend, which says up to where the ends of jobs are recorded. Another one
takes over when the entry is left or no longer changes, and continues from there. So nothing is left out while no Celery
worker runs, for as long as the backend keeps the entry, which is as long as it keeps results (`result_expires`). The
entry is not a lock: for a moment two workers may write, which is harmless because a stored result is not written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from ...errors import InvalidInput
from ...manager.service import FailureTracker
from ...model.ended import EndedJob
from ...model.ids import new_id
from ...runtime.ended_feed import EndedFeed
from ...store.port import Store
from .results import Results, remembers

if TYPE_CHECKING:
    from .fair import Fair

T = TypeVar("T")
logger = logging.getLogger("fairlane.celery")
REFRESH_SECONDS = 2.0
"""How often the entry is refreshed, and looked at by the other workers."""
SILENCE_SECONDS = 8.0
"""How long the entry may stay the same before another worker takes over."""
CONFIRM_SECONDS = 0.2
"""How long a worker waits after it took over, to see whether another one did so too."""
LEAVE_SECONDS = 2.0
MOST_TRIES = 3
"""How often to try to write a result while the backend answers; then it is left out."""
STATE = "FAIRLANE"
"""The state of the entry, which has the form of a result."""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """Which worker records, and up to where."""

    owner: str
    """Empty when its worker has left."""
    number: int
    """Changes with each refresh."""
    cursor: str
    """Everything up to here is recorded. The first entry has the present, taken before it was written: what ends after
    that is recorded even if its worker dies at once."""


Present = Callable[[], Awaitable[str]]
"""Returns the cursor of the present."""


class RecorderRole(Protocol):
    """The role of recording, which one worker at a time has."""

    async def acquire(self, present: Present) -> str:
        """Wait until this worker has the role, and return where to continue."""

    async def keep(self, cursor: str) -> bool:
        """Everything up to `cursor` is recorded. Whether this worker still has the role."""

    async def release(self) -> None:
        """This worker stops recording."""


Call = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Makes a blocking call in the thread of the backend."""


class RoleByEntry:
    """The worker that the entry in the result backend names has the role."""

    def __init__(self, fair: Fair, call: Call, rng: Random) -> None:
        self._fair = fair
        self._call = call
        self._rng = rng
        self._me = new_id()
        self._number = 0
        # Workers with other fair queues have another entry: each records only the results of its own.
        scope = json.dumps([fair.fairlane.settings.url, *fair.choice])
        digest = hashlib.sha256(scope.encode()).hexdigest()[:12]
        self._id = f"fairlane-results-{fair.app.main or 'celery'}-{digest}"

    async def acquire(self, present: Present) -> str:
        """Take over at once if no worker records, otherwise when the one that does is silent."""
        last, since = None, time.monotonic()
        while True:
            entry: Entry | None = await self._call(self._read)
            if entry is not None and entry.owner == self._me:
                return entry.cursor
            if entry != last:
                last, since = entry, time.monotonic()
            silent = time.monotonic() - since >= SILENCE_SECONDS
            if entry is None or not entry.owner or silent:
                cursor = await present() if entry is None else entry.cursor
                await self._refresh(cursor)
                await asyncio.sleep(CONFIRM_SECONDS * (1 + self._rng.random()))
                if await self._is_mine():
                    return cursor
            else:
                await asyncio.sleep(REFRESH_SECONDS * (1 - 0.2 * self._rng.random()))

    async def keep(self, cursor: str) -> bool:
        """Refresh the entry, unless another worker has taken over."""
        if not await self._is_mine():
            return False
        await self._refresh(cursor)
        return True

    async def release(self) -> None:
        """Let another worker take over at once."""
        entry = await self._call(self._read)
        if entry is not None and entry.owner == self._me:
            await self._call(partial(self._write, Entry("", 0, entry.cursor)))

    async def _is_mine(self) -> bool:
        entry = await self._call(self._read)
        return entry is not None and entry.owner == self._me

    async def _refresh(self, cursor: str) -> None:
        self._number += 1
        await self._call(partial(self._write, Entry(self._me, self._number, cursor)))

    def _read(self) -> Entry | None:
        stored = self._fair.app.backend.get_task_meta(self._id, cache=False).get("result")
        if stored is None:
            return None
        try:
            return msgspec.json.decode(stored, type=Entry)
        except (msgspec.DecodeError, TypeError):
            return None

    def _write(self, entry: Entry) -> None:
        self._fair.app.backend.store_result(self._id, msgspec.json.encode(entry).decode(), STATE)


class RoleOfLeader:
    """The worker that leads has the role, for a backend that cannot keep an entry. Each begins at the present."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        self._leads = leads

    async def acquire(self, present: Present) -> str:
        """Wait until this worker leads."""
        while True:
            if self._leads():
                return await present()
            await asyncio.sleep(REFRESH_SECONDS)

    async def keep(self, cursor: str) -> bool:
        """Whether it still leads."""
        return self._leads()

    async def release(self) -> None:
        """Do nothing: the store elects another leader."""


class ResultRecorder:
    """Follows the ends of jobs and writes their results. It belongs to the agent's loop, and never ends by itself."""

    def __init__(self, fair: Fair, leads: Callable[[], bool]) -> None:
        self._fair = fair
        self._results = Results(fair)
        self._rng = Random()
        self._failures = FailureTracker("recording results of Celery", logger, self._rng)
        # Celery's backends block, and each thread has one of its own.
        self._thread = ThreadPoolExecutor(1, "fairlane-results")
        kept = remembers(fair.app.backend)
        self._role: RecorderRole = RoleByEntry(fair, self._call, self._rng) if kept else RoleOfLeader(leads)
        self._recorded = ""
        """Up to where everything is recorded; known once this worker has the role."""

    async def run(self) -> None:
        """Record whenever this worker has the role, until cancelled."""
        connection = self._fair.fairlane.connection
        store = await connection.hold()
        try:
            while True:
                try:
                    await self._follow(store, await self._role.acquire(EndedFeed(store).begin))
                except Exception as exc:
                    await asyncio.sleep(self._failures.failed(exc))
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._role.release(), LEAVE_SECONDS)
            self._thread.shutdown(wait=False, cancel_futures=True)
            await connection.release()

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _follow(self, store: Store, cursor: str) -> None:
        """Record what ends behind the cursor, until another worker has the role."""
        feed = EndedFeed(store, cursor=cursor)
        self._recorded = cursor
        while await self._role.keep(self._recorded):
            self._failures.worked()
            try:
                page = await asyncio.wait_for(feed.next(), REFRESH_SECONDS)
            except TimeoutError:
                self._recorded = await feed.begin()
                continue
            except InvalidInput as exc:
                logger.warning("results are recorded from now on: the stored position cannot be used (%s)", exc)
                feed = EndedFeed(store)
                self._recorded = await feed.begin()
                continue
            await self._record_all(store, page.jobs)
            self._recorded = page.cursor

    async def _record_all(self, store: Store, jobs: Sequence[EndedJob]) -> None:
        refreshed = time.monotonic()
        for ended in jobs:
            await self._record(store, ended)
            if time.monotonic() >= refreshed + REFRESH_SECONDS:
                await self._role.keep(self._recorded)
                refreshed = time.monotonic()

    async def _record(self, store: Store, ended: EndedJob) -> None:
        tries = 0
        while True:
            try:
                [job] = await store.get([ended.id])
                if job is not None and job.state.final:
                    await self._call(partial(self._results.record, job))
                return
            except Exception as exc:
                pause = self._failures.failed(exc)
                tries += await self._backend_answers()
                if tries >= MOST_TRIES:
                    logger.exception("the result of job %s could not be written", ended.id)
                    return
                await asyncio.sleep(pause)

    async def _backend_answers(self) -> bool:
        """Whether the backend works, so that an error is due to the job."""
        try:
            await self._role.keep(self._recorded)
        except Exception:
            return False
        return True
