"""One job that a worker holds, from its claim until the store has confirmed its end."""

from __future__ import annotations

import asyncio
from enum import Enum

from ..model.job import Claimed
from ..runtime.running_job import RunningJob


class Stop(Enum):
    """Why a worker stops a job function."""

    TIMEOUT = "it exceeded its timeout"
    CANCEL = "the job was cancelled"
    LOST = "the claim was lost"
    HAND_BACK = "the worker is stopping"
    CONTACT = "the store is unreachable, and the place in its limited lane may be given away"


class Run:
    """A claim in progress. Belongs to the worker's event loop."""

    __slots__ = (
        *(
            "began_at",
            "begun",
            "body",
            "claimed",
            "committed",
            "crash_slot",
            "deadline",
            "declined",
            "ended",
            "entered",
            "error",
        ),
        *("in_thread", "running", "seconds", "session", "stop"),
    )

    def __init__(self, claimed: Claimed, session: str = "") -> None:
        self.claimed = claimed
        self.session = session
        """The session that has claimed it."""
        self.body: asyncio.Task[None] | None = None
        self.begun = False
        """Its asyncio task has begun."""
        self.entered = False
        """Its function has begun, or may have: from here on, giving it back counts as a hand-back."""
        self.began_at: float | None = None
        """When its asyncio task began, by the monotonic clock."""
        self.seconds: float | None = None
        """How long it ran."""
        self.error: Exception | None = None
        """The exception it raised, if that was in this process."""
        self.running: RunningJob | None = None
        self.deadline: float | None = None
        self.stop: Stop | None = None
        self.in_thread = False
        """It runs in a thread, which cannot be stopped: it is asked to end, and waited for or left behind."""
        self.ended = False
        """Its result was handed to the worker; whatever its function does from now on is ignored."""
        self.crash_slot: int | None = None
        """Its slot in the crash state."""
        self.committed = False
        """The job was completed in the transaction of its function."""
        self.declined = False
        """Its task is unknown to this worker, so it never began."""
