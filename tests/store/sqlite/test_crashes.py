"""Processes killed with SIGKILL in the middle of any verb: acknowledged jobs stay, and no call is half done."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from fairlane.model.job import Job, JobState, Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.clock import ManualClock
from fairlane.store.sqlite.store import SqliteStore

from ..crash_mix import OWN_TASK, QUEUES

KILLS = 200
KILLS_WHILE_OPENING = 25
LONGEST_LIFE = 0.04
MOST_PER_GET = 500
PASSES = 100
LACKING = """
SELECT 'lane', seq, lane FROM fairlane_active_job WHERE lane IS NOT NULL AND lane NOT IN (SELECT id FROM fairlane_lane)
UNION ALL SELECT 'flow', seq, flow FROM fairlane_active_job
    WHERE flow IS NOT NULL AND session IS NULL AND flow NOT IN (SELECT id FROM fairlane_flow)
UNION ALL SELECT 'binding', seq, binding FROM fairlane_active_job
    WHERE binding IS NOT NULL AND binding NOT IN (SELECT seq FROM fairlane_binding)
UNION ALL SELECT 'session', seq, session FROM fairlane_active_job
    WHERE session IS NOT NULL AND session NOT IN (SELECT seq FROM fairlane_session)
UNION ALL SELECT 'identity', seq, state FROM fairlane_active_job WHERE seq NOT IN (SELECT seq FROM fairlane_job)
UNION ALL SELECT 'one state only', seq, state FROM fairlane_active_job WHERE seq IN (SELECT seq FROM fairlane_outcome)
"""
"""Live jobs that lack something they name: (what, job, number)."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder on the disk, where a write takes time; those of other tests are in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class Zygote:
    """The process that forks the processes to be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "fairlane.db"
        self.url = f"sqlite:///{self.path}"
        self.errors = folder / "errors"
        self.alive: dict[int, int] = {}
        self._numbers = 0
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.store.crash_worker", self.url, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )

    def _order(self, *words: object) -> list[str]:
        """Send a command. Returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        answer = self._process.stdout.readline().split()
        assert answer, f"the processes ended: {self.errors.read_text()}"
        assert answer[0] != "failed", f"process {answer[1]} failed: {self.errors.read_text()}"
        return answer

    def start(self, role: str, seed: int) -> int:
        """Start a process and return its number once it is at work."""
        self._numbers += 1
        _, number, pid = self._order(role, self._numbers, seed)
        self.alive[int(number)] = int(pid)
        return int(number)

    def kill(self, number: int) -> None:
        """Kill a process; it must have been alive until now."""
        pid = self.alive.pop(number)
        os.kill(pid, signal.SIGKILL)
        answer = self._order("reap", pid)
        assert answer == ["reaped", str(pid), str(-signal.SIGKILL)], self.errors.read_text()

    def close(self) -> None:
        """End it and all processes that it made."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Witness:
    """What the killed processes have logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.acknowledged: set[str] = set()
        self.fresh: set[str] = set()
        """Acknowledged jobs that were logged since the last call."""
        self.ended: dict[str, str] = {}
        self.never: set[str] = set()
        self._read: dict[int, int] = {}

    def read(self, number: int) -> set[str]:
        """Read what a process has added to its log. Returns the verbs in progress."""
        lines = (self.folder / f"log-{number}").read_text().splitlines(keepends=True)
        inside: dict[str, str] = {}
        for position, line in enumerate(lines):
            if not line.endswith("\n"):
                continue
            word, *rest = line.split()
            if word == "begin":
                inside[rest[0]] = rest[1]
            elif word == "end":
                inside.pop(rest[0], None)
            elif position >= self._read.get(number, 0):
                self._note(word, *rest)
        self._read[number] = len(lines)
        return set(inside.values())

    def _note(self, word: str, id: str, state: str = "") -> None:
        if word == "ack":
            if id not in self.acknowledged:
                self.fresh.add(id)
            self.acknowledged.add(id)
        elif word == "never":
            self.never.add(id)
        else:
            assert self.ended.setdefault(id, state) == state, f"{id} was said to be {self.ended[id]}, then {state}"


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    made = Zygote(tmp_path)
    yield made
    made.close()


@pytest.fixture
def rng() -> Random:
    """A source of chance; a failed test shows the seed, and FAIRLANE_CRASH_SEED sets it."""
    seed = int(os.environ.get("FAIRLANE_CRASH_SEED", secrets.randbelow(2**32)))
    sys.stdout.write(f"FAIRLANE_CRASH_SEED={seed}\n")
    return Random(seed)


async def look(url: str, path: Path, ids: set[str]) -> None:
    """A store that is opened now finds an intact file, correct counts, and every job."""
    store = await SqliteStore.open(url)
    try:
        reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert reader.execute(LACKING).fetchall() == []
        reader.close()
        missing = [id for id, job in (await jobs_of(store, ids)).items() if job is None]
        assert not missing, f"acknowledged and lost: {missing[:5]}"
        recount = await store.recount()
        assert not recount.differences, recount.differences
    finally:
        await store.close()


async def jobs_of(store: SqliteStore, ids: set[str]) -> dict[str, Job | None]:
    """Any number of jobs."""
    wanted = sorted(ids)
    found: dict[str, Job | None] = {}
    for start in range(0, len(wanted), MOST_PER_GET):
        part = wanted[start : start + MOST_PER_GET]
        found |= zip(part, await store.get(part), strict=True)
    return found


