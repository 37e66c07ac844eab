"""Workers are killed at random moments, with bodies in the middle of their transactions: each effect happens once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from fairlane import Fairlane, JobState, Settings
from tests.e2e.fleet import Process, end_families
from tests.servers.stores import TRANSACTIONAL, empty_stores
from tests.worker.yard import QUICK

from .conftest import eventually
from .ledger import ledger_in, working
from .transaction_tasks import app, effect, effect_apart

KILLS = 30
WORKERS = 3
SECONDS = 100.0


@pytest.fixture(params=TRANSACTIONAL)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store of each kind."""
    with empty_stores(request.param, tmp_path) as stores:
        yield stores.next()


class Workers:
    """Some worker processes, one of which is replaced whenever it is killed."""

    def __init__(self, url: str, output: Path) -> None:
        self._url = url
        self._output = output
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("FAIRLANE", "PYTHONDONTWRITE"))}
        # A worker that is wrongly declared dead does no harm here, and each kill waits for the end of a lease.
        hasty = replace(QUICK, lease=1.5)
        self._environment |= {f"FAIRLANE_{f.upper()}": str(getattr(hasty, f)) for f in hasty.__struct_fields__}
        self._all = [self._started() for _ in range(WORKERS)]
        self._gone: list[Process] = []

    def _started(self) -> Process:
        return Process("worker", ["tests.client.transaction_tasks", self._url], self._environment, self._output)

    def kill_one(self) -> bool:
        """Kill a worker that has started work, or a child process of one. Returns whether there was any."""
        everybody = [(pid, worker) for worker in self._all for pid in (worker.pid, *worker.family()) if _works(pid)]
        if not everybody:
            return False
        pid, worker = random.choice(everybody)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if pid == worker.pid:
            self._all.remove(worker)
            self._gone.append(worker)
            self._all.append(self._started())
        return True

    def close(self) -> None:
        """End all."""
        end_families([*self._all, *self._gone])


def _works(pid: int) -> bool:
    """Whether a process has lived for long enough to have started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in "ZX" and age > 0.3


async def test_a_body_in_a_child_process_writes_into_the_store_of_its_worker(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing but the worker knows where that is.
    monkeypatch.setattr(app, "settings", Settings(url=url, intervals=QUICK))
    monkeypatch.chdir(tmp_path)
    async with app:
        ledger = await ledger_in(url)
        handle = await effect_apart.enqueue(2)
        async with working(app):
            assert await handle.result(timeout=60) == 4
        assert await ledger.effects() == [(handle.id, 1), (handle.id, 2)]
        assert await handle.progress() == "written"
        assert [attempt.refused for attempt in (await handle.job()).attempts] == [0]
        await ledger.close()


async def test_every_effect_happens_once_however_workers_die(url: str, tmp_path: Path) -> None:
    mine = Fairlane(settings=Settings(url=url, intervals=QUICK))
    tasks = [effect] * 5 + [effect_apart]
    async with mine, asyncio.timeout(SECONDS):
        ledger = await ledger_in(url)
        calls = [random.choice(tasks).call(number) for number in range(30)]
        await mine.enqueue_many(calls)
        workers = Workers(url, tmp_path / "log")
        try:
            killed = 0
            while killed < KILLS:
                more = [random.choice(tasks).call(killed) for _ in range(8)]
                await mine.enqueue_many(more)
                calls += more
                # Give some bodies time to begin, and the process that was started last to start work.
                await asyncio.sleep(random.uniform(0.05, 0.3))
                while not workers.kill_one():
                    await asyncio.sleep(0.05)
                killed += 1

            async def all_are_final() -> bool:
                return all(job.state.final for job in (await mine.client.find(limit=500)).jobs)

            await eventually(all_are_final, SECONDS)
        finally:
            workers.close()
        written = Counter(await ledger.effects())
        jobs = {job.id: job for job in (await mine.client.find(limit=500)).jobs}
        assert {job.state for job in jobs.values()} == {JobState.COMPLETED}
        assert len(jobs) == len(calls)
        assert written == Counter({(id, part): 1 for id in jobs for part in (1, 2)})
        lost = sum(attempt.outcome != "completed" for job in jobs.values() for attempt in job.attempts)
        assert lost >= 3, "the kills met bodies"
        assert not (await mine.client.recount()).differences
        await ledger.close()
