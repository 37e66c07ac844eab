"""A worker inside a user's program: when the program ends, running jobs are handed back, uncharged."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from fairlane import Fairlane
from fairlane.model.job import Job

PATIENCE = 30.0

PROGRAM = """
import asyncio, os, signal, sys, time
from fairlane import Fairlane

url, how, kind = sys.argv[1:]
app = Fairlane(url)

@app.task(retries=0)
async def coroutine() -> None:
    await begun()
    await asyncio.sleep(30)

@app.task(retries=0)
async def stubborn() -> None:
    await begun()
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError as exc:
        raise RuntimeError("the clean-up failed") from exc

@app.task(retries=0)
async def patient() -> None:
    await begun()
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        await asyncio.sleep(0.1)
        raise

@app.task(retries=0)
def plain() -> None:
    print("started", flush=True)
    time.sleep(30)

async def begun() -> None:
    print("started", flush=True)

async def main() -> None:
    handle = await globals()[kind].enqueue()
    print(handle.id, flush=True)
    serving = asyncio.create_task(app.worker(slots=2, grace=1).run())
    while (await handle.state()).value != "running":
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    if how == "raise":
        raise RuntimeError("the program's own trouble")
    if how == "sigint":
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(5)
    if how == "close":
        await app.close()

try:
    asyncio.run(main())
except BaseException as exc:
    print("ended by", type(exc).__name__, flush=True)
os._exit(0)
"""


async def end_of(url: str, tmp_path: Path, how: str, kind: str) -> tuple[Job, str]:
    """The job of a program that ended while its body ran."""
    script = tmp_path / "program.py"
    await asyncio.to_thread(script.write_text, PROGRAM)
    command = [sys.executable, str(script), url, how, kind]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert "started" in ended.stdout, ended.stderr
    app = Fairlane(url)
    try:
        return await app.client.job(ended.stdout.split()[0]), ended.stderr
    finally:
        await app.close()


@pytest.mark.parametrize("how", ["return", "raise", "sigint", "close"])
async def test_a_program_that_ends_hands_its_jobs_back(store_url: str, tmp_path: Path, how: str) -> None:
    job, log = await end_of(store_url, tmp_path, how, "coroutine")
    assert (job.state.value, job.attempt, job.error) == ("pending", 0, None), log
    assert [attempt.outcome for attempt in job.attempts] == ["handed_back"]


@pytest.mark.parametrize("kind", ["stubborn", "patient", "plain"])
async def test_whatever_a_body_does_when_its_program_ends(store_url: str, tmp_path: Path, kind: str) -> None:
    job, log = await end_of(store_url, tmp_path, "return", kind)
    assert (job.state.value, job.attempt, job.error) == ("pending", 0, None), log


async def test_a_body_that_cancels_its_own_task_is_charged_in_the_end(store_url: str) -> None:
    app = Fairlane(store_url)

    @app.task(retries=0)
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    handle = await cancels_itself.enqueue()
    await asyncio.wait_for(app.worker(slots=2, burst=True).run(), PATIENCE)
    job = await handle.job()
    # The worker cannot know what cancelled it, so it is handed back, but only a limited number of times.
    assert (job.state.value, job.fence) == ("failed", 4)
    assert "handed back too often" in (job.error or "")
    await app.close()
