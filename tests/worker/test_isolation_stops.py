"""Ending jobs in child processes, and the children themselves: by request, by force, orphaned, worn out."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import FairlaneError
from fairlane.task import Task
from fairlane.worker import body
from fairlane.worker.isolation import Crashed, Isolation

from . import isolated_tasks
from .apart import Runner, claimed, gone, number_in, running, until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def runner() -> AsyncIterator[Runner]:
    isolation = Isolation(most=2, kill_after=1.0)
    yield Runner(isolation)
    await isolation.close()


# -- stopping a body -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [isolated_tasks.wait_and_tidy, isolated_tasks.wait_and_tidy_later])
async def test_a_cancelled_body_runs_its_finally_blocks_and_its_child_is_gone(
    runner: Runner, tmp_path: Path, task: Task[..., Any]
) -> None:
    begun, tidied = tmp_path / "begun", tmp_path / "tidied"
    run = asyncio.create_task(runner.ending(task, str(begun), str(tidied)))
    pid = await number_in(begun)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert tidied.exists()
    assert not running(pid)


async def test_a_body_that_computes_is_stopped(runner: Runner, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run = asyncio.create_task(runner.ending(isolated_tasks.compute, str(begun)))
    pid = await number_in(begun)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not running(pid)


async def test_a_body_that_refuses_to_stop_is_killed(runner: Runner, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run = asyncio.create_task(runner.ending(isolated_tasks.will_not_stop, str(begun)))
    pid = await number_in(begun)
    run.cancel()
    await number_in(tmp_path / "begun.refused")
    # A second request neither shortens the wait nor returns while the body runs.
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not running(pid)


async def test_a_body_that_returns_although_it_was_stopped_has_an_ending(runner: Runner, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run = asyncio.create_task(runner.ending(isolated_tasks.returns_all_the_same, str(begun)))
    await number_in(begun)
    run.cancel()
    assert await run == body.Returned(b'"half"')


async def test_a_stopped_body_takes_the_programs_it_started_with_it(runner: Runner, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run = asyncio.create_task(runner.ending(isolated_tasks.start_a_program, str(begun)))
    program = await number_in(begun)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await gone(program)


async def test_a_body_that_is_stopped_before_its_child_is_up_does_not_run(runner: Runner, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run = asyncio.create_task(runner.ending(isolated_tasks.will_not_stop, str(begun)))
    await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    if begun.exists():
        assert not running(await number_in(begun))


async def test_a_stop_works_although_a_body_before_replaced_the_signal_handler(runner: Runner, tmp_path: Path) -> None:
    await runner.result(isolated_tasks.ignores_signals, str(tmp_path / "ignored"))
    begun, tidied = tmp_path / "begun", tmp_path / "tidied"
    run = asyncio.create_task(runner.ending(isolated_tasks.wait_and_tidy, str(begun), str(tidied)))
    assert await number_in(begun) == await number_in(tmp_path / "ignored")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert tidied.exists()


async def test_a_signal_to_all_processes_of_the_service_leaves_the_body_its_grace(
    runner: Runner, tmp_path: Path
) -> None:
    path = tmp_path / "go on"
    pid = await runner.result(isolated_tasks.pid)
    run = asyncio.create_task(runner.ending(isolated_tasks.report_and_wait, str(path)))
    await until(lambda: bool(runner.reports))
    os.kill(pid, signal.SIGTERM)
    path.touch()
    assert await run == body.Returned(b"null")


async def test_what_a_body_forks_is_ended_by_a_signal(runner: Runner) -> None:
    assert await asyncio.wait_for(runner.result(isolated_tasks.end_a_fork), 30) == -signal.SIGTERM


async def test_a_timeout_around_a_body_ends_it(runner: Runner, tmp_path: Path) -> None:
    begun, tidied = tmp_path / "begun", tmp_path / "tidied"
    await runner.result(isolated_tasks.add, 1, 1)
    limits: list[asyncio.Timeout] = []

    async def limited() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await runner.ending(isolated_tasks.wait_and_tidy, str(begun), str(tidied))

    run = asyncio.create_task(limited())
    await number_in(begun)
    limits[0].reschedule(0)
    with pytest.raises(TimeoutError):
        await run
    assert tidied.exists()


async def test_a_report_that_raises_ends_the_child(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the report is refused")

    isolation = Isolation(most=1)
    with pytest.raises(RuntimeError, match="the report is refused"):
        await isolation.run(isolated_tasks.report_and_wait, claimed(str(tmp_path / "never")), report=refuse)
    assert await Runner(isolation).result(isolated_tasks.add, 1, 1) == 2
    await isolation.close()


# -- the life of a child ---------------------------------------------------------------------------------------------


async def test_a_child_that_dies_while_idle_is_replaced(runner: Runner) -> None:
    pid = await runner.result(isolated_tasks.pid)
    os.kill(pid, signal.SIGKILL)
    # Whether or not its death is noticed before the next body is sent, that body runs exactly once.
    assert await runner.result(isolated_tasks.pid) != pid
    pid = await runner.result(isolated_tasks.pid)
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
    assert await runner.result(isolated_tasks.pid) != pid


async def test_a_child_is_recycled_after_so_many_jobs() -> None:
    isolation = Isolation(most=1, jobs_per_child=2)
    runner = Runner(isolation)
    pids = [await runner.result(isolated_tasks.pid) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    await gone(pids[0])
    await isolation.close()


async def test_an_idle_child_ends_after_a_while() -> None:
    isolation = Isolation(most=1, idle_seconds=0.1)
    pid = await Runner(isolation).result(isolated_tasks.pid)
    await gone(pid)
    await isolation.close()


async def test_a_thread_that_a_body_left_behind_does_not_keep_a_child() -> None:
    isolation = Isolation(most=1, jobs_per_child=1, kill_after=0.2)
    pid = await Runner(isolation).result(isolated_tasks.leave_a_thread)
    await gone(pid)
    await isolation.close()


async def test_no_more_jobs_run_at_once_than_allowed(tmp_path: Path) -> None:
    isolation = Isolation(most=1)
    runner = Runner(isolation)
    path = tmp_path / "go on"
    first = asyncio.create_task(runner.ending(isolated_tasks.report_and_wait, str(path)))
    await until(lambda: bool(runner.reports))
    second = asyncio.create_task(runner.ending(isolated_tasks.report_and_wait, str(path), id="job-2"))
    done, _ = await asyncio.wait([first, second], timeout=0.5)
    assert not done
    assert {held.id for held, _ in runner.reports} == {"job-1"}
    path.touch()
    assert await first == await second == body.Returned(b"null")
    await isolation.close()


async def test_close_ends_idle_and_busy_children(tmp_path: Path) -> None:
    isolation = Isolation(most=2, kill_after=60.0)
    runner = Runner(isolation)
    tidying, tidied = tmp_path / "tidying", tmp_path / "tidied"
    polite = asyncio.create_task(runner.ending(isolated_tasks.wait_and_tidy, str(tidying), str(tidied)))
    pids = [await number_in(tidying), await runner.result(isolated_tasks.pid)]
    await isolation.close()
    assert not any(running(pid) for pid in pids)
    assert tidied.exists()
    assert await polite == Crashed("the child process exited with code 143")
    with pytest.raises(FairlaneError, match="closed"):
        await runner.ending(isolated_tasks.add, 1, 1)


async def test_close_kills_a_child_that_refuses_to_stop(tmp_path: Path) -> None:
    isolation = Isolation(most=2, kill_after=0.5)
    runner = Runner(isolation)
    begun = tmp_path / "begun"
    busy = asyncio.create_task(runner.ending(isolated_tasks.will_not_stop, str(begun)))
    pids = [await number_in(begun), await runner.result(isolated_tasks.pid)]
    await isolation.close()
    assert not any(running(pid) for pid in pids)
    assert await busy == Crashed("the child process was ended by SIGKILL")


ORPHANED = """
import asyncio, sys
from tests.worker import isolated_tasks
from tests.worker.apart import Runner
from fairlane.worker.isolation import Isolation

