"""A scheduler without leadership: promotes what is due, pass by pass without a term, until nothing is left.

``python -m tests.e2e.passes GO ANSWER`` begins when the file GO is there, ends when nothing is scheduled any more, and
writes what it did into ANSWER.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from fairlane.store import open_store

from . import tasks

BATCH = 50


class Passes(msgspec.Struct):
    """What one scheduler did."""

    promoted: int
    longest: float
    """Seconds of its longest pass, including waits for other passes."""


async def main(go: Path, answer: Path) -> None:
    """Promote until everything is."""
    store = await open_store(os.environ["FAIRLANE_URL"])
    done = Passes(0, 0.0)
    await tasks.appears(go)
    left = 1
    while left:
        begun = time.monotonic()
        promoted = await store.promote(limit=BATCH)
        done.longest = max(done.longest, time.monotonic() - begun)
        done.promoted += promoted.promoted
        left = sum(queue.counts.scheduled for queue in await store.queues())
    await store.close()
    part = answer.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(done))
    part.rename(answer)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
