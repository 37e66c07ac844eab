"""Notices that a server has lost data: it was emptied, replaced by another, or has gone back to an earlier state.

Answers are signed with the generation of the data and the number of steps that were written. The generation changes
when an empty namespace gets its first data, and when somebody has found a loss. The number only grows. So a process
that sees another generation than before, or a lower number than it knew when it asked, knows that what was
acknowledged since may be gone. It says so in the log and in the namespace, for `fairlane doctor`; and what it has
completed lately is completed again, so that it does not run a second time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...job import Held
from ...states import Move, Transition

KEPT_SECONDS = 30.0
"""How long a completion is remembered: several times what a server with `appendfsync everysec` can lose."""
MOST_KEPT = 20_000
EMPTIED = "the server was emptied, or replaced by another one"
WENT_BACK = "the server has gone back to an earlier state"
_COMPLETE = Move.COMPLETE
logger = logging.getLogger("fairlane.store")

Completed = tuple[str, Held, bytes | None]
"""Who has completed what, and with which result."""
Mend = Callable[[str, str, Sequence[Completed]], Awaitable[int]]
"""Tells the server of a loss: the generation that was lost, what happened, and what to complete again."""


class Losses:
    """What one store object knows of the data. Used from any event loop and thread."""

    def __init__(self, shown: str, mend: Mend) -> None:
        self._shown = shown
        self._mend = mend
        self._generation = ""
        self.steps = 0
        """The highest number of steps that was seen. Read before a call is sent, and given to `check` with its answer.
        """
        self._completed: deque[tuple[float, Completed]] = deque(maxlen=MOST_KEPT)

    def remember(self, session: str, transitions: Sequence[Transition]) -> None:
        """These were accepted."""
        now = time.monotonic()
        kept = self._completed
        kept.extend((now, (session, t.held, t.result)) for t in transitions if t.move is _COMPLETE)
        while kept and kept[0][0] < now - KEPT_SECONDS:
            kept.popleft()

    def begin(self, generation: str) -> None:
        """The data are of this generation now, by our own doing."""
        self._generation = generation

    async def check(self, answer: dict[str, Any], known: int) -> None:
        """Look at what an answer is signed with. `known`: the number of steps before it was asked for."""
        old, generation, steps = self._generation, answer.get("generation"), answer.get("steps", 0)
        if generation is None:
            return
        # An answer that another has overtaken has a lower number than is known now, but not than was known then.
        emptied = old not in ("", generation)
        went_back = not emptied and steps < known
        if not emptied and not went_back:
            self._generation = generation
            self.steps = max(self.steps, steps)
            return
        self._generation, self.steps = generation, steps
        await self._report(old, EMPTIED if emptied else f"{WENT_BACK} (step {steps:,}, {known:,} was seen)")

    async def _report(self, old: str, what: str) -> None:
        completed = [each for _, each in self._completed]
        self._completed.clear()
        try:
            mended = await self._mend(old, what, completed)
        except Exception as exc:
            self._completed.extend((time.monotonic(), each) for each in completed)
            # It is found again: what is known now is forgotten.
            self._generation = old
            logger.warning("%s: %s, and could not be told (%s)", self._shown, what, exc)
            return
        logger.error("%s: %s; what was acknowledged since may be lost. See docs/redis.md", self._shown, what)
        if mended:
            logger.error("%s: %d jobs that had been completed were completed again", self._shown, mended)