async def main():
    runner = Runner(Isolation(most=2))
    await asyncio.gather(
        runner.ending(isolated_tasks.compute, sys.argv[1]),
        runner.ending(isolated_tasks.start_a_program, sys.argv[2]),
    )

asyncio.run(main())
"""


async def test_children_whose_worker_dies_end_at_once_with_all_they_started(tmp_path: Path) -> None:
    computing, program = tmp_path / "computing", tmp_path / "program"
    worker = subprocess.Popen([sys.executable, "-c", ORPHANED, computing, program], cwd=ROOT)  # noqa: ASYNC220 - one start
    pids = [await number_in(computing), await number_in(program)]
    worker.kill()
    worker.wait()
    began = time.monotonic()
    for pid in pids:
        await gone(pid)
    assert time.monotonic() - began < 20


async def test_an_interpreter_that_does_not_start_is_a_crash_and_not_a_hang(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert await runner.ending(isolated_tasks.add, 1, 1) == Crashed(
        "the child process exited with code 1 before the job began", begun=False
    )


@pytest.mark.parametrize("error", [BlockingIOError("no processes left"), RuntimeError("can't start new thread")])
async def test_a_child_that_the_system_cannot_start_is_a_job_that_has_not_begun(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as refusing:
        refusing.setattr(subprocess, "Popen", refuse)
        ending = await runner.ending(isolated_tasks.add, 1, 1)
    assert ending == Crashed(f"no child process could be started ({error})", begun=False)
    assert await runner.result(isolated_tasks.add, 1, 1) == 2


async def test_a_hundred_jobs_over_two_children_each_end_once(runner: Runner) -> None:
    sums = await asyncio.gather(*(runner.result(isolated_tasks.add, n, n) for n in range(100)))
    assert sums == [2 * n for n in range(100)]
