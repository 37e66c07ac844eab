"""The lab in tests without an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import call

import pytest

from fairlane import Fairlane, FairlaneError, JobFailed, JobState, Settings, current_job, testing
from fairlane.testing import BlockingLab, Drained

PATIENCE = 45.0


@pytest.fixture
def app() -> Fairlane:
    """An application whose own store cannot be opened: whatever works, works in the lab."""
    return Fairlane(settings=Settings(url="sqlite:////nowhere/at/all.db"))


@pytest.fixture
def lab(app: Fairlane) -> Iterator[BlockingLab]:
    """A lab with one worker."""
    with testing.embedded_blocking(app) as lab:
        yield lab


def test_plain_functions_run_in_the_thread_of_the_test_and_coroutines_in_one_loop(
    app: Fairlane, lab: BlockingLab
) -> None:
    where: list[object] = []

    @app.task
    def plain(n: int) -> int:
        where.append(threading.current_thread())
        return n + current_job().attempt

    @app.task
    async def coroutine() -> None:
        where.append(asyncio.get_running_loop())

    job = plain.blocking.enqueue(1)
    coroutine.blocking.enqueue()
    assert lab.enqueued(plain) == [call(1)]
    assert lab.drain() == Drained(completed=2, runs=2)
    coroutine.blocking.enqueue()
    assert lab.drain() == Drained(completed=1, runs=1)
    assert job.result(timeout=PATIENCE) == 2
    assert where[0] is threading.current_thread()
    assert where[1] is where[2]
    assert [job.state for job in lab.jobs()] == [JobState.COMPLETED] * 3
    assert lab.jobs(plain, "failed") == []


def test_a_plain_body_enqueues_and_waits_for_others(app: Fairlane, lab: BlockingLab) -> None:
    @app.task
    def child(n: int) -> int:
        return n + 1

    @app.task
    async def async_child(n: int) -> int:
        return n + 2

    @app.task
    def parent() -> int:
        first, second = child.blocking.enqueue(10), async_child.blocking.enqueue(100)
        return first.result(timeout=PATIENCE) + second.result(timeout=PATIENCE)

    job = parent.blocking.enqueue()
    assert lab.drain(errors="raise") == Drained(completed=3, runs=3)
    assert job.result(timeout=PATIENCE) == 113


def test_a_retry_comes_when_the_clock_says_so(app: Fairlane, lab: BlockingLab) -> None:
    @app.task
    def flaky() -> str:
        if current_job().attempt == 1:
            raise ConnectionError("away")
        return "done"

    job = flaky.blocking.enqueue()
    assert lab.drain() == Drained(retried=1, runs=1)
    lab.clock.advance(60)
    assert lab.drain() == Drained(completed=1, runs=1)
    assert job.result(timeout=PATIENCE) == "done"


def test_errors_are_raised_as_the_body_raised_them(app: Fairlane, lab: BlockingLab) -> None:
    @app.task(retries=0)
    def broken() -> None:
        raise KeyError("the key")

    job = broken.blocking.enqueue()
    with pytest.raises(KeyError, match="the key") as caught:
        lab.drain(errors="raise")
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(JobFailed):
        job.result(timeout=PATIENCE)
    assert "caller.py" not in str(job.job().error)


def test_one_job_is_run_and_its_result_returned(app: Fairlane, lab: BlockingLab) -> None:
    @app.task
    def double(n: int) -> int:
        return 2 * n

    handles = [double.blocking.enqueue(n) for n in range(3)]
    assert lab.run(handles[1]) == 2
    assert [handle.state() for handle in handles] == [JobState.PENDING, JobState.COMPLETED, JobState.PENDING]


def test_ctrl_c_in_a_body_ends_the_drain_and_the_lab_goes_on(app: Fairlane, lab: BlockingLab) -> None:
    interrupted = False

    @app.task
    def body() -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    body.blocking.enqueue()
    with pytest.raises(KeyboardInterrupt):
        lab.drain()
    lab.clock.advance(600)
    assert lab.drain().completed == 1


async def test_a_blocking_lab_is_refused_inside_an_event_loop(app: Fairlane) -> None:
    async with testing.embedded(app) as lab:
        with pytest.raises(FairlaneError, match="event loop"):
            lab.blocking.drain()


def test_labs_follow_each_other_and_a_left_one_refuses(app: Fairlane) -> None:
    @app.task
    def work() -> None: ...

    before = set(threading.enumerate())
    for _ in range(3):
        with testing.embedded_blocking(app) as lab:
            work.blocking.enqueue()
            assert lab.drain() == Drained(completed=1, runs=1)
    with pytest.raises(FairlaneError, match="closed"):
        lab.jobs()
    # Threads for plain functions are kept for reuse; the labs themselves leave nothing behind.
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert set(left) <= {"fairlane-body"}
    assert len(left) <= 3


def test_an_application_that_never_opened_its_store_does_not_open_it_for_a_lab(tmp_path: Path) -> None:
    app = Fairlane(f"sqlite:///{tmp_path / 'own.db'}")
    app.queue("images", limit=1)
    with pytest.raises(ZeroDivisionError), testing.embedded_blocking(app):
        raise ZeroDivisionError
    app.queue("mails", limit=1)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_imports_neither_the_lab_nor_pytest() -> None:
    unwanted = ("pytest", "_pytest", "unittest", "fairlane.testing", "fairlane.integrations.pytest")
    code = f"import sys, fairlane; print([name for name in sys.modules if name.startswith({unwanted})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.strip() == "[]"
