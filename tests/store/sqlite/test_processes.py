"""Several processes on one file at the same time: no call fails because the file is busy, and no job runs twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlane.model.job import JobState
from fairlane.model.reading import Filter
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.store.sqlite.store import SqliteStore

from ..traffic import QUEUE

pytestmark = pytest.mark.anyio

SECONDS = 3.0
MOST_LOG_BYTES = 100_000_000
LONGEST_P99 = 1.0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder on the disk, where a write takes its time; those of other tests are in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def start(role: str, url: str, number: int) -> subprocess.Popen[str]:
    """A process that plays a role of `traffic`, ready to begin."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.traffic", role, url, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str]) -> None:
    """Give a process the line it waits for."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> Any:
    """What a process saw; an error that reached one of its callers has ended it."""
    written, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(written)


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100]


async def watch(store: SqliteStore, log: Path, seconds: float) -> int:
    """Read as a dashboard does while the others write; returns the greatest size of the write-ahead log."""
    largest = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await store.find(Filter(queue=QUEUE), limit=20)
        await store.queues()
        largest = max(largest, (await asyncio.to_thread(log.stat)).st_size)
        await asyncio.sleep(0.05)
    return largest


async def test_producers_and_workers_share_a_file_without_an_error(tmp_path: Path) -> None:
    path = tmp_path / "fairlane.db"
    url = f"sqlite:///{path}"
    store = await SqliteStore.open(url)
    lanes = (LaneRule(pattern="narrow", limit=1),)
    await store.configure([SettingsChange(queue=QUEUE, declared=QueueSettings(lanes=lanes))])
    producers = [start("produce", url, number) for number in range(2)]
    workers = [start("work", url, number) for number in range(2)]
    for process in producers + workers:
        tell(process)
    largest = await watch(store, Path(f"{path}-wal"), SECONDS)
    for process in producers:
        tell(process)
    sent = [await asyncio.to_thread(end, process) for process in producers]
    # Only now, so that what they find empty stays empty.
    for process in workers:
        tell(process)
    done = [await asyncio.to_thread(end, process) for process in workers]
    jobs = [id for seen in sent for id in seen["sent"]]
    runs = Counter(id for seen in done for id in seen["completed"])
    [reading] = await store.queues()
    recount = await store.recount()
    await store.close()
    sys.stdout.write(
        f"{len(jobs)} jobs in {SECONDS:g} s; enqueue p99 {max(p99(seen['seconds']) for seen in sent) * 1e3:.1f} ms, "
        f"finish and claim p99 {max(p99(seen['seconds']) for seen in done) * 1e3:.1f} ms, "
        f"log {largest / 1e6:.1f} MB\n"
    )
    assert len(jobs) > 100
    assert runs == Counter(jobs), "each job is completed once"
    assert min(len(seen["completed"]) for seen in done) > 0, "both workers got work"
    assert reading.counts.completed == len(jobs)
    assert sum(getattr(reading.counts, state) for state in JobState if state != JobState.COMPLETED) == 0
    assert recount.differences == ()
    assert largest < MOST_LOG_BYTES
    assert max(p99(seen["seconds"]) for seen in sent) < LONGEST_P99
