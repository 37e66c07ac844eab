"""Another application on the same queue, and the next version of the first one."""

from __future__ import annotations

from fairlane import Fairlane

from . import tasks

app = Fairlane()
newer = Fairlane()
"""Knows what the first application does, and what this one does too."""


async def draw() -> str:
    """A task that the first application does not have."""
    with tasks.noted():
        return "drawn"


drawn = app.task(retries=0)(draw)
newer.task(retries=0)(draw)
newer.task(name=tasks.noop.name)(tasks.noop.function)
