"""A complete instance with narrow bounds, which the tests with real sockets serve."""

from __future__ import annotations

import asyncio

from fairlane import Fairlane, current_job
from fairlane.http import HttpSettings, serve_app

app = Fairlane()
app.queue("small", max_pending=2)


@app.task(name="add")
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.task(name="chatter")
async def chatter(seconds: float) -> int:
    """Report as much and as often as is passed on."""
    end = asyncio.get_running_loop().time() + seconds
    number = 0
    while asyncio.get_running_loop().time() < end:
        number += 1
        current_job().progress({"number": number, "filling": "x" * 15_000})
        await asyncio.sleep(0.05)
    return number


web = serve_app(
    app, settings=HttpSettings(slow_reader=2, heartbeat=0.2, head_seconds=2, body_seconds=1, header_bytes=8_192)
)
