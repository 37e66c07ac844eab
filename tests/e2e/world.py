"""One running system: a store, its processes, the ledger of its bodies, and a client that looks from outside."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from fairlane import Fairlane
from fairlane.client import Client
from fairlane.handle import Handle
from fairlane.model.intervals import Intervals
from fairlane.model.job import Job, JobState
from fairlane.model.reading import Counts
from fairlane.model.session import Session, SessionState
from fairlane.task import Call
from tests.sizes import sized

from . import figures, tasks
from .deployment import Deployment, MakeDeployment
from .fleet import QUICK, Fleet, Process, is_within
from .ledger import Ledger

T = TypeVar("T")
R = TypeVar("R")
PATIENCE = 45.0
"""Seconds to wait for what must happen; only a failing test waits this long."""
TIMES = sized(1, 5)
"""Repetitions of a scenario, which must pass each time; rare failures need many."""
FEW_AT_ONCE = 3
"""Repetitions that run at once on each of several stages."""


class World:
    """What a scenario works with: a deployment, its processes, a client and the ledger."""

    def __init__(self, directory: Path, deployment: Deployment, intervals: Intervals, app: Fairlane) -> None:
        self.directory = directory
        self.deployment = deployment
        self.intervals = intervals
        self.app = app
        self.ledger = Ledger(directory / "ledger.jsonl")
        self.fleet = Fleet(directory, deployment.url, self.ledger.path, intervals)

    @property
    def client(self) -> Client:
        """The client of the store."""
        return self.app.client

    # -- sending ---------------------------------------------------------------------------------------------------

    async def send(self, call: Call[R]) -> Handle[R]:
        """Store one job."""
        return await self.client.enqueue(call)

    def file(self, name: str) -> Path:
        """A file that bodies can wait for."""
        return self.directory / name

    # -- waiting ---------------------------------------------------------------------------------------------------

    async def until(self, look: Callable[[], Awaitable[T]], what: str, *, patience: float = PATIENCE) -> T:
        """The first true answer of `look`."""
        end = time.monotonic() + patience
        while not (answer := await look()):
            assert time.monotonic() < end, f"waited {patience} s in vain until {what}"
            await asyncio.sleep(0.02)
        return answer

    async def ready(self, *processes: Process, sessions: int = 1) -> None:
        """Wait until the store knows the sessions of these processes."""
        waiting = list(processes)

        async def known() -> bool:
            for process in waiting:
                assert process.ended is None, f"{process.name} ended with {process.ended} instead of starting"
            live = [s for s in await self.client.sessions() if s.state is SessionState.LIVE]
            waiting[:] = [p for p in waiting if sum(is_within(s.pid, p) for s in live) < sessions]
            return not waiting

        await self.until(known, "the processes are known to the store")

    async def gone(self, *processes: Process) -> list[int]:
        """Wait until processes have ended. Returns their exit codes."""

        async def ended() -> bool:
            return all(process.ended is not None for process in processes)

        await self.until(ended, "the processes have ended")
        return [process.ended or 0 for process in processes]

    async def workers(self, *names: str, options: Iterable[str] = ()) -> list[Process]:
        """Start one worker for each name, index by index, and wait until all are ready."""
        started = [self.fleet.worker("--index", str(index), *options, name=name) for index, name in enumerate(names)]
        await self.ready(*started)
        return started

    async def began(self, *jobs: str, times: int = 1) -> None:
        """Wait until the bodies of jobs have begun this many times."""

        async def begun() -> bool:
            starts = self.ledger.starts()
            return all(starts[job] >= times for job in jobs)

        await self.until(begun, f"{len(jobs)} bodies have begun {times} times")

    async def final(self, *ids: str, patience: float = PATIENCE) -> list[Job]:
        """Wait until jobs are final, and read them."""
        left = list(ids)

        async def ended() -> bool:
            jobs = [await self.client.job(id) for id in left[:20]]
            while jobs and jobs[0].state.final:
                jobs.pop(0)
                left.pop(0)
            return not left

        await self.until(ended, f"{len(ids)} jobs are final", patience=patience)
        return [await self.client.job(id) for id in ids]

    # -- reading ---------------------------------------------------------------------------------------------------

    async def states(self, ids: Iterable[str]) -> list[JobState]:
        """The states of jobs."""
        return [(await self.client.job(id)).state for id in ids]

    async def counts(self, queue: str = "default") -> Counts:
        """The counts of a queue, by state."""
        return next((q.counts for q in await self.client.queues() if q.name == queue), Counts())

    async def place(self, id: str) -> int | None:
        """The place of a job in its lane; None if it does not wait."""
        position = await self.client.handle(id).position()
        return None if position is None else position.place

    async def is_running(self, id: str) -> bool:
        """Whether a job is there, and runs."""
        return any(job.id == id for job in await self.jobs(state=JobState.RUNNING))

    async def session_of(self, process: Process) -> Session:
        """The newest session of a process."""
        return next(session for session in await self.client.sessions() if session.pid == process.pid)

    async def jobs(self, **where: Any) -> list[Job]:
        """All jobs that a filter finds."""
        found: list[Job] = []
        cursor: str | None = None
        while True:
            page = await self.client.find(limit=500, cursor=cursor, **where)
            found += page.jobs
            cursor = page.cursor
            if cursor is None:
                return found

    # -- watching --------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def sampled(self, look: Callable[[], Awaitable[T]], every: float = 0.1) -> AsyncIterator[list[T]]:
        """Collect answers of `look` while the block runs."""
        samples: list[T] = []

        async def sample() -> None:
            while True:
                samples.append(await look())
                await asyncio.sleep(every)

        sampler = asyncio.ensure_future(sample())
        try:
            yield samples
        finally:
            sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampler


@contextlib.asynccontextmanager
async def open_world(directory: Path, make: MakeDeployment, intervals: Intervals) -> AsyncIterator[World]:
    """A system without any process; whatever is started in it is ended with it."""
    directory.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs yet
    deployment = make(directory)
    app = Fairlane(deployment.url)
    tasks.declare(app)
    async with app:
        world = World(directory, deployment, intervals, app)
        try:
            await world.client.queues()
            yield world
        except BaseException:
            sys.stdout.write("\n".join([f"=== {directory.name}", *world.fleet.reports()]) + "\n")
            raise
        finally:
            world.fleet.close()


Scenario = Callable[[World], Awaitable[None]]


class Stage:
    """Runs scenarios on a kind of deployment, each in a world of its own."""

    def __init__(self, name: str, directory: Path, make: MakeDeployment) -> None:
        self._name = name
        self._directory = directory
        self._make = make

    def world(self, name: str = "world", intervals: Intervals = QUICK) -> contextlib.AbstractAsyncContextManager[World]:
        """One world."""
        return open_world(self._directory / name, self._make, intervals)

    async def play(
        self, scenario: Scenario, *, times: int = TIMES, at_once: int = 5, intervals: Intervals = QUICK
    ) -> None:
        """Run a scenario, several times in a full run; each time it must pass."""
        room = asyncio.Semaphore(at_once)

        async def once(number: int) -> None:
            async with room, self.world(f"{number}", intervals) as world:
                begun = time.monotonic()
                await scenario(world)
                figures.record(self._name, repetition=number, seconds=round(time.monotonic() - begun, 2))

        outcomes = await asyncio.gather(*(once(number) for number in range(times)), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures:
            raise ExceptionGroup(f"{self._name}: {len(failures)} of {times} repetitions failed", failures)


async def play_on_all(
    stages: dict[str, Stage], scenario: Scenario, *, times: int = TIMES, intervals: Intervals = QUICK
) -> None:
    """Play a scenario on every stage at once, in a full run several times; all of them must hold."""
    async with asyncio.TaskGroup() as at_once:
        for stage in stages.values():
            at_once.create_task(stage.play(scenario, times=times, at_once=FEW_AT_ONCE, intervals=intervals))
