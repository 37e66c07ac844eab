"""The application that ``fairlane demo`` plays with; its workers are started with ``-A fairlane.cli.demo.scene``."""

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
    """Draw a picture for somebody: every user has a lane of his own."""
    await asyncio.sleep(DRAWING_SECONDS)
    return f"{user}-{number}.png"


@app.task(queue="pictures", lane="user:{user}", priority="high")
async def rush(user: str) -> str:
    """The same, urgent: there is a slot on every worker that nothing else may take."""
    await asyncio.sleep(DRAWING_SECONDS)
    return f"{user}.png"


@app.task(queue="models", lane="{model}")
async def ask(model: str, person: str) -> str:
    """Ask a model that answers one person at a time, in the order they came."""
    await asyncio.sleep(MODEL_SECONDS)
    return f"{model} has answered {person}"
