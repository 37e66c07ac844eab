"""The application that the tests of `fairlane serve` serve."""

from __future__ import annotations

import asyncio

from fairlane import Fairlane

app = Fairlane()


@app.task(name="add")
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.task(name="nap")
async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "rested"
