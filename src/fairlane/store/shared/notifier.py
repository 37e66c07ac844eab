"""Carries wake-ups through any kind of server: a thread with an event loop and its own connection.

The thread starts with the first topic to send or to listen to, and survives outages: it reconnects with growing pauses,
warns at most once in `WARN_SECONDS`, and then delivers all topics to all subscriptions. Topics are dropped while the
server is away: by the time it is back, all processes have polled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar, Generic, Protocol, TypeVar

from ... import event_loops
from .topics import Channels, Waiting

LISTEN_SECONDS = 0.5
"""How long a caller may be blocked until the server listens; usually a few milliseconds."""
CONNECT_SECONDS = COMMAND_SECONDS = 5.0
CLOSE_SECONDS = 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
WARN_SECONDS = 60.0
"""Least seconds between two warnings, however often the connection is lost."""
logger = logging.getLogger("fairlane.store.wakeups")
C = TypeVar("C")
"""The connection to a kind of server."""


class Listeners(Protocol):
    """Receives what the server delivers. Called in the thread."""

    def deliver(self, topics: Collection[str]) -> None:
        """Deliver published topics."""

    def wake(self, *, jobs: bool, others: bool) -> None:
        """Deliver all topics of these kinds: any of them may have been published."""

    def wake_late(self) -> None:
        """The server listens now. Those for which `ServerNotifier.listen` returned False may have missed topics."""

    def wants(self) -> tuple[bool, bool]:
        """Return whether there are subscriptions to jobs, and to other topics."""


class TopicNotifier(Protocol):
    """What subscriptions need of a server."""

    def send(self, topics: Collection[str]) -> None:
        """Send topics soon. They are dropped while the server is away."""

    def listens(self, *, jobs: bool, others: bool) -> bool:
        """Return whether the server listens to these kinds of topics."""

    def listen(self, *, jobs: bool, others: bool) -> bool:
        """Listen to these kinds of topics. False: topics may be missed until `Listeners.wake_late` is called."""

    def close(self) -> None:
        """Send waiting topics for a limited time, and end. May be called twice."""


class ServerNotifier(ABC, Generic[C]):
    """The connection of one store object, and its thread. Methods outside the section of the thread are thread-safe."""

    SERVER: ClassVar[str]
    """The name of the server in the log."""

    def __init__(self, channels: Channels, listeners: Listeners) -> None:
        self._channels = channels
        self._listeners = listeners
        self._pid = os.getpid()
        # Guards the attributes below, up to those of the thread. Reentrant: a signal handler may publish too.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs, self._others = Waiting(), Waiting()
        self._nudged = False
        self._closing = False
        self._there = self._away = False
        """Both are False until the first attempt to connect has ended."""
        self._callers: list[threading.Event] = []
        self._silent = False
        """Whether a caller has waited in vain, and no other needs to."""
        self._listening: frozenset[str] = frozenset()
        # Used by the thread only.
        self._task: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._missed = False
        self._warned_at = -WARN_SECONDS
        self._warned = False
        self._unused: frozenset[str] = frozenset()

    @abstractmethod
    def send(self, topics: Collection[str]) -> None:
        """Send topics soon. They are dropped while the server is away."""

    @property
    def is_there(self) -> bool:
        """Whether the server was reached, and is not known to be away since."""
        return self._there

    def listens(self, *, jobs: bool, others: bool) -> bool:
        """Return whether the server listens to these kinds of topics."""
        return self._listening.issuperset(self._channels.of_kinds(jobs=jobs, others=others))

    def listen(self, *, jobs: bool, others: bool) -> bool:
        """Listen to these kinds of topics. False: topics may be missed until `Listeners.wake_late` is called."""
        if self.listens(jobs=jobs, others=others):
            return True
        done = threading.Event()
        with self._lock:
            if self._away or self._closing:
                return False
            self._callers.append(done)
            self._wake()
        if not self._silent and not done.wait(LISTEN_SECONDS):
            self._silent = True
        return self.listens(jobs=jobs, others=others)

    def close(self) -> None:
        """Send waiting topics for a limited time, and end the thread. May be called twice."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closing = True
            thread = self._thread
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end_soon)
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * CLOSE_SECONDS)

    def _wake(self) -> None:
        """Start or wake the thread, unless it is about to run. The caller holds the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="fairlane-wakeups", daemon=True)
            thread.start()
            self._thread = thread
        elif self._loop is not None and not self._nudged:
            self._loop.call_soon_threadsafe(self._nudge.set)
        self._nudged = True

    def _waits(self) -> bool:
        """Return whether there are topics to send."""
        return bool(self._jobs or self._others)

    # -- in the thread ---------------------------------------------------------------------------------------------

    @abstractmethod
    async def _connect(self) -> C:
        """Return a new connection."""

    @abstractmethod
    async def _use(self, connection: C) -> None:
        """Send and listen until the connection is lost, or until the thread should end and no topics wait."""

    @abstractmethod
    async def _subscribe(self, connection: C, channels: frozenset[str]) -> None:
        """Subscribe to channels, and add them to `_listening` once the server listens."""

    @abstractmethod
    async def _unsubscribe(self, connection: C, channel: str) -> None:
        """Unsubscribe from a channel."""

    def _run(self) -> None:
        try:
            event_loops.run_beside(self._serve())
        except asyncio.CancelledError:
            logger.debug("the last wake-ups were lost: the server does not answer")
        except Exception:
            logger.exception("wake-ups have failed for good; polling continues")
        finally:
            self._lose()

    async def _serve(self) -> None:
        self._task = asyncio.current_task()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            if self._closing:
                self._end_soon()
        failures = 0
        try:
            while not self._closing or self._waits():
                began = time.monotonic()
                try:
                    await self._use(await self._connect())
                except Exception as exc:  # No error may end the thread.
                    lasted = time.monotonic() - began
                    failures = 1 if lasted > CONNECT_SECONDS + COMMAND_SECONDS else failures + 1
                    self._lose()
                    self._warn(exc)
                    await self._pause(failures, lasted)
        finally:
            with self._lock:
                # Other threads must not call the loop from here on: it is about to be closed.
                self._loop = None

    def _end_soon(self) -> None:
        self._nudge.set()
        if self._task is not None:
            self._task.get_loop().call_later(CLOSE_SECONDS, self._task.cancel)

    def _wanted(self) -> frozenset[str]:
        jobs, others = self._listeners.wants()
        return self._channels.of_kinds(jobs=jobs, others=others)

    async def _listen_to_wanted(self, connection: C) -> None:
        """Listen to channels that have subscriptions and that the server does not listen to yet."""
        with self._lock:
            callers, self._callers = self._callers, []
            self._there, self._away = True, False
        try:
            new = self._wanted() - self._listening
            if new:
                await self._subscribe(connection, new)
            self._silent = False
        finally:
            for caller in callers:
                caller.set()
        if new:
            self._listeners.wake_late()
        if self._missed:
            self._missed = False
            self._listeners.wake(jobs=True, others=True)
            if self._warned:
                self._warned = False
                logger.info("%s delivers wake-ups again", self.SERVER)

    async def _leave_unused(self, connection: C) -> None:
        """Leave channels that had no subscription the last time either.

        Not at once: a process that waits for one job after the other would have to subscribe each time.
        """
        unused = self._listening - self._wanted()
        for channel in unused & self._unused:
            await self._leave_channel(connection, channel)
        self._unused = unused

    async def _leave_channel(self, connection: C, channel: str) -> None:
        with self._lock:
            self._listening -= {channel}
        if channel not in self._wanted():
            await self._unsubscribe(connection, channel)
        else:
            # A new subscription may have found the channel in `_listening`, and so did not request it.
            with self._lock:
                self._listening |= {channel}

    async def _wait_for_work(self) -> None:
        """Wait until there is something to do."""
        with self._lock:
            self._nudged = self._waits() or bool(self._callers)
        if not self._nudged:
            await self._nudge.wait()

    def _remind(self, seconds: float) -> float:
        """Wake the thread after `seconds`; returns the time of that."""
        asyncio.get_running_loop().call_later(seconds, self._nudge.set)
        return time.monotonic() + seconds

    def _lose(self) -> None:
        """Note that the connection is lost. Waiting topics are dropped."""
        with self._lock:
            self._there = False
            self._away = self._missed = True
            self._listening = frozenset()
            self._jobs.take()
            self._others.take()
            callers, self._callers = self._callers, []
        for caller in callers:
            caller.set()

    def _warn(self, exc: Exception) -> None:
        now = time.monotonic()
        if not self._closing and now >= self._warned_at + WARN_SECONDS:
            self._warned_at = now
            self._warned = True
            reason = f"{type(exc).__name__}: {exc}"
            logger.warning("no wake-ups through %s until it answers; polling continues (%s)", self.SERVER, reason)

    async def _pause(self, failures: int, lasted: float) -> None:
        pause = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2.0 ** min(failures - 1, 10))
        pause = max(SHORTEST_PAUSE, pause - lasted) * random.uniform(0.5, 1)
        self._nudge.clear()
        if not self._closing:
            try:
                async with asyncio.timeout(pause):
                    await self._nudge.wait()
            except TimeoutError:
                return
