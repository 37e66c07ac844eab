"""A process whose files may not grow beyond a limit, which is to SQLite what a full disk is.

``python -m tests.store.full_disk ROLE URL LIMIT`` plays a role and writes what it saw as JSON. The limit counts for
each file, from the moment the role sets it until it lifts it.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from fairlane.errors import StoreFull
from fairlane.model.job import NewJob, Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.sqlite.store import SqliteStore

AT_ONCE = 8
MOST_ROUNDS = 2_000
LETTER = b'"' + b"x" * 3_000 + b'"'


def allow(size: int | None) -> None:
    """Limit the size of files to `size`, or remove the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


async def fill(url: str, limit: int) -> Any:
    """Send jobs until there is no room, read, free some room, and continue with the same store."""
    store = await SqliteStore.open(url)
    await store.register(NewSession(id="w", kind=SessionKind.WORKER, queues=("default",), slots=Slots(total=1000)))
    stored: list[str] = []
    refused: list[NewJob] = []
    allow(limit)
    for call in count():
        assert call < MOST_ROUNDS, "it never gets full"
        jobs = [NewJob(id=f"{call}-{n}", task="task", payload=LETTER) for n in range(AT_ONCE)]
        answers = await asyncio.gather(*(store.enqueue([job]) for job in jobs), return_exceptions=True)
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, StoreFull):
                refused.append(job)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                stored.append(job.id)
        if refused:
            break
    known = [job is not None for job in await store.get(stored)]
    leaked = [job.id for job in await store.get([job.id for job in refused]) if job is not None]
    asks = (Ask("default", Priority.NORMAL, 100),)
    try:
        claimed = await store.claim("w", Claim(number=1, asks=asks, total=100))
    except StoreFull:
        claimed = []
    allow(None)
    # A caller that did not get the answer repeats the call.
    claimed = await store.claim("w", Claim(number=1, asks=asks, total=100)) or claimed
    again = await store.enqueue(refused)
    finished = await store.finish("w", [complete(job.held) for job in claimed])
    recount = await store.recount()
    await store.close()
    return {
        "stored": stored,
        "refused": [job.id for job in refused],
        "all_known": all(known),
        "leaked": leaked,
        "claimed": len(claimed),
        "completed": len({verdict.id for verdict in finished.verdicts if verdict.accepted}),
        "created_later": all(answer.created for answer in again),
        "differences": recount.differences,
    }


async def make(url: str, limit: int) -> Any:
    """Create a store where there is no room for one, then where there is."""
    allow(limit)
    try:
        await (await SqliteStore.open(url)).close()
        received = None
    except StoreFull as exc:
        received = str(exc)
    allow(None)
    store = await SqliteStore.open(url)
    await store.enqueue([NewJob(id="a", task="task")])
    await store.close()
    return received


ROLES: dict[str, Callable[[str, int], Awaitable[Any]]] = {role.__name__: role for role in (fill, make)}


async def main(role: str, url: str, limit: str) -> None:
    """Play one role."""
    # Otherwise the first write beyond the limit ends the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.stdout.write(json.dumps(await ROLES[role](url, int(limit))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
