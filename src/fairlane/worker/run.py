"""One job that a worker holds, from its claim until the store has answered how it ended."""

from __future__ import annotations

import asyncio
from enum import Enum

from ..model.job import Claimed
from ..runtime.running_job import RunningJob


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
        *("began_at", "begun", "body", "claimed", "committed", "deadline", "declined", "ended", "entered", "error"),
        *("in_thread", "mark", "running", "seconds", "session", "stop"),
    )

    def __init__(self, claimed: Claimed, session: str = "") -> None:
        self.claimed = claimed
        self.session = session
        """Who has claimed it."""
        self.body: asyncio.Task[None] | None = None
        self.begun = False
        """The task that runs it has made its first step."""
        self.entered = False
        """Its body has begun, or may have: from here on giving it back counts as a hand-back."""
        self.began_at: float | None = None
        """When its body began, by the monotonic clock."""
        self.seconds: float | None = None
        """How long it ran."""
        self.error: Exception | None = None
        """What it raised, if that was in this process."""
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
        self.declined = False
        """Its task is not known here, so nothing of it began."""
