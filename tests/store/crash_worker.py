"""Processes to be killed, made cheaply: one process that imports everything, opens nothing, and forks.

``python -m tests.store.crash_worker URL FOLDER`` obeys lines on its standard input: ``start NUMBER SEED`` forks a
process that uses the store, ``open NUMBER SEED`` one that opens and closes it again and again, ``reap PID`` waits for
the end of one and says how it ended. At the end of the input it ends with all it made. The forked ones say
``ready NUMBER PID``, or ``failed NUMBER``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from fairlane.store.sqlite.database import path_of
from fairlane.store.sqlite.store import SqliteStore

from .crash_mix import Actor, Log


def say(*words: object) -> None:
    """Write one line to the parent process, short enough to be written atomically."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def use(url: str, folder: Path, number: int, seed: int) -> None:
    """Open the store, and call verbs for ever; sometimes as several callers at once."""
    rng = Random(seed)
    log = Log(folder / f"log-{number}")
    store = await SqliteStore.open(url)
    actors = [
        Actor(url, path_of(url), store, log, Random(rng.random()), f"{number}.{actor}")
        for actor in range(rng.choice((1, 1, 2, 3)))
    ]

    async def play(actor: Actor) -> None:
        for _ in count():
            await actor.act(alone=len(actors) == 1)

    if rng.random() < 0.8:
        await asyncio.gather(*(actor.enter() for actor in actors))
    say("ready", number, os.getpid())
    async with asyncio.TaskGroup() as group:
        for actor in actors:
            group.create_task(play(actor))


async def come_and_go(url: str, folder: Path, number: int, seed: int) -> None:
    """Open the store, which makes and migrates the file when it is new, and close it."""
    say("ready", number, os.getpid())
    for _ in count():
        store = await SqliteStore.open(url)
        await store.close()


ROLES: dict[str, Callable[[str, Path, int, int], Coroutine[Any, Any, None]]] = {"start": use, "open": come_and_go}


def fork(role: str, url: str, folder: Path, number: int, seed: int) -> int:
    """A process that plays a role until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(0)
        asyncio.run(ROLES[role](url, folder, number, seed))
    except BaseException:
        traceback.print_exc()
        say("failed", number)
    os._exit(1)


def main(url: str, folder: str) -> None:
    """Execute commands until the parent closes the pipe."""
    made: set[int] = set()
    for line in sys.stdin:
        order, *numbers = line.split()
        if order in ROLES:
            made.add(fork(order, url, Path(folder), int(numbers[0]), int(numbers[1])))
        else:
            pid = int(numbers[0])
            _, status = os.waitpid(pid, 0)
            made.discard(pid)
            say("reaped", pid, os.waitstatus_to_exitcode(status))
    for pid in made:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
