"""A process that waits for its turn in a lane and holds it: ``python -m tests.e2e.turner LANE SECONDS``."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from . import ledger
from .tasks import app


def note(event: str, id: str, fence: int, lane: str) -> None:
    """Write one event of a turn into the ledger."""
    entry = ledger.Entry(
        job=id,
        task="turn",
        event=event,
        attempt=1,
        fence=fence,
        pid=os.getpid(),
        worker=os.environ["E2E_PROCESS"],
        at=ledger.now(),
        lane=lane,
    )
    ledger.append(Path(os.environ["LEDGER"]), entry)


async def main(lane: str, seconds: float) -> None:
    """One turn."""
    async with app, app.turn(lane, queue="models") as turn:
        note(ledger.BEGIN, turn.id, turn.fence, lane)
        await asyncio.sleep(seconds)
        note(ledger.END, turn.id, turn.fence, lane)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
