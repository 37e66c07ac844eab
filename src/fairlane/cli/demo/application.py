"""The application of ``fairlane demo``. Its workers run with ``-A fairlane.cli.demo.application:app``."""

from __future__ import annotations

import asyncio

from ...app import Fairlane

DRAWING_SECONDS = 0.3
CHAT_SECONDS = 0.4
LARGEST_CENTS = 9_000
MODEL_SECONDS = 1.2

app = Fairlane()
app.queue("pictures")
app.queue("models").lane("*", limit=1)
app.queue("chats")
app.queue("payments")


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


@app.task(queue="chats", lane="{room}")
async def chat(room: str, said: str) -> str:
    """Answer in a room. Its history is in the memory of one worker, so the room is a sticky key."""
    await asyncio.sleep(CHAT_SECONDS)
    return f"{room}: {said}"


@app.task(queue="payments", retries=0)
async def charge(customer: str, cents: int) -> int:
    """Charge a customer. Some cards are declined, so that there are failures to look at."""
    await asyncio.sleep(0.1)
    if cents > LARGEST_CENTS:
        raise ValueError(f"card declined: {customer} cannot pay {cents} cents")
    return cents


@app.task(queue="payments", every=20)
async def report() -> str:
    """Add up the payments, by a schedule."""
    await asyncio.sleep(0.2)
    return "balanced"
