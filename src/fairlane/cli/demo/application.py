"""The application of ``fairlane demo``. Its workers run with ``-A fairlane.cli.demo.application:app``."""

from __future__ import annotations

import asyncio

from ...app import Fairlane

DRAWING_SECONDS = 0.3
MODEL_SECONDS = 1.2

app = Fairlane()
app.queue("pictures")
app.queue("models").lane("*", limit=1)


@app.task(queue="pictures", lane="user:{user}")
async def draw(user: str, number: int) -> str:
    """Draw a picture. Every user has a lane."""
    await asyncio.sleep(DRAWING_SECONDS)
    return f"{user}-{number}.png"


@app.task(queue="pictures", lane="user:{user}", priority="high")
async def rush(user: str) -> str:
    """Draw an urgent picture. Every worker reserves a slot for such jobs."""
    await asyncio.sleep(DRAWING_SECONDS)
    return f"{user}.png"


@app.task(queue="models", lane="{model}")
async def ask(model: str, person: str) -> str:
    """Ask a model that answers one request at a time, in the order of arrival."""
    await asyncio.sleep(MODEL_SECONDS)
    return f"{model} has answered {person}"
