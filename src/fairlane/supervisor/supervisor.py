"""``fairlane worker --processes N``: keeps N worker processes running, and acts for those that cannot.

When a process dies, the supervisor ends its session at once: jobs that had begun are charged as after a crash, the
others are handed back uncharged, and none waits for the lease to end. While a process runs but blocks its interpreter
for so long that it cannot renew its lease, the supervisor renews it; not while the process is suspended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from ..errors import FairlaneError, NotFound, StoreError, StoreUnavailable
from ..manager.service import FailureTracker
from ..model.intervals import Intervals
from ..model.job import Held
from ..model.names import plural
from ..model.retry import Backoff
from ..model.states import hand_back
from ..runtime.connection import Connection, OpenStore
from .crash_state import CrashReading, CrashState
from .parent_pipe import CRASH_STATE_FD, PARENT_PIPE_FD, PROCESS_NUMBER
from .process import Process, in_words

logger = logging.getLogger("fairlane.supervisor")

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
LONG_LIFE = 60.0
"""A process that ran this long did not die because of its start."""
QUIET_HEARTBEATS = 1.5
AFTER_GRACE = 2.0
"""Children end by themselves when their grace period is over; this is for what they have to write then."""
MOST_JOBS_NAMED = 10
LEAVE_BACKOFF = Backoff(base=0.1, most=2.0, jitter=False)
"""Between two tries to end a session while the store does not answer."""
LEAVE_FIRST = 1.0
"""How long a restart waits for the end of the session; that takes milliseconds, unless the store is unavailable."""
CALL_TIMEOUT = 3.0
"""How long one call to the store may take."""
LAST_TRIES = 5.0
"""How long a stopping supervisor goes on trying; after that the rescuer detects that the lease has ended."""


class Supervisor:
    """Runs `processes` copies of a command, each with a crash state and a parent pipe named by its environment."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        open_store: OpenStore,
        intervals: Intervals,
        grace: float,
        until_done: bool = False,
    ) -> None:
        self._command = list(command)
        self._processes = processes
        self._connection = Connection(open_store)
        self._intervals = intervals
        self._grace = grace
        self._until_done = until_done
        self._children: set[Child] = set()
        self._stopping = asyncio.Event()
        self._killing: asyncio.TimerHandle | None = None

    @property
    def children(self) -> list[Child]:
        """The running processes."""
        return list(self._children)

    async def run(self) -> None:
        """Keep the processes running until SIGTERM or SIGINT, or, with `until_done`, until each has exited with 0."""
        try:
            with suppress(StoreError):
                # Opened now, so that no time is lost when the first process dies.
                await self._connection.store()
            with self._signals():
                async with asyncio.TaskGroup() as watch:
                    renewing = watch.create_task(self._renew_for_busy())
                    async with asyncio.TaskGroup() as group:
                        for number in range(self._processes):
                            group.create_task(self._keep_one(group, number))
                    renewing.cancel()
        finally:
            if self._killing is not None:
                self._killing.cancel()
            for child in self._children:
                child.process.signal(signal.SIGTERM)
                child.close()
            with suppress(FairlaneError):
                await self._connection.close()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Pass a signal on to all children, at every call; those that outlive their grace are killed."""
        for child in self._children:
            child.process.signal(number)
        if not self._stopping.is_set():
            self._stopping.set()
            loop = asyncio.get_running_loop()
            self._killing = loop.call_later(self._grace + AFTER_GRACE, self._kill_the_rest)

    def _kill_the_rest(self) -> None:
        for child in self._children:
            logger.warning("process %d did not stop within %g s; killing it", child.process.pid, self._grace)
            child.given_up = True
            child.process.kill()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    # -- one number, and the processes that have it in turn ---------------------------------------------------------

    async def _keep_one(self, group: asyncio.TaskGroup, number: int) -> None:
        deaths = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_one(group, number)
            if self._stopping.is_set() or (self._until_done and code == 0):
                return
            deaths = 0 if time.monotonic() - began >= LONG_LIFE else deaths
            delay = restart_delay(deaths)
            deaths += 1
            logger.info("starting process number %d again %s", number, f"in {delay:g} s" if delay else "at once")
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _run_one(self, group: asyncio.TaskGroup, number: int) -> int | None:
        """Start a process and wait for its end; None when the system cannot start it."""
        try:
            child = Child(self._command, number)
        except OSError as exc:
            logger.error("process number %d cannot be started: %s", number, exc)
            return None
        self._children.add(child)
        logger.info("process %d started as number %d", child.process.pid, number)
        code = await child.process.wait()
        self._children.discard(child)
        left = child.crash_state.read()
        leaving = group.create_task(self._leave_for(child, left))
        if code != 0:
            # Programs that its jobs have started must not go on beside those of the next run.
            child.process.kill()
        level = logging.INFO if code == 0 or self._stopping.is_set() else logging.ERROR
        words = in_words(code) + (_running_jobs(left.begun) if code != 0 else "")
        logger.log(level, "process %d, number %d, %s", child.process.pid, number, words)
        # A successor with the same named index would take the session over, and all its jobs would count as begun.
        await asyncio.wait([leaving], timeout=LEAVE_FIRST)
        return code

    async def _leave_for(self, child: Child, left: CrashReading) -> None:
        """End the session of a child that has died, however long the store takes to answer."""
        child.close()
        if left.session is None:
            return
        failures = FailureTracker(f"ending session {left.session}", logger, Random(), LEAVE_BACKOFF)
        stopping_since = None
        while (problem := await self._leave(left.session, left.begun, child.given_up)) is not None:
            pause = failures.failed(problem)
            if self._stopping.is_set():
                stopping_since = stopping_since or time.monotonic()
                if time.monotonic() - stopping_since > LAST_TRIES:
                    logger.error("session %s was not ended; its jobs run again when its lease ends", left.session)
                    return
            await asyncio.sleep(pause)

    async def _leave(self, session: str, begun: Sequence[Held], given_up: bool) -> StoreError | None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                store = await self._connection.store()
                if given_up and begun:
                    # Jobs that were killed because the worker had to stop are not charged, but they had begun.
                    await store.finish(session, [hand_back(held) for held in begun])
                await store.leave(session, begun=() if given_up else begun)
        except NotFound:
            # It died before it was registered.
            return None
        except TimeoutError:
            return StoreUnavailable(f"the store did not answer within {CALL_TIMEOUT:g} s")
        except StoreError as exc:
            return exc
        return None

    # -- leases of busy processes ------------------------------------------------------------------------------------

    async def _renew_for_busy(self) -> None:
        overdue = QUIET_HEARTBEATS * self._intervals.heartbeat
        while True:
            await asyncio.sleep(self._intervals.heartbeat / 4)
            for child, session in [(child, child.quiet_session(overdue)) for child in self._children]:
                if session is not None:
                    await self._renew(child, session)

    async def _renew(self, child: Child, session: str) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                store = await self._connection.store()
                # Names no job and no claim, so nothing is taken back: only the child knows what it holds.
                await store.renew(session, [], claim=0)
        except (StoreError, TimeoutError):
            # The store is unavailable, which the workers log themselves; the next round tries again.
            return
        except FairlaneError as exc:
            # If it has ended or is ending its session itself, that is in order.
            if child.quiet_session(0.0) == session:
                logger.warning("process %d did not renew its lease in time: %s", child.process.pid, exc)
        else:
            logger.warning(
                "process %d did not renew its lease in time: it is busy, or the store did not answer it; the "
                "supervisor has renewed the lease",
                child.process.pid,
            )
        child.renewed_at = time.monotonic()


class Child:
    """A worker process, its crash state, and the pipe that is closed when its supervisor ends."""

    def __init__(self, command: Sequence[str], number: int) -> None:
        self.crash_state = CrashState.make()
        read_end, self._write_end = os.pipe()
        shared = {
            CRASH_STATE_FD: str(self.crash_state.fd),
            PARENT_PIPE_FD: str(read_end),
            PROCESS_NUMBER: str(number),
        }
        try:
            self.process = Process(command, fds=[self.crash_state.fd, read_end], environ=os.environ | shared)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read_end)
        self.renewed_at = 0.0
        """When the supervisor last renewed its lease."""
        self.given_up = False
        """It was killed because it did not stop."""

    def quiet_session(self, seconds: float) -> str | None:
        """Its session, if that was not renewed for so many seconds although the process runs."""
        state = self.crash_state.read()
        if state.last_beat is None or time.monotonic() - max(state.last_beat, self.renewed_at) < seconds:
            return None
        return None if self.process.code is not None or is_halted(self.process.pid) else state.session

    def close(self) -> None:
        """Release what is shared with it. A child that still runs detects that its supervisor is gone."""
        self.crash_state.close()
        os.close(self._write_end)


def _running_jobs(begun: Sequence[Held]) -> str:
    """The jobs that may have ended their process, for the log. The store is not asked: it may be what is down."""
    if not begun:
        return ""
    named = ", ".join(held.id for held in begun[:MOST_JOBS_NAMED])
    more = f" and {len(begun) - MOST_JOBS_NAMED} more" if len(begun) > MOST_JOBS_NAMED else ""
    return f" while it ran {plural(len(begun), 'job')}: {named}{more}"


def restart_delay(deaths: int) -> float:
    """How long to wait before restarting a process that died `deaths` times in a row before, each time soon."""
    return 0.0 if deaths == 0 else min(FIRST_DELAY * 2 ** min(deaths - 1, 10), LONGEST_DELAY)


def is_halted(pid: int) -> bool:
    """Whether a process is suspended, traced or dead, so that it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        # It has ended; or the system has no /proc, where every process counts as running.
        return Path("/proc/self/stat").exists()
    except OSError:
        return True
    # The program's name is in parentheses and may contain anything.
    return stat.rpartition(")")[2].split()[0] in "TtZXx"
