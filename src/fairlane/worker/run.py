"""One job that a worker holds, from its claim until the store has answered how it ended."""

from __future__ import annotations

import asyncio
from enum import Enum

from ..job import Claimed
from ..running import RunningJob


class Stop(Enum):
    """Why a worker ends a body before it has ended by itself."""

    TIMEOUT = "its time was over"
    CANCEL = "somebody cancelled it"
    LOST = "the claim was lost"
    HAND_BACK = "the worker stops"
    CONTACT = "the store cannot be reached, and its limited lane may be given to another"


class Run:
    """A claim in progress. Belongs to the worker's event loop."""

    __slots__ = (
        *("begun", "body", "claimed", "committed", "deadline", "ended", "in_thread", "mark", "running", "session"),
        "stop",
    )

    def __init__(self, claimed: Claimed, session: str = "") -> None:
        self.claimed = claimed
        self.session = session
        """Who has claimed it."""
        self.body: asyncio.Task[None] | None = None
        self.begun = False
        self.running: RunningJob | None = None
        self.deadline: float | None = None
        self.stop: Stop | None = None
        self.in_thread = False
        """A thread cannot be stopped: it is asked, and waited for or left behind."""
        self.ended = False
        """Its ending was handed on; what the body does from now on does not count."""
        self.mark: int | None = None
        self.committed = False
        """Its body has completed the job itself, in a transaction."""
