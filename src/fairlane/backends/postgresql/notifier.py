"""Carries wake-ups through the server: a thread with an event loop and one connection, for sending and for listening.

The thread starts with the first thing to send or to listen to. The first topics go at once; those that come within
`GATHER_SECONDS` go together, because all NOTIFYs of a server commit one after the other. Nothing is kept for a server
that is away: by the time it is back everybody has polled.

``job:`` and ``place:`` topics are sent only when somebody hears them. A process with a listener says `HERE` when it
begins and every `ANNOUNCE_SECONDS`, on the channel of the other topics. Whoever begins to hear that channel asks
`ANYBODY` on the channel of the jobs, and sends everything until the answers must be there. Whoever does not hear it
sends everything always. What was kept back just before a listener was heard of is sent after all: so a listener hears
whatever changes after the server began to listen for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any, Protocol

from ... import loops
from .address import driver
from .channels import ANYBODY, EVERYTHING, HERE, Channels, Waiting, is_about_a_job, payloads

GATHER_SECONDS = 0.002
LISTEN_SECONDS = 0.5
"""How long a caller may be held up until the server listens: a few milliseconds as a rule."""
MOST_KEPT, KEEP_SECONDS = 5_000, 0.5
"""Jobs that nobody wanted to hear of: how many are remembered, and how long."""
ANNOUNCE_SECONDS = 10.0
EARLY_SECONDS = 0.002
"""A timer may fire so much before its time, as an event loop counts it."""
TRUST_SECONDS = 30.0
"""How long it counts that somebody said to be there."""
ANSWER_SECONDS = 0.3
"""Answers are spread over this time, and fall away when two others have answered."""
GRACE_SECONDS = 1.0
"""How long everything is sent after asking."""
CONNECT_SECONDS = COMMAND_SECONDS = 5.0
CLOSE_SECONDS = 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
COMPLAIN_SECONDS = 60.0
"""Seconds between two warnings, however often the connection is lost."""
NOTIFY = "SELECT pg_notify(channel, payload) FROM unnest($1::text[], $2::text[]) AS told(channel, payload)"
logger = logging.getLogger("fairlane.wakeups")
Connection = Any
"""The driver's, which has no types."""


class Listeners(Protocol):
    """Who is told what the server tells. Called from the thread."""

    def tell(self, topics: Collection[str]) -> None:
        """These were published."""

    def wake(self, *, jobs: bool, others: bool) -> None:
        """Anything of these kinds may have been published."""

    def wake_late(self) -> None:
        """The server listens now; those whom `Notifier.listen` answered no may have missed something."""

    def wants(self) -> tuple[bool, bool]:
        """Whether anybody listens to jobs, and to anything else."""


