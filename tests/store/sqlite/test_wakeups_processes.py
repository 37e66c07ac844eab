"""Wake-ups by datagram sockets between processes: latency, deaths, forks, idleness."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from fairlane.store.sqlite.wakeups import DatagramWakeups, meeting_place

from ..wakeup_process import SQLITE, echoed, running

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def wakeups(database: Path) -> Iterator[DatagramWakeups]:
    opened = DatagramWakeups(database)
    yield opened
    opened.close()


async def test_processes_wake_each_other_within_milliseconds(wakeups: DatagramWakeups, database: Path) -> None:
    spans = await echoed(wakeups, 300, SQLITE, str(database))
    sys.stdout.write(f"received in another process after {median(spans):.3f} ms, p99 {spans[-4]:.3f} ms\n")
    assert median(spans) < 20


async def test_a_killed_process_leaves_a_name_that_the_next_message_removes(
    wakeups: DatagramWakeups, database: Path
) -> None:
    subscription = wakeups.subscribe(["session:ready"])
    with running("echo", SQLITE, str(database)) as echo:
        assert await subscription.wait(30) == {"session:ready"}
        echo.send_signal(signal.SIGKILL)
        echo.wait()
    [left] = [path for path in meeting_place(database).iterdir() if path.name.startswith("lq-")]
    os.utime(left, (0, 0))
    wakeups.publish(["queue:a"])
    assert not left.exists()
    wakeups.publish(["session:ready"])
    assert await subscription.wait(30) == {"session:ready"}


async def test_processes_with_different_temporary_directories_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / ("long" * 25) / "a.db"
    database.parent.mkdir()
    wakeups = DatagramWakeups(database)
    subscription = wakeups.subscribe(["job:*", "session:ready"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running("echo", SQLITE, str(database)) as echo:
        assert await subscription.wait(30) == {"session:ready"}
        wakeups.publish(["queue:7"])
        [answer] = await subscription.wait(30)
        assert answer.startswith("job:7/")
        wakeups.publish(["leader"])
        assert await asyncio.to_thread(echo.wait, 10) == 0
    wakeups.close()


async def test_a_forked_child_may_publish_and_takes_nothing_from_its_parent(database: Path) -> None:
    with running("fork", SQLITE, str(database)) as parent:
        assert await asyncio.to_thread(parent.wait, 30) == 0
    assert not meeting_place(database).exists()


async def test_waiting_costs_no_processor_time(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    before = time.process_time()
    assert not await subscription.wait(1.0)
    spent = time.process_time() - before
    sys.stdout.write(f"an idle second of waiting: {spent * 1e3:.2f} ms of processor time\n")
    assert spent < 0.05
