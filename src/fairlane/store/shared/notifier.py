"""What carries wake-ups through a server, whatever server it is: a thread with an event loop and its own connection.

The thread starts with the first thing to send or to listen to, and lives through outages: it connects again after a
pause that grows, warns at most once in `COMPLAIN_SECONDS`, and then tells everybody to look at everything. Nothing is
kept for a server that is away: by the time it is back everybody has polled.
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
"""How long a caller may be held up until the server listens: a few milliseconds as a rule."""
CONNECT_SECONDS = COMMAND_SECONDS = 5.0
CLOSE_SECONDS = 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
COMPLAIN_SECONDS = 60.0
"""Seconds between two warnings, however often the connection is lost."""
logger = logging.getLogger("fairlane.store.wakeups")
C = TypeVar("C")
"""What stands for the connection to a kind of server."""


class Listeners(Protocol):
    """Who is told what the server tells. Called from the thread."""

    def tell(self, topics: Collection[str]) -> None:
        """These were published."""

    def wake(self, *, jobs: bool, others: bool) -> None:
        """Anything of these kinds may have been published."""

    def wake_late(self) -> None:
        """The server listens now; those whom `ServerNotifier.listen` answered no may have missed something."""

    def wants(self) -> tuple[bool, bool]:
        """Whether anybody listens to jobs, and to anything else."""


class ServerNotifier(ABC, Generic[C]):
    """The connection of one store object, and its thread. What is not the thread's may be called from anywhere."""

    SERVER: ClassVar[str]
    """What the server is called in the log."""

    def __init__(self, channels: Channels, listeners: Listeners) -> None:
        self._channels = channels
        self._listeners = listeners
        self._pid = os.getpid()
        # Guards the rest up to the thread's own. Reentrant, because a signal handler may publish too.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs, self._others = Waiting(), Waiting()
        self._nudged = False
        self._closing = False
        self._away = False
        self._callers: list[threading.Event] = []
        self._listening: frozenset[str] = frozenset()
        # The thread's own.
        self._task: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._missed = False
        self._complained_at = -COMPLAIN_SECONDS
        self._complaining = False
        self._unused: frozenset[str] = frozenset()

    @abstractmethod
    def send(self, topics: Collection[str]) -> None:
        """Send these soon. They are dropped while the server is away."""

    def listens(self, *, jobs: bool, others: bool) -> bool:
        """Whether the server listens to these kinds of topics now."""
        return self._listening.issuperset(self._channels.of_kinds(jobs=jobs, others=others))

    def listen(self, *, jobs: bool, others: bool) -> bool:
        """Listen to these kinds of topics. False: something may be missed until `Listeners.wake_late` is called."""
        if self.listens(jobs=jobs, others=others):
            return True
        done = threading.Event()
        with self._lock:
            if self._away or self._closing:
                return False
            self._callers.append(done)
            self._wake()
        done.wait(LISTEN_SECONDS)
        return self.listens(jobs=jobs, others=others)

    def close(self) -> None:
        """Send what waits, for a moment, and end the thread. Closing twice is harmless."""
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
        """Call the thread, unless it looks by itself soon. The lock is held."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="fairlane-wakeups", daemon=True)
            thread.start()
            self._thread = thread
        elif self._loop is not None and not self._nudged:
            self._loop.call_soon_threadsafe(self._nudge.set)
        self._nudged = True

    def _waits(self) -> bool:
        """Whether there is something to be sent."""
        return bool(self._jobs or self._others)

    # -- in the thread ---------------------------------------------------------------------------------------------

    @abstractmethod
    async def _connect(self) -> C:
        """A new connection, as `_use` and those below take it."""

    @abstractmethod
    async def _use(self, connection: C) -> None:
        """Send and listen until the connection is lost, or until the thread is to end and nothing waits."""

    @abstractmethod
    async def _begin_to_hear(self, connection: C, channels: frozenset[str]) -> None:
        """Let the server listen, and add the channels to `_listening` when it does."""

    @abstractmethod
    async def _fall_silent(self, connection: C, channel: str) -> None:
        """Let the server listen to a channel no more."""

    def _run(self) -> None:
        try:
            event_loops.run_beside(self._serve())
        except asyncio.CancelledError:
            logger.debug("wake-ups were lost at the end: the server does not answer")
        except Exception:
            logger.exception("wake-ups have ended; polling goes on")
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
                except Exception as exc:  # Whatever it is: the thread must not end by it.
                    lasted = time.monotonic() - began
                    failures = 1 if lasted > CONNECT_SECONDS + COMMAND_SECONDS else failures + 1
                    self._lose()
                    self._complain(exc)
                    await self._pause(failures, lasted)
        finally:
            with self._lock:
                # From here on nobody calls the loop, which is about to be closed.
                self._loop = None

    def _end_soon(self) -> None:
        self._nudge.set()
        if self._task is not None:
            self._task.get_loop().call_later(CLOSE_SECONDS, self._task.cancel)

    def _wanted(self) -> frozenset[str]:
        jobs, others = self._listeners.wants()
        return self._channels.of_kinds(jobs=jobs, others=others)

    async def _listen_to_wanted(self, connection: C) -> None:
        """Listen to what somebody here wants to hear and the server does not listen to yet."""
        with self._lock:
            callers, self._callers = self._callers, []
            self._away = False
        try:
            new = self._wanted() - self._listening
            if new:
                await self._begin_to_hear(connection, new)
        finally:
            for caller in callers:
                caller.set()
        if new:
            self._listeners.wake_late()
        if self._missed:
            self._missed = False
            self._listeners.wake(jobs=True, others=True)
            if self._complaining:
                self._complaining = False
                logger.info("wake-ups come through %s again", self.SERVER)

    async def _leave_unused(self, connection: C) -> None:
        """Leave the channels that nobody wanted the last time either.

        Not at once: whoever waits for one job after the other would listen anew each time.
        """
        unused = self._listening - self._wanted()
        for channel in unused & self._unused:
            await self._stop_to_hear(connection, channel)
        self._unused = unused

    async def _stop_to_hear(self, connection: C, channel: str) -> None:
        with self._lock:
            self._listening -= {channel}
        if channel not in self._wanted():
            await self._fall_silent(connection, channel)
        else:
            # Somebody came who may have seen it among those listened to, and does not ask for it.
            with self._lock:
                self._listening |= {channel}

    async def _wait_for_news(self) -> None:
        """Return when there is something to do: at once if it came meanwhile."""
        with self._lock:
            self._nudged = self._waits() or bool(self._callers)
        if not self._nudged:
            await self._nudge.wait()

    def _remind(self, seconds: float) -> float:
        """Look again after so many seconds; answers when that is."""
        asyncio.get_running_loop().call_later(seconds, self._nudge.set)
        return time.monotonic() + seconds

    def _lose(self) -> None:
        """The connection is lost, and with it all that waits."""
        with self._lock:
            self._away = self._missed = True
            self._listening = frozenset()
            self._jobs.take()
            self._others.take()
            callers, self._callers = self._callers, []
        for caller in callers:
            caller.set()

    def _complain(self, exc: Exception) -> None:
        now = time.monotonic()
        if not self._closing and now >= self._complained_at + COMPLAIN_SECONDS:
            self._complained_at = now
            self._complaining = True
            reason = f"{type(exc).__name__}: {exc}"
            logger.warning("no wake-ups through %s until it answers; polling goes on (%s)", self.SERVER, reason)

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
