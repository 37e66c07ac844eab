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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ...model.job import Held
from ...model.states import Transition

KEPT_SECONDS = 30.0
"""How long a completion is remembered: several times what a server with `appendfsync everysec` can lose."""
MOST_KEPT = 20_000
MOST_BYTES = 16 * 1024 * 1024
"""Results are remembered too, as long as they are not more than this together."""
PART = 1_000
EMPTIED = "the server was emptied, or replaced by another one"
WENT_BACK = "the server has gone back to an earlier state"
logger = logging.getLogger("fairlane.store")


class Completed(NamedTuple):
    """A completion that was accepted. `stamp` tells the job from a later one of the same id."""

    session: str
    held: Held
    stamp: bytes
    result: bytes | None


class _Batch(NamedTuple):
    """Completions of one call. Taken apart only when they are needed."""

    at: float
    session: str
    completed: Sequence[tuple[Transition, bytes]]
    size: int


class Mark(NamedTuple):
    """What is known of the data at some moment."""

    generation: str
    steps: int


class Mended(NamedTuple):
    """What the server says of a loss: the generation of its data from now on, how many jobs were completed again, and
    what the first to find it has found."""

    mark: Mark
    again: int
    what: str


Mend = Callable[[str, str, Sequence[Completed]], Awaitable[Mended]]
"""Tells the server of a loss: the generation that was lost, what happened, and what to complete again."""


class Losses:
    """What one store object knows of the data. Used from any event loop and thread."""

    def __init__(self, shown: str, mend: Mend) -> None:
        self._shown = shown
        self._mend = mend
        self.mark = Mark("", 0)
        """Read before a call is sent, and given to `check` with its answer."""
        self.on_loss: Callable[[], Awaitable[None]] | None = None
        """Declares again what the application has declared."""
        self._reporting = False
        self._completed: deque[_Batch] = deque()
        self._count = 0
        self._bytes = 0

    def remember(self, session: str, completed: Sequence[tuple[Transition, bytes]]) -> None:
        """These completions were accepted, of jobs with these stamps."""
        now = time.monotonic()
        size = sum([len(transition.result or b"") for transition, _ in completed])
        self._completed.append(_Batch(now, session, completed, size))
        self._count += len(completed)
        self._bytes += size
        self._forget(now)

    def _forget(self, now: float) -> None:
        kept = self._completed
        while kept and (kept[0].at < now - KEPT_SECONDS or self._count > MOST_KEPT or self._bytes > MOST_BYTES):
            oldest = kept.popleft()
            self._count -= len(oldest.completed)
            self._bytes -= oldest.size

    def is_usual(self, generation: str, steps: int, before: Mark) -> bool:
        """Whether an answer that is signed so shows no loss; `check` is for the others."""
        if generation != before.generation or steps < before.steps or self.mark.generation != generation:
            return False
        if steps > self.mark.steps:
            self.mark = Mark(generation, steps)
        return True

    async def check(self, answer: dict[str, Any], before: Mark) -> None:
        """Look at what an answer is signed with. `before`: what was known when it was asked for."""
        generation = answer.get("generation")
        if generation is None or self.mark.generation != before.generation or self._reporting:
            # Somebody has found a loss since the question was sent, and tells of it: this answer says nothing new.
            return
        found = Mark(generation, answer.get("steps", 0))
        # An answer that another has overtaken has a lower number than is known now, but not than was known then.
        if before.generation not in ("", generation):
            await self._report(before, EMPTIED)
        elif found.steps < before.steps:
            await self._report(before, f"{WENT_BACK} (step {found.steps:,}, {before.steps:,} was seen)")
        else:
            self.mark = Mark(generation, max(self.mark.steps, found.steps))

    async def _report(self, before: Mark, what: str) -> None:
        self._reporting = True
        self._forget(time.monotonic())
        try:
            again = 0
            for part in self._parts():
                mended = await self._mend(before.generation, what, part)
                again += mended.again
        except Exception as exc:
            # Nothing was learned, so the next answer tells it again.
            logger.warning("%s: %s, and could not be told (%s)", self._shown, what, exc)
            return
        finally:
            self._reporting = False
        self.mark = mended.mark
        self._completed.clear()
        self._count = self._bytes = 0
        logger.error("%s: %s; what was acknowledged since may be lost. See docs/redis.md", self._shown, mended.what)
        try:
            if self.on_loss is not None:
                await self.on_loss()
        except Exception as exc:
            logger.warning("%s: queues and schedules could not be declared again (%s)", self._shown, exc)
        if again:
            logger.error("%s: %d jobs that had been completed were completed again", self._shown, again)

    def _parts(self) -> Iterator[list[Completed]]:
        completed = [
            Completed(batch.session, transition.held, stamp, transition.result)
            for batch in self._completed
            for transition, stamp in batch.completed
        ]
        yield completed[:PART]
        for start in range(PART, len(completed), PART):
            yield completed[start : start + PART]
