"""Worker processes and the user's code in them: what child processes import, and threads that jobs leave running."""

import time
from typing import Any

import pytest

from tests.cli.project import Project, eventually

QUIET = ("--log-level", "warning")


def _ended(project: Project, id: str) -> Any:
    """The job, once it is final."""
    eventually(lambda: project.read("job", id)["state"] in ("completed", "failed"))
    return project.read("job", id)


# -- child processes know what -A names -----------------------------------------------------------------------------

SITE = """
import os
import django
from django.conf import settings

with open("imports", "a") as file:
    file.write(f"{os.getpid()}\\n")
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes"], USE_TZ=True)
django.setup()

from things.tasks import app
"""
TASKS = """
import os
from pathlib import Path
from django.contrib.contenttypes.models import ContentType  # refused before django.setup()
from fairlane import Fairlane

app = Fairlane()

@app.task(isolate=True, retries=0)
def apart() -> str:
    return f"{ContentType.__name__} {os.getpid()}"

@app.task(retries=1)
async def crash_once() -> str:
    if not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(7)
    return f"{ContentType.__name__} {os.getpid()}"
"""


@pytest.mark.parametrize("place", ["site_setup", "site_setup:app", "site_setup.py", "./site_setup.py:app"])
def test_an_isolated_job_finds_what_the_named_module_has_set_up(project: Project, place: str) -> None:
    project.write("things/__init__.py", "")
    project.write("things/tasks.py", TASKS)
    project.write("site_setup.py", SITE)
    worker = project.start("worker", "-A", place, *QUIET)
    id = project.read("enqueue", "things.tasks.apart")["id"]
    job = _ended(project, id)
    assert (job["state"], job["error"]) == ("completed", None)
    name, _, pid = job["result"].partition(" ")
    assert name == "ContentType"
    assert (project.path / "imports").read_text().split() == [str(worker.pid), pid]
    project.stop(worker)


def test_a_suspect_finds_it_too(project: Project) -> None:
    project.write("things/__init__.py", "")
    project.write("things/tasks.py", TASKS)
    project.write("site_setup.py", SITE)
    worker = project.start("worker", "-A", "site_setup", "--processes", "1", *QUIET)
    id = project.read("enqueue", "things.tasks.crash_once")["id"]
    job = _ended(project, id)
    assert (job["state"], job["attempt"]) == ("completed", 2)
    assert job["result"].startswith("ContentType ")
    project.stop(worker)


# -- what jobs leave running ----------------------------------------------------------------------------------------

LITTER = """
import asyncio, threading, time
from concurrent.futures import ThreadPoolExecutor
from fairlane import Fairlane

app = Fairlane()
kept = []

@app.task
async def thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="left-by-a-body").start()

@app.task
def pool() -> None:
    kept.append(ThreadPoolExecutor(1, thread_name_prefix="left-by-a-body"))
    kept[0].submit(time.sleep, 60)

@app.task
async def to_thread() -> None:
    kept.append(asyncio.create_task(asyncio.to_thread(time.sleep, 60)))
    await asyncio.sleep(0.1)

@app.task
async def stubborn() -> None:
    async def run():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    kept.append(asyncio.create_task(run()))

@app.task
async def idle_pool() -> None:
    await asyncio.to_thread(time.sleep, 0)
"""


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("thread", "threads still run: left-by-a-body"),
        ("pool", "threads still run: left-by-a-body_0"),
        ("to_thread", "threads still run: "),
        ("stubborn", "exiting although"),
        ("idle_pool", None),
    ],
)
@pytest.mark.parametrize("processes", [(), ("--processes", "1")], ids=["alone", "supervised"])
def test_what_jobs_leave_running_does_not_keep_a_worker_from_exiting(
    project: Project, task: str, words: str | None, processes: tuple[str, ...]
) -> None:
    project.write("litter.py", LITTER)
    worker = project.start("worker", "-A", "litter", "--grace", "1", *processes)
    id = project.read("enqueue", f"litter.{task}")["id"]
    assert _ended(project, id)["state"] == "completed"
    began = time.monotonic()
    output = project.stop(worker)
    assert time.monotonic() - began < 10
    assert worker.returncode == 0
    assert "killed" not in output
    assert ("the grace period is over" in output) is (words is not None)
    assert words is None or words in output


def test_a_burst_ends_too(project: Project) -> None:
    project.write("litter.py", LITTER)
    project.read("enqueue", "litter.thread")
    worker = project.start("worker", "-A", "litter", "--grace", "1", "--burst")
    assert worker.wait(20) == 0
