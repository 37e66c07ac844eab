"""One of several processes that are busy with one store, on the real clock.

``python -m tests.store.traffic ROLE URL NUMBER`` opens the store, says that it is ready and begins when it reads a
line. A producer sends jobs until it reads another one; a worker then runs what is left. Each writes what it saw as
JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import Any

from fairlane.model.ids import new_id
from fairlane.model.job import Acceptance, JobState, NewJob, Priority
from fairlane.model.reading import Filter
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.sqlite.store import SqliteStore

QUEUE = "traffic"
LANES = (None, "a", "b", "narrow")
CALLERS = 4
BATCH = 20
WAITING = Filter(state=JobState.PENDING, queue=QUEUE)


async def produce(store: SqliteStore, number: int, over: asyncio.Event) -> Any:
    """Several callers send one job after the other, as the handlers of a web server do."""
    sent: list[str] = []
    seconds: list[float] = []

    async def call(caller: int) -> None:
        rng = Random(caller)
        for n in count():
            if over.is_set():
                return
            job = NewJob(id=f"{number}-{caller}-{n}", task="task", queue=QUEUE, lane=rng.choice(LANES))
            began = time.perf_counter()
            await store.enqueue([job])
            seconds.append(time.perf_counter() - began)
            sent.append(job.id)

    await asyncio.gather(*(call(caller) for caller in range(CALLERS)))
    return {"sent": sent, "seconds": seconds}


async def work(store: SqliteStore, number: int, over: asyncio.Event) -> Any:
    """Claim, complete, claim: until the producers have ended and nothing is left."""
    session = new_id()
    await store.register(
        NewSession(id=session, kind=SessionKind.WORKER, lease=60, queues=(QUEUE,), slots=Slots(total=BATCH))
    )
    asks = (Ask(QUEUE, Priority.NORMAL, BATCH),)
    completed: list[str] = []
    seconds: list[float] = []
    held = await store.claim(session, Claim(number=1, asks=asks, total=BATCH))
    for call in count(2):
        began = time.perf_counter()
        finished = await store.finish(
            session, [complete(job.held) for job in held], claim=Claim(number=call, asks=asks, total=BATCH)
        )
        seconds.append(time.perf_counter() - began)
        completed += [verdict.id for verdict in finished.verdicts if verdict.acceptance is Acceptance.APPLIED]
        held = list(finished.claimed)
        # No job can start now, but some may be left: the other worker may hold the narrow lane.
        if not held and over.is_set() and not (await store.find(WAITING, limit=1)).jobs:
            break
    return {"completed": completed, "seconds": seconds}


ROLES: dict[str, Callable[[SqliteStore, int, asyncio.Event], Awaitable[Any]]] = {"produce": produce, "work": work}


async def main(role: str, url: str, number: str) -> None:
    """Play one role between the lines that begin and end it."""
    store = await SqliteStore.open(url)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        sys.stdin.readline()
        loop.call_soon_threadsafe(over.set)

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    listening = loop.run_in_executor(None, listen)
    try:
        seen = await ROLES[role](store, int(number), over)
    finally:
        await store.close()
    await listening
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
