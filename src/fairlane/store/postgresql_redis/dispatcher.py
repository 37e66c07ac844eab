"""Pushes tokens to Redis after the commit; no caller waits for that.

A job that becomes claimable gets a token in the list of its queue and class. Where a call knows which jobs these are,
their tokens are pushed at once. Otherwise the queues are counted in PostgreSQL, once for all calls of a few
milliseconds, and the lists are filled up. Both happen in tasks of the caller's event loop, and so does the leader's
pass: one call at a time to each server, so that tokens gather while one is on its way, and no server waits for another.
No lock of PostgreSQL is ever held across a call to Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, NamedTuple

from ...errors import FairlaneError
from ...model.job import Priority
from ..redis.connection import Argument
from ..wakeups import queue_topic, worker_topic
from .shard import Shard

GATHER_SECONDS = 0.005
"""The least time between two counts of one process."""
DRAIN_SECONDS = 2.0
SHARED_INBOX = "~"
"""Begins an inbox of jobs that only workers with a certain task can run; its topic is ``worker:~QUEUE``."""


class Claimable(NamedTuple):
    """Jobs that could start now, as PostgreSQL counts them."""

    slots: int
    """The slots of all live workers."""
    jobs: dict[tuple[str, Priority], int]
    inboxes: frozenset[str]
    """Topics of inboxes that have claimable jobs."""


Count = Callable[[list[str] | None], Awaitable[Claimable]]
"""Counts the claimable jobs of queues, or of all."""


def claimable_of(row: Any) -> Claimable:
    """The answer of `read_claimable`."""
    found = Claimable(row["slots"], {}, frozenset())
    inboxes = set()
    priorities = tuple(Priority)
    rows = (row[name] or () for name in ("queues", "classes", "inboxes", "jobs"))
    for queue, code, inbox, jobs in zip(*rows, strict=True):
        if not inbox:
            found.jobs[queue, priorities[code]] = jobs
        else:
            inboxes.add(worker_topic(SHARED_INBOX + queue if inbox.startswith(SHARED_INBOX) else inbox))
    return found._replace(inboxes=frozenset(inboxes))


class Outbox:
    """The tokens and counts that wait to be sent to one server."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, Priority], tuple[int, str]] = {}
        self.counted: Claimable | None = None
        self.swept: Claimable | None = None
        """What the leader's last pass has counted."""
        self.sending = False

    def add_counted(self, found: Claimable) -> None:
        """Add counts of queues; a later count of a queue replaces an earlier one."""
        before = {} if self.counted is None else self.counted.jobs
        self.counted = found._replace(jobs={**before, **found.jobs})