class Notifier:
    """The connection of one store object, and its thread. What is not the thread's may be called from anywhere."""

    def __init__(self, dsn: str, channels: Channels, listeners: Listeners) -> None:
        self._dsn = dsn
        self._channels = channels
        self._listeners = listeners
        self._pid = os.getpid()
        # Guards the rest up to the thread's own. Reentrant, because a signal handler may publish too.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs, self._others, self._signs = Waiting(), Waiting(), Waiting()
        self._kept: deque[tuple[float, list[str]]] = deque()
        self._kept_count = 0
        self._nudged = False
        self._closing = False
        self._away = False
        self._callers: list[threading.Event] = []
        self._listening: frozenset[str] = frozenset()
        self._jobs_heard_until = 0.0
        # The thread's own.
        self._task: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._own_pid = 0
        self._missed = False
        self._complained_at = -COMPLAIN_SECONDS
        self._complaining = False
        self._announcers: set[int] = set()
        self._announce_at = self._look_at = 0.0
        self._unused: frozenset[str] = frozenset()

    def send(self, topics: Collection[str]) -> None:
        """Send these soon. They are dropped while the server is away."""
        jobs = [topic for topic in topics if is_about_a_job(topic)]
        others = [topic for topic in topics if not is_about_a_job(topic)] if len(jobs) < len(topics) else []
        with self._lock:
            if self._away or self._closing:
                return
            if jobs:
                now = time.monotonic()
                if self._channels.others not in self._listening or now < self._jobs_heard_until:
                    self._jobs.add(jobs)
                else:
                    self._keep(now, jobs)
                    if not others:
                        return
            self._others.add(others)
            self._wake()

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

    def _keep(self, now: float, jobs: list[str]) -> None:
        self._kept.append((now, jobs))
        self._kept_count += len(jobs)
        while self._kept and (self._kept_count > MOST_KEPT or self._kept[0][0] < now - KEEP_SECONDS):
            self._kept_count -= len(self._kept.popleft()[1])

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
        return bool(self._jobs or self._others or self._signs)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            loops.run_beside(self._serve())
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

    async def _connect(self) -> Connection:
        return await driver().connect(
            self._dsn,
            timeout=CONNECT_SECONDS,
            command_timeout=COMMAND_SECONDS,
            server_settings={"application_name": "fairlane wake-ups"},
        )

    async def _use(self, connection: Connection) -> None:
        """Send and listen until the connection is lost, or until the thread is to end and nothing waits."""
        try:
            connection.add_termination_listener(lambda _: self._nudge.set())
            self._own_pid = connection.get_server_pid()
            self._look_at = self._remind(ANNOUNCE_SECONDS)
            while not connection.is_closed():
                self._nudge.clear()
                await self._listen_to_wanted(connection)
                await self._look_around(connection)
                began = time.monotonic()
                sent = await self._send_waiting(connection)
                if self._closing and not self._waits():
                    await connection.close(timeout=CLOSE_SECONDS)
                    return
                if sent:
                    await asyncio.sleep(began + GATHER_SECONDS - time.monotonic())
                with self._lock:
                    self._nudged = self._waits() or bool(self._callers)
                if not self._nudged:
                    await self._nudge.wait()
            raise ConnectionResetError("the server ended the connection")
        finally:
            connection.terminate()

    def _wanted(self) -> frozenset[str]:
        jobs, others = self._listeners.wants()
        return self._channels.of_kinds(jobs=jobs, others=others)

    async def _listen_to_wanted(self, connection: Connection) -> None:
        with self._lock:
            callers, self._callers = self._callers, []
            self._away = False
        try:
            new = self._wanted() - self._listening
            for channel in new:
                await connection.add_listener(channel, self._hear)
            if new:
                self._begin_to_hear(new)
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
                logger.info("wake-ups come through PostgreSQL again")

    def _begin_to_hear(self, channels: frozenset[str]) -> None:
        with self._lock:
            if self._channels.jobs in channels:
                self._signs.add([HERE])
                self._announcers.clear()
                self._announce_at = self._remind(ANNOUNCE_SECONDS)
            if self._channels.others in channels:
                self._signs.add([ANYBODY])
                self._jobs_heard_until = max(self._jobs_heard_until, time.monotonic() + GRACE_SECONDS)
            self._listening |= channels

    async def _look_around(self, connection: Connection) -> None:
        """Do what is due from time to time: see whether the server is there, leave channels, and announce."""
        now = time.monotonic() + EARLY_SECONDS
        if now >= self._look_at:
            self._look_at = self._remind(ANNOUNCE_SECONDS)
            await connection.execute("SELECT 1")
            unused = self._listening - self._wanted()
            # Not at once: whoever waits for one job after the other would listen anew each time.
            for channel in unused & self._unused:
                await self._stop_to_hear(connection, channel)
            self._unused = unused
        if now >= self._announce_at and self._channels.jobs in self._listening:
            # Two are enough: each of them tells all others, and the two tell each other.
            if len(self._announcers) < 2:
                self._signs.add([HERE])
            self._announcers.clear()
            self._announce_at = self._remind(ANNOUNCE_SECONDS)

    async def _stop_to_hear(self, connection: Connection, channel: str) -> None:
        with self._lock:
            self._listening -= {channel}
        if channel not in self._wanted():
            await connection.remove_listener(channel, self._hear)
        else:
            # Somebody came who may have seen it among those listened to, and does not ask for it.
            with self._lock:
                self._listening |= {channel}

    async def _send_waiting(self, connection: Connection) -> bool:
        with self._lock:
            signs, jobs, others = self._signs.take(), self._jobs.take(), self._others.take()
        told = [(self._channels.others if sign == HERE else self._channels.jobs, sign) for sign in signs]
        told += [(self._channels.others, payload) for payload in payloads(others)]
        told += [(self._channels.jobs, payload) for payload in payloads(jobs)]
        if told:
            await connection.execute(NOTIFY, [channel for channel, _ in told], [payload for _, payload in told])
        return bool(told)

    def _hear(self, connection: object, pid: int, channel: str, payload: str) -> None:
        if pid == self._own_pid:
            return
        jobs = channel == self._channels.jobs
        if payload == HERE:
            self._hear_of_a_listener(pid)
        elif payload == ANYBODY:
            self._announcers.clear()
            self._announce_at = min(self._announce_at, self._remind(random.random() * ANSWER_SECONDS))
        elif payload == EVERYTHING:
            self._listeners.wake(jobs=jobs, others=not jobs)
        else:
            self._listeners.tell(payload.split("\n"))

    def _hear_of_a_listener(self, pid: int) -> None:
        self._announcers.add(pid)
        with self._lock:
            now = time.monotonic()
            self._jobs_heard_until = now + TRUST_SECONDS
            for kept_at, jobs in self._kept:
                if kept_at >= now - KEEP_SECONDS:
                    self._jobs.add(jobs)
            self._kept.clear()
            self._kept_count = 0
            if self._jobs:
                self._wake()

    def _remind(self, seconds: float) -> float:
        """Look again after so many seconds; answers when that is."""
        asyncio.get_running_loop().call_later(seconds, self._nudge.set)
        return time.monotonic() + seconds

    def _lose(self) -> None:
        with self._lock:
            self._away = self._missed = True
            self._listening = frozenset()
            for waiting in (self._jobs, self._others, self._signs):
                waiting.take()
            callers, self._callers = self._callers, []
        for caller in callers:
            caller.set()

    def _complain(self, exc: Exception) -> None:
        now = time.monotonic()
        if not self._closing and now >= self._complained_at + COMPLAIN_SECONDS:
            self._complained_at = now
            self._complaining = True
            reason = f"{type(exc).__name__}: {exc}"
            logger.warning("no wake-ups through PostgreSQL until it answers; polling goes on (%s)", reason)

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
