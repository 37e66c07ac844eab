"""Tasks that write rows of their own in the transaction of their job, and a worker for them that can be killed."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import msgspec

from fairlane import Backoff, Fairlane, current_job

app = Fairlane()
OFTEN: dict[str, Any] = {"retries": 1_000, "backoff": Backoff(base=0.1, factor=1)}


async def write(connection: Any, job: str, part: int) -> None:
    """Write a row of ours, on whatever kind of connection the store has."""
    if app.settings.url.startswith("sqlite"):
        connection.execute("INSERT INTO effect VALUES (?, ?)", (job, part))
    else:
        await connection.execute("INSERT INTO effect VALUES ($1, $2)", job, part)


@app.task(name="effect", **OFTEN)
async def effect(number: int) -> int:
    """Write two rows, with pauses before and between them in which the process can be killed."""
    await asyncio.sleep(random.uniform(0, 0.1))
    connection = await current_job().transaction()
    await write(connection, current_job().id, 1)
    await asyncio.sleep(random.uniform(0, 0.05))
    await write(connection, current_job().id, 2)
    current_job().progress("written")
    return 2 * number


@app.task(name="effect_apart", isolate=True, **OFTEN)
async def effect_apart(number: int) -> int:
    """The same in a child process."""
    return await effect(number)


if __name__ == "__main__":
    # As ``fairlane worker --url`` does: its child processes do not get the URL from the environment.
    app.settings = msgspec.structs.replace(app.settings, url=sys.argv[1])
    asyncio.run(app.worker(slots=8).run())
