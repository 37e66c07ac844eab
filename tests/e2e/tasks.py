"""The application under test. Every body writes into the ledger when it begins and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from fairlane import Fairlane, current_job
from fairlane.model.retry import Backoff

from . import ledger

QUICKLY = Backoff(base=0.05, factor=1.0, most=0.05)
LOOK = 0.01
"""Seconds between two looks for a file."""

app = Fairlane()


def declare(application: Fairlane) -> None:
    """The queues of the application; a client that only sends declares the same."""
    application.queue("default")
    application.queue("models", lanes=["flux", "sdxl"]).lane("*", limit=1)


declare(app)


def note(event: str) -> None:
    """Write one event of the running job into the ledger."""
    job = current_job()
    entry = ledger.Entry(
        job=job.id,
        task=job.task,
        event=event,
        attempt=job.attempt,
        fence=job.fence,
        pid=os.getpid(),
        worker=os.environ["E2E_PROCESS"],
        at=ledger.now(),
        priority=job.priority.label,
        lane=job.lane,
        sticky=job.sticky,
    )
    ledger.append(Path(os.environ["LEDGER"]), entry)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Write the begin and the end of a body into the ledger."""
    note(ledger.BEGIN)
    try:
        yield
    except asyncio.CancelledError:
        note("cancelled")
        raise
    except BaseException:
        note("raised")
        raise
    else:
        note(ledger.END)


@app.task
async def noop() -> None:
    """Do nothing."""
    with noted():
        pass


@app.task(backoff=QUICKLY)
async def sleep(seconds: float) -> float:
    """Wait without holding anything."""
    with noted():
        await asyncio.sleep(seconds)
    return seconds


@app.task(backoff=QUICKLY)
async def plan_step(plan: str, seconds: float = 0.0) -> None:
    """One step of a plan."""
    with noted():
        await asyncio.sleep(seconds)


@app.task
async def tidy(plan: str) -> None:
    """The clean-up of a plan."""
    with noted():
        await asyncio.sleep(0.05)


@app.task
async def purge(model: str) -> None:
    """A task that every worker runs once."""
    with noted():
        pass


@app.task(backoff=QUICKLY)
async def stumble(times: int, message: str) -> str:
    """Fail as many times as asked, then succeed."""
    with noted():
        if current_job().attempt <= times:
            raise RuntimeError(message)
    return "at last"


@app.task(backoff=QUICKLY)
async def end_process() -> None:
    """Kill the process, before any other code in it runs."""
    note(ledger.BEGIN)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(backoff=QUICKLY)
async def end_process_when(path: str) -> None:
    """Kill the process once a file exists; its second and later runs do so at once."""
    note(ledger.BEGIN)
    await appears(Path(path))
    os.kill(os.getpid(), signal.SIGKILL)


@app.task
async def compute(seconds: float) -> None:
    """Compute on the event loop without ever yielding."""
    with noted():
        _spin(seconds)


@app.task
def compute_in_thread(seconds: float) -> None:
    """Compute in a thread."""
    with noted():
        _spin(seconds)


@app.task
def hold_interpreter(seconds: int) -> None:
    """Call a C function that lets no other thread of the process run."""
    with noted():
        ctypes.PyDLL(None).sleep(seconds)


@app.task
def rest_in_thread(seconds: float) -> None:
    """Wait in a thread."""
    with noted():
        time.sleep(seconds)


@app.task(isolate=True)
def rest_apart(seconds: float) -> None:
    """Wait in a child process."""
    with noted():
        time.sleep(seconds)


@app.task(backoff=QUICKLY)
async def hold(path: str) -> None:
    """Run until a file exists."""
    with noted():
        await appears(Path(path))


async def appears(path: Path) -> None:
    """Wait for a file."""
    while not path.exists():  # noqa: ASYNC240 - a look at a file in memory
        await asyncio.sleep(LOOK)


def _spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1_000))
