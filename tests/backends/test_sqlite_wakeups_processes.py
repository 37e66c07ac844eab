"""Wake-ups by datagram sockets between processes: latency, deaths, forks, idleness."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from fairlane.backends.sqlite.wakeups import DatagramWakeups, meeting_place

pytestmark = pytest.mark.anyio

ECHO = """
import asyncio, sys, time
from pathlib import Path
from fairlane.backends.sqlite.wakeups import DatagramWakeups

async def main():
    wakeups = DatagramWakeups(Path(sys.argv[1]))
    ear = wakeups.subscribe(["queue:*", "leader"])
    wakeups.publish(["session:ready"])
    while "leader" not in (heard := await ear.wait(30)):
        now = time.monotonic_ns()
        wakeups.publish(f"job:{topic[6:]}/{now}" for topic in heard)
    wakeups.close()

asyncio.run(main())
"""
"""Answers a topic queue:N by job:N/T, T the time of hearing it on the clock that all processes share."""

FORK = """
import asyncio, os, sys, threading, warnings
from pathlib import Path
from fairlane.backends.sqlite.wakeups import DatagramWakeups, meeting_place

async def main():
    database = Path(sys.argv[1])
    wakeups = DatagramWakeups(database)
    ear = wakeups.subscribe(["queue:*"])
    wakeups.publish(["queue:before"])
    assert await ear.wait(5) == {"queue:before"}
    held, forked = threading.Event(), threading.Event()

    def publish_slowly():
        with wakeups._lock:
            held.set()
            forked.wait(30)

    publisher = threading.Thread(target=publish_slowly)
    publisher.start()
    held.wait(30)
    # Newer Pythons warn of a fork beside threads, for the very reason that this is about.
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
    if not child:
        wakeups.publish(["queue:child"])
        ear.close()
        wakeups.close()
        os._exit(0)
    forked.set()
    publisher.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert await ear.wait(5) == {"queue:child"}
    wakeups.publish(["queue:after"])
    assert await ear.wait(5) == {"queue:after"}
    wakeups.close()
    assert not meeting_place(database).exists()

asyncio.run(main())
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def wakeups(database: Path) -> Iterator[DatagramWakeups]:
    opened = DatagramWakeups(database)
    yield opened
    opened.close()


@contextmanager
def running(program: str, database: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that runs `program`; killed at the end if it has not ended by itself."""
    process = subprocess.Popen([sys.executable, "-W", "error", "-c", program, str(database)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_processes_wake_each_other_within_milliseconds(wakeups: DatagramWakeups, database: Path) -> None:
    ear = wakeups.subscribe(["job:*", "session:ready"])
    spans = []
    with running(ECHO, database) as echo:
        assert await ear.wait(30) == {"session:ready"}
        for number in range(300):
            sent = time.monotonic_ns()
            wakeups.publish([f"queue:{number}"])
            [answer] = await ear.wait(5)
            echoed, _, heard = answer.removeprefix("job:").partition("/")
            assert int(echoed) == number
            spans.append((int(heard) - sent) / 1e6)
        wakeups.publish(["leader"])
        assert await asyncio.to_thread(echo.wait, 10) == 0
    spans.sort()
    sys.stdout.write(f"heard in another process after {median(spans):.3f} ms, p99 {spans[-4]:.3f} ms\n")
    assert median(spans) < 20


async def test_a_killed_process_leaves_a_name_that_the_next_message_removes(
    wakeups: DatagramWakeups, database: Path
) -> None:
    ear = wakeups.subscribe(["session:ready"])
    with running(ECHO, database) as echo:
        assert await ear.wait(30) == {"session:ready"}
        echo.send_signal(signal.SIGKILL)
        echo.wait()
    [left] = [path for path in meeting_place(database).iterdir() if path.name.startswith("lq-")]
    os.utime(left, (0, 0))
    wakeups.publish(["queue:a"])
    assert not left.exists()
    wakeups.publish(["session:ready"])
    assert await ear.wait(5) == {"session:ready"}


async def test_processes_with_different_temporary_directories_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / ("long" * 25) / "a.db"
    database.parent.mkdir()
    wakeups = DatagramWakeups(database)
    ear = wakeups.subscribe(["job:*", "session:ready"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(ECHO, database) as echo:
        assert await ear.wait(30) == {"session:ready"}
        wakeups.publish(["queue:7"])
        [answer] = await ear.wait(5)
        assert answer.startswith("job:7/")
        wakeups.publish(["leader"])
        assert await asyncio.to_thread(echo.wait, 10) == 0
    wakeups.close()


async def test_a_forked_child_may_publish_and_takes_nothing_from_its_parent(database: Path) -> None:
    with running(FORK, database) as parent:
        assert await asyncio.to_thread(parent.wait, 30) == 0


async def test_waiting_costs_no_processor_time(wakeups: DatagramWakeups) -> None:
    ear = wakeups.subscribe(["queue:a"])
    before = time.process_time()
    assert not await ear.wait(1.0)
    spent = time.process_time() - before
    sys.stdout.write(f"an idle second of waiting: {spent * 1e3:.2f} ms of processor time\n")
    assert spent < 0.05
