"""Bodies that end as if the worker ended: limited in number, and jobs that run beside them are not charged."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from fairlane.model.job import JobState, Reason
from fairlane.model.states import MOST_HAND_BACKS

from . import isolated_tasks
from .yard import Yard

pytestmark = pytest.mark.anyio


def bodies_beside() -> list[asyncio.Task[object]]:
    """The asyncio tasks that run other jobs."""
    me = asyncio.current_task()
    return [t for t in asyncio.all_tasks() if t is not me and "Executor._run" in repr(t.get_coro())]


async def test_a_generator_exit_of_a_body_is_an_error_like_any_other(yard: Yard) -> None:
    async def leave() -> None:
        raise GeneratorExit

    def leave_thread() -> None:
        raise GeneratorExit

    async def leave_by_a_future() -> None:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, future.set_exception, GeneratorExit())
        await future

    names = [yard.task(task, retries=0).__name__ for task in (leave, leave_thread, leave_by_a_future)]
    async with yard.worker():
        jobs = [await yard.until(await yard.enqueue(name), patience=5) for name in names]
    assert [(job.state, job.reason, job.fence) for job in jobs] == [(JobState.FAILED, Reason.ERROR, 1)] * 3
    assert all("GeneratorExit" in (job.error or "") for job in jobs)


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_a_job_for_which_the_system_has_no_thread_or_process_is_not_charged(
    yard: Yard, timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with yard.worker() as worker:
        yard.task(isolated_tasks.add.function, name="add", retries=0, timeout=timeout)

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as refusing:
            refusing.setattr(subprocess, "Popen", refuse)
            refusing.setattr(worker._executor._threads, "_start", refuse)  # type: ignore[attr-defined]  # its own kind
            id = await yard.enqueue("add", 1, 2)
            job = await yard.until(id, JobState.SCHEDULED, JobState.FAILED)
        assert (job.state, job.attempt) == (JobState.SCHEDULED, 0)
        assert [each.outcome for each in job.attempts] == ["taken_back"]
        job = await yard.until(id)
    assert (job.state, job.attempt, job.result) == (JobState.COMPLETED, 1, b"3")


async def test_jobs_that_another_job_cancels_are_handed_back_uncharged(yard: Yard) -> None:
    begun, runs = asyncio.Event(), []

    async def innocent() -> str:
        runs.append(1)
        begun.set()
        if len(runs) == 1:
            await asyncio.sleep(60)
        return "done"

    async def cancel_others() -> None:
        for task in bodies_beside():
            task.cancel()

    yard.task(innocent, retries=0)
    yard.task(cancel_others, retries=0)
    async with yard.worker():
        id = await yard.enqueue("innocent")
        await begun.wait()
        await yard.until(await yard.enqueue("cancel_others"))
        job = await yard.until(id)
    assert (job.state, job.attempt, len(runs)) == (JobState.COMPLETED, 1, 2)
    assert [attempt.outcome for attempt in job.attempts] == ["handed_back", "completed"]


async def test_a_body_that_is_cancelled_before_its_first_step_is_not_lost(yard: Yard) -> None:
    async def cancel_others() -> None:
        for task in bodies_beside():
            task.cancel()

    async def innocent() -> None:
        pass

    yard.task(cancel_others, retries=0)
    yard.task(innocent, retries=0)
    ids = [await yard.enqueue(name) for name in ("cancel_others", "innocent")]
    async with yard.worker():
        jobs = [await yard.until(id) for id in ids]
    assert [job.state for job in jobs] == [JobState.COMPLETED] * 2
    # It never began, so it is not charged.
    assert [attempt.outcome for attempt in jobs[1].attempts] == ["taken_back", "completed"]


async def test_a_body_whose_runs_end_by_hand_backs_only_is_charged_in_the_end(yard: Yard) -> None:
    suspects: list[bool] = []

    async def cancel_itself() -> None:
        suspects.append((await yard.job("job")).suspect)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    yard.task(cancel_itself, retries=1)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("cancel_itself", id="job"))
    assert (job.state, job.reason, job.attempt) == (JobState.FAILED, Reason.CRASHED, 2)
    assert suspects == [False] * MOST_HAND_BACKS + [True] * 2


async def test_a_keyboard_interrupt_in_a_task_of_a_body_does_not_end_the_worker(yard: Yard) -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def body() -> str:
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            await asyncio.create_task(interrupt())
        return "survived"

    yard.task(body, retries=0)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("body"))
    assert (job.state, job.result) == (JobState.COMPLETED, b'"survived"')


async def test_what_never_began_when_its_worker_stops_does_not_count(yard: Yard) -> None:
    async def hold() -> None:
        await asyncio.sleep(60)

    yard.task(hold, retries=5)
    # Not importable, so that suspects run here one at a time: the second waits without having begun.
    ids = [await yard.enqueue("hold", id=f"job-{n}") for n in range(2)]
    for _ in range(MOST_HAND_BACKS):
        async with yard.worker():
            for id in ids:
                await yard.until(id, JobState.RUNNING)
            await asyncio.sleep(0.05)
    assert [(await yard.job(id)).suspect for id in ids] == [True, True]

    async with yard.worker(slots=2):
        for id in ids:
            await yard.until(id, JobState.RUNNING)
        await asyncio.sleep(0.05)

    jobs = [await yard.job(id) for id in ids]
    assert sorted(job.attempts[-1].outcome or "" for job in jobs) == ["handed_back", "taken_back"]
    assert sorted(job.attempt for job in jobs) == [0, 1]