class Dispatcher:
    """Pushes tokens from one event loop."""

    def __init__(self, shards: Sequence[Shard], count: Count, notify: Callable[[Collection[str]], None]) -> None:
        self._shard_of = {priority: shard for shard in shards for priority in shard.priorities}
        self._count = count
        self._notify = notify
        self._outboxes = {shard: Outbox() for shard in shards}
        self._uncounted: set[str] = set()
        self._counting = False
        self._sweeping = False
        self._sweep_again = False
        self._tasks: set[asyncio.Task[None]] = set()

    def push(self, queue: str, priority: Priority, trace: str, count: int = 1) -> None:
        """Push tokens soon."""
        shard = self._shard_of[priority]
        tokens = self._outboxes[shard].tokens
        known = tokens.get((queue, priority))
        tokens[queue, priority] = (count if known is None else known[0] + count, trace)
        self._send_soon(shard)

    def count(self, queues: Collection[str]) -> None:
        """Count the claimable jobs of queues soon, and push missing tokens."""
        self._uncounted.update(queues)
        if not self._counting:
            self._counting = True
            self.spawn(self._count_all())

    def reconcile(self) -> None:
        """Begin a pass of the leader over all queues. If one is counting, another follows, for jobs added meanwhile."""
        self._sweep_again = True
        if not self._sweeping:
            self._sweeping = True
            self.spawn(self._sweep())

    def run(self, shard: Shard, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> None:
        """Run a script soon; it may be lost."""
        self.spawn(_quietly(shard.run(script, keys, arguments)))

    async def drain(self) -> None:
        """Wait for calls in progress, for a limited time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                # What was counted is then pushed by another task.
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background until it ends or `drain` is over."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_soon(self, shard: Shard) -> None:
        outbox = self._outboxes[shard]
        if not outbox.sending:
            outbox.sending = True
            self.spawn(self._send_all(shard, outbox))

    async def _send_all(self, shard: Shard, outbox: Outbox) -> None:
        try:
            while outbox.tokens or outbox.counted is not None or outbox.swept is not None:
                if tokens := outbox.tokens:
                    outbox.tokens = {}
                    await self._push(shard, tokens)
                if (counted := outbox.counted) is not None:
                    outbox.counted = None
                    await self._level(shard, counted, everything=False)
                if (swept := outbox.swept) is not None:
                    outbox.swept = None
                    await self._level(shard, swept, everything=True)
        finally:
            outbox.sending = False

    async def _push(self, shard: Shard, tokens: dict[tuple[str, Priority], tuple[int, str]]) -> None:
        keys = [shard.keys.state, shard.keys.lists]
        lost, shard.lost = shard.lost, 0
        arguments: list[Argument] = [shard.keys.jobs, lost]
        for (queue, priority), (count, trace) in tokens.items():
            keys.append(shard.keys.list(queue, priority))
            arguments += [count, queue_topic(queue), trace]
        try:
            await shard.run("push", keys, arguments)
        except FairlaneError:
            shard.lost += lost + sum(count for count, _ in tokens.values())

    async def _count_all(self) -> None:
        try:
            while self._uncounted:
                queues, self._uncounted = self._uncounted, set()
                began = time.monotonic()
                try:
                    found = await self._count(list(queues))
                except FairlaneError:
                    # The leader's next pass counts all queues.
                    continue
                for shard, outbox in self._outboxes.items():
                    outbox.add_counted(found)
                    self._send_soon(shard)
                if found.inboxes:
                    self._notify(found.inboxes)
                await asyncio.sleep(max(0.0, began + GATHER_SECONDS - time.monotonic()))
        finally:
            self._counting = False

    async def _sweep(self) -> None:
        try:
            while self._sweep_again:
                self._sweep_again = False
                found = await self._count(None)
                for shard, outbox in self._outboxes.items():
                    outbox.swept = found
                    self._send_soon(shard)
                if found.inboxes:
                    self._notify(found.inboxes)
        except FairlaneError:
            # The next pass counts again.
            return
        finally:
            self._sweeping = False

    async def _level(self, shard: Shard, found: Claimable, *, everything: bool) -> None:
        """Make the lists of a server fit what was counted."""
        jobs = {key: count for key, count in found.jobs.items() if key[1] in shard.priorities}
        if not everything and not jobs:
            return
        keys = [shard.keys.state, shard.keys.lists, shard.keys.alive]
        keys += [shard.keys.list(queue, priority) for queue, priority in jobs]
        lost, shard.lost = shard.lost, 0
        generation, sweeps = shard.seen
        arguments: list[Argument] = [int(everything), found.slots, lost, secrets.token_hex(8), generation, sweeps]
        arguments += jobs.values()
        try:
            answer: Any = await shard.run("reconcile", keys, arguments)
        except FairlaneError:
            shard.lost += lost + (sum(jobs.values()) if not everything else 0)
            return
        if everything:
            seen = answer[0].decode()
            if generation and seen != generation:
                shard.report_reset()
            shard.seen = (seen, answer[1])


async def _quietly(call: Awaitable[object]) -> None:
    try:
        await call
    except FairlaneError:
        return
