"""A supervisor in this process, its small workers, and short names for what a test checks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fairlane import open_store
from fairlane.model.ids import new_id
from fairlane.model.intervals import Intervals
from fairlane.model.job import Job, JobState, NewJob
from fairlane.runtime.connection import OpenStore
from fairlane.store.port import Store
from fairlane.supervisor.supervisor import Child, Supervisor

QUICK = Intervals(heartbeat=0.3, lease=3.0, trust_margin=0.5)
PATIENCE = 30.0


class Fleet:
    """What a test of the supervisor needs."""

    def __init__(self, store: Store, url: str, folder: Path) -> None:
        self.store = store
        self.url = url
        self.folder = folder

    def command(self, slots: int = 4) -> list[str]:
        """What starts a small worker."""
        known = [self.url, str(self.folder), str(slots), str(QUICK.heartbeat), str(QUICK.lease)]
        return [sys.executable, "-m", "tests.supervisor.small_worker", *known]

    @asynccontextmanager
    async def supervisor(
        self,
        *,
        command: Sequence[str] = (),
        processes: int = 1,
        slots: int = 4,
        grace: float = 5.0,
        store: OpenStore | None = None,
        until_done: bool = False,
    ) -> AsyncIterator[Supervised]:
        """A supervisor that runs inside the block."""

        async def open_own() -> Store:
            return await open_store(self.url)

        supervisor = Supervisor(
            command or self.command(slots),
            processes=processes,
            open_store=store or open_own,
            intervals=QUICK,
            grace=grace,
            until_done=until_done,
        )
        run = asyncio.create_task(supervisor.run())
        try:
            yield Supervised(self, supervisor, run)
        finally:
            for child in supervisor.children:
                child.process.kill()
            if not run.done():
                supervisor.stop()
            await asyncio.wait_for(run, PATIENCE)

    async def enqueue(self, *tasks: str) -> list[str]:
        """One job for each name."""
        answers = await self.store.enqueue([NewJob(id=new_id(), task=task) for task in tasks])
        return [answer.id for answer in answers]

    async def jobs(self, ids: Sequence[str]) -> list[Job]:
        """Jobs that must exist."""
        return [job for job in await self.store.get(ids) if job is not None]

    async def until_running(self, ids: Sequence[str], *, not_by: str = "") -> list[Job]:
        """The jobs, once all of them run, and none in the session `not_by`. Those that begin have begun: the store
        knows of a claim before the process that has it does."""

        async def all_run() -> bool:
            return all(j.state is JobState.RUNNING and j.session != not_by for j in await self.jobs(ids))

        await until(all_run)
        jobs = await self.jobs(ids)
        for job in jobs:
            if job.task == "begin":
                await self.until_file(f"begun-{job.id}-{job.fence}")
        return jobs

    async def remaining(self, session: str) -> float:
        """Seconds until the lease of a session ends."""
        [found] = [s for s in await self.store.sessions() if s.id == session]
        return found.remaining

    async def until_file(self, pattern: str, number: int = 1) -> list[Path]:
        """The files that the processes make, once there are so many."""

        async def there() -> bool:
            return len(list(self.folder.glob(pattern))) >= number

        await until(there)
        return list(self.folder.glob(pattern))


class Supervised:
    """A supervisor at work."""

    def __init__(self, fleet: Fleet, supervisor: Supervisor, run: asyncio.Task[None]) -> None:
        self.fleet = fleet
        self.supervisor = supervisor
        self.run = run

    async def child_of(self, session: str | None) -> Child:
        """The process behind a session."""
        [child] = [c for c in self.supervisor.children if c.crash_state.read().session == session]
        return child

    async def until_registered(self, number: int = 1) -> list[str]:
        """The sessions, once so many processes have renewed their leases."""

        async def registered() -> bool:
            return sum(c.crash_state.read().last_beat is not None for c in self.supervisor.children) == number

        await until(registered)
        return [c.crash_state.read().session or "" for c in self.supervisor.children]


async def until(seen: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds, for conditions without a notification."""
    async with asyncio.timeout(PATIENCE):
        while not await seen():
            await asyncio.sleep(0.02)
