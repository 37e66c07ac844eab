"""Detects that a server has lost data: it was emptied, replaced by another, or returned to an earlier state.

Answers are signed with the generation of the data and the number of steps written. The generation changes when an
empty namespace gets its first data, and when a process has reported a loss. The number of steps only grows. A process
that sees another generation, or a lower number than it knew when it sent the call, therefore knows that acknowledged
writes may be gone. It reports this in the log and in the namespace, for `fairlane doctor`, and repeats its latest
completions, so that these jobs do not run a second time.
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
"""The most that the remembered results may take together."""
PART = 1_000
"""Completions that are repeated in one call."""
EMPTIED = "the server was emptied or replaced"
WENT_BACK = "the server returned to an earlier state"
logger = logging.getLogger("fairlane.store")


class Completed(NamedTuple):
    """An accepted completion. `stamp` distinguishes the job from a later one with the same id."""

    session: str
    held: Held
    stamp: bytes
    result: bytes | None


class _Batch(NamedTuple):
    """The completions of one call, in the form in which they were sent."""

    at: float
    session: str
    completed: Sequence[tuple[Transition, bytes]]
    size: int


class Mark(NamedTuple):
    """The generation and the number of steps at some moment."""

    generation: str
    steps: int


class Reported(NamedTuple):
    """The server's answer to a report: its generation from now on, how many jobs were completed again, and what the
    first process to report this loss has found."""

    mark: Mark
    again: int
    what: str


Report = Callable[[str, str, Sequence[Completed]], Awaitable[Reported]]
"""Reports a loss to the server: the lost generation, what happened, and what to complete again."""


class DataLoss:
    """Checks the answers of one store object. Used from any event loop and thread."""

    def __init__(self, shown: str, report: Report) -> None:
        self._shown = shown
        self._send_report = report
        self.mark = Mark("", 0)
        """Read before a call is sent, and given to `check` with its answer."""
        self.on_loss: Callable[[], Awaitable[None]] | None = None
        """Declares the application's queues and schedules again."""
        self._reporting = False
        self._completed: deque[_Batch] = deque()
        self._count = 0
        self._bytes = 0

    def remember(self, session: str, completed: Sequence[tuple[Transition, bytes]]) -> None:
        """Keep accepted completions, each with the stamp of its job."""
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
        """Whether an answer with this signature shows no loss. Call `check` if not."""
        if generation != before.generation or steps < before.steps or self.mark.generation != generation:
            return False
        if steps > self.mark.steps:
            self.mark = Mark(generation, steps)
        return True

    async def check(self, answer: dict[str, Any], before: Mark) -> None:
        """Check the signature of an answer. `before`: the mark at the time when the call was sent."""
        generation = answer.get("generation")
        if generation is None or self.mark.generation != before.generation or self._reporting:
            # A loss was found since the call was sent, and is being reported: this answer adds nothing.
            return
        found = Mark(generation, answer.get("steps", 0))
        # Compared with the mark before the call: a later answer may have been read first.
        if before.generation not in ("", generation):
            await self._report(before, EMPTIED)
        elif found.steps < before.steps:
            await self._report(before, f"{WENT_BACK} (step {found.steps:,} after {before.steps:,})")
        else:
            self.mark = Mark(generation, max(self.mark.steps, found.steps))

    async def _report(self, before: Mark, what: str) -> None:
        self._reporting = True
        self._forget(time.monotonic())
        try:
            again = 0
            for part in self._parts():
                reported = await self._send_report(before.generation, what, part)
                again += reported.again
        except Exception as exc:
            # The mark stays, so the next answer shows the loss again.
            logger.warning("%s: %s, and the report failed (%s)", self._shown, what, exc)
            return
        finally:
            self._reporting = False
        self.mark = reported.mark
        self._completed.clear()
        self._count = self._bytes = 0
        logger.error("%s: %s; acknowledged writes may be lost. See docs/redis.md", self._shown, reported.what)
        try:
            if self.on_loss is not None:
                await self.on_loss()
        except Exception as exc:
            logger.warning("%s: could not declare queues and schedules again (%s)", self._shown, exc)
        if again:
            logger.error("%s: %d lost completions were repeated", self._shown, again)

    def _parts(self) -> Iterator[list[Completed]]:
        completed = [
            Completed(batch.session, transition.held, stamp, transition.result)
            for batch in self._completed
            for transition, stamp in batch.completed
        ]
        yield completed[:PART]
        for start in range(PART, len(completed), PART):
            yield completed[start : start + PART]