# Ten seconds on an otherwise idle disk; each kill waits for a few writes to it.
@pytest.mark.timeout(300)
def test_a_kill_in_the_middle_of_any_verb_loses_nothing_acknowledged(zygote: Zygote, rng: Random) -> None:
    own = sqlite3.connect(zygote.path)
    own.execute("CREATE TABLE notes (id TEXT PRIMARY KEY)")
    own.close()
    witness = Witness(zygote.folder)
    asyncio.run(look(zygote.url, zygote.path, set()))
    hits: dict[str, int] = {}
    outside = 0
    for _ in range(KILLS):
        # Mostly one process on the file; often a second one, which lives on.
        while len(zygote.alive) < rng.choice((1, 1, 2)):
            zygote.start("start", rng.randrange(2**32))
        # A real wait: the moment of the kill is what this is about.
        time.sleep(rng.uniform(0.0, LONGEST_LIFE))
        victim = rng.choice(sorted(zygote.alive))
        zygote.kill(victim)
        inside = witness.read(victim)
        outside += not inside
        for verb in inside:
            hits[verb] = hits.get(verb, 0) + 1
        # Not after each one, so that a file is also left by one killed process to the next.
        if rng.random() < 0.25:
            asyncio.run(look(zygote.url, zygote.path, witness.fresh))
            witness.fresh.clear()
    for survivor in list(zygote.alive):
        zygote.kill(survivor)
        witness.read(survivor)
    sys.stdout.write(
        f"{KILLS} kills, {outside} of them between two verbs; in: {dict(sorted(hits.items()))}; "
        f"{len(witness.acknowledged)} jobs acknowledged, {len(witness.ended)} ends told\n"
    )
    assert outside < KILLS / 4
    assert len(hits) > 8
    asyncio.run(look(zygote.url, zygote.path, witness.acknowledged))
    asyncio.run(settle(zygote, witness))


async def settle(zygote: Zygote, witness: Witness) -> None:
    """After the machine was started again, an hour later, everything still comes to its one end."""
    clock = ManualClock(time.time() + 3600)
    store = await SqliteStore.open(zygote.url, clock=clock)
    try:
        await drain(store, clock)
        jobs = await jobs_of(store, witness.acknowledged)
        assert {id: job.state for id, job in jobs.items() if job is not None and not job.state.final} == {}
        for id, job in jobs.items():
            assert job is not None, f"{id} is lost"
            assert witness.ended.get(id, job.state) == job.state, f"{id} was said to be {witness.ended[id]}"
            assert sum(a.state is not None and a.state.final for a in job.attempts) <= 1
            assert job.attempt <= job.retries + 1
        assert set((await jobs_of(store, witness.never)).values()) <= {None}
        assert not (await store.recount()).differences
        reader = sqlite3.connect(f"file:{zygote.path}?mode=ro", uri=True)
        [[live]] = reader.execute("SELECT count(*) FROM fairlane_active_job")
        twice = reader.execute("SELECT seq FROM fairlane_job EXCEPT SELECT seq FROM fairlane_outcome").fetchall()
        own = reader.execute("SELECT id FROM fairlane_job WHERE task = ?", (OWN_TASK,)).fetchall()
        notes = reader.execute("SELECT id FROM notes").fetchall()
        reader.close()
        assert live == 0
        assert twice == []
        assert sorted(own) == sorted(notes), "a job and the row written beside it are not one"
    finally:
        await store.close()


async def drain(store: SqliteStore, clock: ManualClock) -> None:
    """Take back what the dead held, and run everything to its end."""
    await store.configure([SettingsChange(queue=queue, declared=QueueSettings()) for queue in QUEUES])
    while (await store.rescue()).more:
        pass
    workers = []
    for index in (0, 1):
        new = NewSession(
            id=f"last-{index}", kind=SessionKind.WORKER, lease=1e6, index=index, queues=QUEUES, slots=Slots(total=1000)
        )
        workers.append(await store.register(new))
    asks = tuple(Ask(source, p, 1000) for p in Priority for source in (None, *QUEUES))
    for number in range(1, PASSES):
        while (await store.promote()).more or (await store.admit()).more:
            pass
        started = 0
        for worker in workers:
            claimed = await store.claim(worker.id, Claim(number=number, asks=asks, total=1000))
            finished = await store.finish(worker.id, [complete(job.held) for job in claimed])
            assert {verdict.state for verdict in finished.verdicts} <= {JobState.COMPLETED}
            started += len(claimed)
        await store.rescue()
        if not started:
            if (await store.recount()).jobs == 0:
                return
            clock.advance(60)
    left = (await store.recount()).jobs
    pytest.fail(f"{left} jobs do not come to an end")


def test_a_kill_while_a_file_is_made_leaves_one_that_opens(zygote: Zygote, rng: Random) -> None:
    for _ in range(KILLS_WHILE_OPENING):
        number = zygote.start("open", 0)
        time.sleep(rng.uniform(0.0, LONGEST_LIFE / 2))
        zygote.kill(number)
        asyncio.run(look(zygote.url, zygote.path, set()))
        for path in zygote.folder.glob("fairlane.db*"):
            path.unlink()
