"""One of several processes that meet at one store, on the real clock.

``python -m tests.conformance.race_worker ROLE URL NUMBER`` opens the store, says that it is ready, waits for
a line on its standard input so that all begin together, plays its role, and writes what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from fairlane.model.ids import new_id
from fairlane.model.job import JobState, NewJob, Priority
from fairlane.model.reading import Filter
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.port import Store

from .reopening import open_again

QUEUE = "races"
LANE = "narrow"
REPEATS = 25
BATCH = 5


async def _register(store: Store) -> tuple[str, int | None]:
    session = await store.register(
        NewSession(id=new_id(), kind=SessionKind.WORKER, lease=60, queues=(QUEUE,), slots=Slots(total=10))
    )
    return session.id, session.index


async def claim(store: Store, number: int) -> Any:
    """Start and complete jobs until there are none. Returns the starts, and the most jobs of the lane at once."""
    session, _ = await _register(store)
    starts: list[tuple[str, int]] = []
    fullest = 0
    for call in count(1):
        asks = (Ask(QUEUE, Priority.NORMAL, BATCH),)
        claimed = await store.claim(session, Claim(number=call, asks=asks, total=BATCH))
        starts += [(job.id, job.fence) for job in claimed]
        page = await store.find(Filter(state=JobState.RUNNING, queue=QUEUE, lane=LANE))
        fullest = max(fullest, len(page.jobs))
        if claimed:
            await store.finish(session, [complete(job.held) for job in claimed])
            continue
        # No job can start now, but some may be left: another process may hold the lane.
        if not (await store.find(Filter(state=JobState.PENDING, queue=QUEUE), limit=1)).jobs:
            break
    return {"starts": starts, "fullest": fullest}


async def elect(store: Store, number: int) -> Any:
    """Try to become leader once. Returns the term that was won."""
    term = await store.lead(f"manager-{number}", lease=60)
    return term.number if term is not None and term.session == f"manager-{number}" else None


async def reelect(store: Store, number: int) -> Any:
    """Try to become leader repeatedly, resigning each time. Returns the terms that were won."""
    won = []
    for _ in range(REPEATS):
        term = await store.lead(f"manager-{number}", lease=60)
        if term is not None and term.session == f"manager-{number}":
            won.append(term.number)
            await store.resign(term.number)
    return won


async def bind(store: Store, number: int) -> Any:
    """Send the first job of each of several sticky keys."""
    jobs = [NewJob(id=f"{key}-from-{number}", task="task", queue=QUEUE, sticky=f"plan-{key}") for key in range(REPEATS)]
    for job in jobs:
        await store.enqueue([job])
    return [job.id for job in jobs]


async def unique(store: Store, number: int) -> Any:
    """Send jobs whose unique values the other processes use too. Returns each holder and whether it was created."""
    answers = []
    for value in range(REPEATS):
        job = NewJob(id=f"{value}-from-{number}", task="task", queue=QUEUE, unique=f"once-{value}")
        answers += await store.enqueue([job])
    return [(answer.id, answer.created) for answer in answers]


async def same(store: Store, number: int) -> Any:
    """Send jobs under ids that the other processes use too. Returns the ids that were created here."""
    answers = []
    for value in range(REPEATS):
        answers += await store.enqueue([NewJob(id=f"same-{value}", task="task", queue=QUEUE)])
    return [answer.id for answer in answers if answer.created]


async def register(store: Store, number: int) -> Any:
    """Register as a worker. Returns the index."""
    return (await _register(store))[1]


async def send(store: Store, number: int) -> Any:
    """Send jobs in several calls. Returns their ids."""
    ids = [f"{value}-from-{number}" for value in range(REPEATS * 4)]
    for start in range(0, len(ids), 4):
        await store.enqueue([NewJob(id=id, task="task", queue=QUEUE) for id in ids[start : start + 4]])
    return ids


ROLES: dict[str, Callable[[Store, int], Awaitable[Any]]] = {
    role.__name__: role for role in (claim, elect, reelect, bind, unique, same, register, send)
}


async def main(role: str, url: str, number: str) -> None:
    """Play one role, between the line that starts it and the line that tells what it saw."""
    store = await open_again(url)
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        seen = await ROLES[role](store, int(number))
    finally:
        await store.close()
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
