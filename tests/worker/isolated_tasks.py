"""Bodies for child processes: at the top of a module, where another process finds them."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairlane import errors
from fairlane.runtime.running_job import current_job
from fairlane.task import AsyncTask, PlainTask, Task


class NoSender:
    """Stands where a task expects its client; nothing here enqueues through a task."""


def task(function: Callable[..., Any]) -> Task[..., Any]:
    """What `@app.task` makes of a function."""
    kind = AsyncTask if asyncio.iscoroutinefunction(function) else PlainTask
    return kind(NoSender(), function, {"name": function.__name__})  # type: ignore[arg-type]  # it is run here, never enqueued


def with_a_layer(inner: Any) -> Any:
    """A decorator that stands above the one of the task."""

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return outer


def tell(path: str, number: int) -> None:
    """Write a number into a file."""
    Path(path).write_text(str(number))


@task
def add(a: int, b: int) -> int:
    return a + b


@task
async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0.01)
    return a + b


@task
def pid() -> int:
    return os.getpid()


@task
async def loop_id() -> int:
    return id(asyncio.get_running_loop())


@task
def surroundings() -> dict[str, Any]:
    return {
        "cwd": str(Path.cwd()),
        "path": sys.path,
        "pythonpath": os.environ.get("PYTHONPATH"),
        "stdin": sys.stdin.read(),
        "group": os.getpgrp() == os.getpid(),
    }


@task
def about_the_job() -> list[Any]:
    job = current_job()
    return [job.id, job.fence, job.attempt, job.lane, job.remaining is not None and 0 < job.remaining <= 100]


@task
def report(steps: int) -> None:
    for step in range(steps):
        current_job().progress({"step": step + 1})


@task
def report_and_wait(path: str) -> None:
    current_job().progress("here")
    while not Path(path).exists():
        time.sleep(0.01)


@task
def fail(text: str) -> None:
    raise ValueError(text)


@task
def snooze() -> None:
    raise errors.Snooze(5)


@task
def log_debug(words: str) -> None:
    logging.getLogger("isolated_tasks").debug(words)


@task
async def break_the_loop(how: str) -> None:
    loop = asyncio.get_running_loop()
    if how == "stop":
        loop.stop()
    else:
        loop.call_soon(sys.exit, 3)
    await asyncio.sleep(30)


@task
def leave(code: int) -> None:
    sys.exit(code)


@task
def vanish(code: int) -> None:
    os._exit(code)


@task
def crash() -> None:
    ctypes.string_at(0)


@task
def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@task
def vanish_with_a_child_left(path: str) -> None:
    """The process left behind holds the socket, too."""
    if os.fork() == 0:
        tell(path, os.getpid())
        time.sleep(60)
        os._exit(0)
    while not Path(path).exists():
        time.sleep(0.01)
    os._exit(7)


@task
def wait_and_tidy(begun: str, tidied: str) -> None:
    try:
        tell(begun, os.getpid())
        time.sleep(60)
    finally:
        tell(tidied, os.getpid())


@task
async def wait_and_tidy_later(begun: str, tidied: str) -> None:
    try:
        tell(begun, os.getpid())
        await asyncio.sleep(60)
    finally:
        tell(tidied, os.getpid())


@task
def compute(begun: str) -> None:
    tell(begun, os.getpid())
    while True:
        sum(range(1000))


@task
def will_not_stop(begun: str) -> None:
    """Ignores every request of Python to end."""
    tell(begun, os.getpid())
    while True:
        try:
            time.sleep(60)
        except BaseException:
            tell(f"{begun}.refused", os.getpid())


@task
def returns_all_the_same(begun: str) -> str:
    try:
        tell(begun, os.getpid())
        time.sleep(60)
    except BaseException:
        return "half"
    return "all"


@task
def start_a_program(begun: str) -> None:
    program = subprocess.Popen(["sleep", "60"])
    tell(begun, program.pid)
    program.wait()


@task
def ignores_signals(begun: str) -> None:
    """As a library does that installs its own handler."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(begun, os.getpid())


@task
def end_a_fork() -> int:
    """As a pool of processes does that is closed."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@task
def leave_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(60,)).start()
    return os.getpid()


@task
def odd_text() -> None:
    raise ValueError("\udcff is not text")


@with_a_layer
@task
def layered() -> str:
    return "layered"


def undecorated(a: int) -> int:
    return a + 1


registered_by_a_call = task(undecorated)


class Group:
    """A place for a task other than the top of the module."""

    @staticmethod
    def work() -> str:
        return "in a class"


in_a_class = task(Group.work)


def local_task() -> Task[..., Any]:
    """A task that only this process has."""

    def inner() -> None: ...

    return task(inner)


def shadowed() -> int:
    return 1


hidden = task(shadowed)


def shadowed() -> int:  # type: ignore[no-redef]  # that is the point
    """Another function by the same name."""
    return 2


@task
def close_descriptors(reuse: bool) -> str:
    """Close every descriptor that may be the socket to the worker, and possibly open another file in its place."""
    os.closerange(3, 256)
    if reuse:
        for _ in range(50):
            os.open(os.devnull, os.O_WRONLY)
    return "ok"


@task
def write_to_sockets(junk: list[int]) -> str:
    """Write to every socket there is."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "socket" in str(link.readlink()):
                os.write(int(link.name), bytes(junk))
    return "ok"


@task
def fail_at_length(length: int) -> None:
    """An error with a long text."""
    raise ValueError("\x01" * length + "the end")
