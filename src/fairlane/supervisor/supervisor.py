"""``fairlane worker --processes N``: keeps N worker processes running, and speaks for those that cannot.

When one dies its session is left at once, in its name: the jobs that had begun are charged as after a crash, the others
are handed back uncharged, and none waits for a lease to end. While one lives but holds its interpreter for so long that
it cannot renew its lease, the lease is renewed for it; not while it is stopped, for then it does nothing.
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

from ..errors import FairlaneError, NotFound, StoreError, StoreUnavailable
from ..model.intervals import Intervals
from ..model.job import Held
from ..model.states import hand_back
from ..runtime.connection import Connection, OpenStore
from .crash_state import CrashState
from .parent_pipe import MARKS_FD, PROCESS_NUMBER, TETHER_FD
from .process import Process, in_words

logger = logging.getLogger("fairlane.supervisor")

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
LONG_LIFE = 60.0
"""Whoever lived this long did not die of its start."""
QUIET_HEARTBEATS = 1.5
AFTER_GRACE = 2.0
"""Children end themselves when their grace period is over; this is for what they have to write then."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Between two tries to leave a session while the store does not answer."""
LEAVE_FIRST = 1.0
"""How long a restart waits for that; it takes milliseconds, unless the store is not there."""
PATIENCE = 3.0
"""How long one call to the store may take."""
LAST_TRIES = 5.0
"""How long a supervisor that stops goes on trying; after that the rescuer finds the session's lease ended."""


class Supervisor:
    """Runs `processes` copies of a command, each told by its environment where to write its marks."""

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
        """The processes that run now."""
        return list(self._children)

    async def run(self) -> None:
        """Keep the processes running until SIGTERM or SIGINT, or, with `until_done`, until each has exited with 0."""
        try:
            with suppress(StoreError):
                # Opened now, so that no time is lost when the first one dies.
                await self._connection.store()
            with self._signals():
                async with asyncio.TaskGroup() as watch:
                    renewing = watch.create_task(self._renew_for_the_busy())
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
        """Pass a signal on to all children, now and each time again; those that outlive their grace are killed."""
        for child in self._children:
            child.process.signal(number)
        if not self._stopping.is_set():
            self._stopping.set()
            loop = asyncio.get_running_loop()
            self._killing = loop.call_later(self._grace + AFTER_GRACE, self._kill_the_rest)

    def _kill_the_rest(self) -> None:
        for child in self._children:
            logger.warning("process %d did not stop within %g s and is killed", child.process.pid, self._grace)
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

    # -- one place, and the processes that fill it in turn -----------------------------------------------------------

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
            logger.info("number %d is started again %s", number, f"in {delay:g} s" if delay else "at once")
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _run_one(self, group: asyncio.TaskGroup, number: int) -> int | None:
        """Start a process and see it end; None when the system does not let it start."""
        try:
            child = Child(self._command, number)
        except OSError as exc:
            logger.error("number %d cannot be started: %s", number, exc)
            return None
        self._children.add(child)
        logger.info("process %d started as number %d", child.process.pid, number)
        code = await child.process.wait()
        self._children.discard(child)
        leaving = group.create_task(self._leave_for(child))
        if code != 0:
            # The programs that its bodies have started must not go on beside those of the next run.
            child.process.kill()
        level = logging.INFO if code == 0 or self._stopping.is_set() else logging.ERROR
        logger.log(level, "process %d, number %d, %s", child.process.pid, number, in_words(code))
        # A successor with the same named index would take the session over, and all it held would count as begun.
        await asyncio.wait([leaving], timeout=LEAVE_FIRST)
        return code

    async def _leave_for(self, child: Child) -> None:
        """End the session of a child that is gone, however long the store takes to answer."""
        left = child.marks.read()
        child.close()
        if left.session is None:
            return
        pause, stopping_since = FIRST_PAUSE, None
        while (problem := await self._leave(left.session, left.begun, child.given_up)) is not None:
            if pause == FIRST_PAUSE:
                logger.warning("session %s cannot be left yet: %s", left.session, problem)
            if self._stopping.is_set():
                stopping_since = stopping_since or time.monotonic()
                if time.monotonic() - stopping_since > LAST_TRIES:
                    logger.error("session %s was not left; its jobs run again when its lease ends", left.session)
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _leave(self, session: str, begun: Sequence[Held], given_up: bool) -> StoreError | None:
        try:
            async with asyncio.timeout(PATIENCE):
                store = await self._connection.store()
                if given_up and begun:
                    # What was killed because it had to stop is not to blame for it, but it had begun.
                    await store.finish(session, [hand_back(held) for held in begun])
                await store.leave(session, begun=() if given_up else begun)
        except NotFound:
            # It died before it was registered.
            return None
        except TimeoutError:
            return StoreUnavailable(f"the store did not answer within {PATIENCE:g} s")
        except StoreError as exc:
            return exc
        return None

    # -- leases of those who are busy --------------------------------------------------------------------------------

    async def _renew_for_the_busy(self) -> None:
        patience = QUIET_HEARTBEATS * self._intervals.heartbeat
        while True:
            await asyncio.sleep(self._intervals.heartbeat / 4)
            for child, session in [(child, child.quiet_session(patience)) for child in self._children]:
                if session is not None:
                    await self._renew(child, session)

    async def _renew(self, child: Child, session: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                store = await self._connection.store()
                # Names no job and no claim, so nothing is taken back: what it holds is for the child to say.
                await store.renew(session, [], claim=0)
        except (StoreError, TimeoutError):
            # Nobody reaches the store just now, which others say loudly enough; the next look tries again.
            return
        except FairlaneError as exc:
            logger.warning("process %d did not renew its lease in time: %s", child.process.pid, exc)
        else:
            logger.warning("process %d is too busy to renew its lease; it was renewed for it", child.process.pid)
        child.renewed_at = time.monotonic()


class Child:
    """A worker process, its marks, and the tether that ends with its supervisor."""

    def __init__(self, command: Sequence[str], number: int) -> None:
        self.marks = CrashState.make()
        theirs, self._tether = os.pipe()
        told = {MARKS_FD: str(self.marks.fd), TETHER_FD: str(theirs), PROCESS_NUMBER: str(number)}
        try:
            self.process = Process(command, fds=[self.marks.fd, theirs], environ=os.environ | told)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(theirs)
        self.renewed_at = 0.0
        """When its lease was last renewed for it."""
        self.given_up = False
        """It was killed because it did not stop."""

    def quiet_session(self, seconds: float) -> str | None:
        """Its session, if nobody has renewed that for so many seconds although the process runs."""
        marks = self.marks.read()
        if marks.last_beat is None or time.monotonic() - max(marks.last_beat, self.renewed_at) < seconds:
            return None
        return None if self.process.code is not None or is_halted(self.process.pid) else marks.session

    def close(self) -> None:
        """Let go of what is shared with it. One that still runs learns that it is alone."""
        self.marks.close()
        os.close(self._tether)


def restart_delay(deaths: int) -> float:
    """How long to wait before a process is started again that died `deaths` times in a row before, each time young."""
    return 0.0 if deaths == 0 else min(FIRST_DELAY * 2 ** min(deaths - 1, 10), LONGEST_DELAY)


def is_halted(pid: int) -> bool:
    """Whether a process is stopped, traced or dead: it lives, if at all, without running."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        # Gone; or a system that does not tell, where whoever lives is taken to run.
        return Path("/proc/self/stat").exists()
    except OSError:
        return True
    # The name of the program stands in parentheses and may contain anything.
    return stat.rpartition(")")[2].split()[0] in "TtZXx"
