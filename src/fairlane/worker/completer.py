"""Writes down how bodies ended, all that are ready in one fenced call, and claims the next jobs in the same call.

Rides out outages: the same call is repeated, with the same fences and the same claim number, until the store has
answered; so nothing is lost and nothing happens twice. Progress goes its own way, a few times a second at the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from random import random

from ..errors import InvalidInput, SessionLost, Stale, StoreError
from ..job import Held, Reason
from ..session import Claim, Finished
from ..states import Move, Transition, fail
from ..store import Store

logger = logging.getLogger("fairlane.worker")
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
PROGRESS_EVERY = 0.1
"""Seconds between two writes of progress; of the reports in between the last one of each job is written."""


class Completer:
    """The worker's writing hand: one call in flight at a time."""

    def __init__(self, store: Store, patient: Callable[[], bool]) -> None:
        self._store = store
        self._patient = patient
        """Whether it is still worth waiting for a store that does not answer."""
        self._progress: dict[Held, bytes] = {}
        self._loop = asyncio.get_running_loop()
        self._reported = asyncio.Event()

    async def exchange(self, session: str, transitions: list[Transition], claim: Claim | None) -> Finished | None:
        """Write endings and claim. None when the store stayed away for longer than it is worth waiting."""
        wait = FIRST_WAIT
        failing = False
        while True:
            try:
                if self._progress:
                    await self._write_last(session, transitions)
                if transitions:
                    finished = await self._store.finish(session, transitions, claim=claim)
                elif claim is not None:
                    finished = Finished((), tuple(await self._store.claim(session, claim)))
                else:
                    return Finished(())
            except SessionLost:
                raise
            except InvalidInput as exc:
                return await self._exchange_apart(session, transitions, claim, exc)
            except Stale:
                # The claim is older than one the store has seen: an answer overtaken by a repetition. Ask anew.
                claim = None
            except Exception as exc:
                if not self._patient():
                    logger.error("the store does not answer (%s); leaving the rest to the rescuer", exc)
                    return None
                if not failing:
                    # Anything but a failing store is a fault of ours, or of the store's code: say where.
                    ours = None if isinstance(exc, StoreError) else exc
                    logger.warning("the store does not answer (%s); trying again", exc, exc_info=ours)
                failing = True
                await asyncio.sleep(wait * random())
                wait = min(LONGEST_WAIT, wait * 2)
            else:
                if failing:
                    logger.warning("the store answers again")
                return finished

    async def _exchange_apart(
        self, session: str, transitions: list[Transition], claim: Claim | None, exc: InvalidInput
    ) -> Finished | None:
        """One of them is refused for good: it must not hold up the others, nor its job for ever."""
        if len(transitions) > 1:
            middle = len(transitions) // 2
            first = await self.exchange(session, transitions[:middle], None)
            second = await self.exchange(session, transitions[middle:], claim)
            return first and second and Finished((*first.verdicts, *second.verdicts), second.claimed)
        logger.error("the store refuses how a job ended (%s); it is written as failed", exc)
        if not transitions or transitions[0].move is Move.FAIL:
            return Finished(())
        return await self.exchange(session, [fail(transitions[0].held, Reason.ERROR, str(exc))], claim)

    async def _write_last(self, session: str, transitions: list[Transition]) -> None:
        """What a body reported just before it ended is written first: once it has ended, nothing is taken any more."""
        last = [(t.held, value) for t in transitions if (value := self._progress.pop(t.held, None)) is not None]
        if last:
            with contextlib.suppress(StoreError):
                await self._store.progress(session, last)

    def report(self, held: Held, value: bytes) -> None:
        """Take the latest progress of a job; from any thread, and never waits."""
        self._progress[held] = value
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to report to
            self._loop.call_soon_threadsafe(self._reported.set)

    def forget(self, held: Held) -> None:
        """Drop what a job reported: it has ended, and its last report was written with that."""
        self._progress.pop(held, None)

    async def write_progress(self, session: Callable[[], str]) -> None:
        """Write progress until cancelled. What cannot be written is dropped: the next report replaces it anyway."""
        while True:
            await self._reported.wait()
            self._reported.clear()
            reports, self._progress = self._progress, {}
            if reports:
                with contextlib.suppress(Exception):
                    await self._store.progress(session(), list(reports.items()))
            await asyncio.sleep(PROGRESS_EVERY)
