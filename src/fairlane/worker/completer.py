"""Writes down how bodies ended, all that are ready in one fenced call, and claims the next jobs in the same call.

Rides out outages: the same call is repeated, with the same fences and the same claim number, until the store has
answered; so nothing is lost and nothing happens twice. Progress goes its own way, a few times a second at the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from random import random

from ..errors import InvalidInput, SessionLost, Stale, StoreError, StoreUnavailable
from ..model.job import MOST_BYTES_PER_CALL, Held, Reason, Verdict, parts_of
from ..model.session import Claim, Finished
from ..model.states import Move, Transition, fail
from ..store.port import Store

logger = logging.getLogger("fairlane.worker")
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
CLAIM_TRIES = 3
"""How often a claim is made at which the store fails, before endings that have come meanwhile are written."""
PROGRESS_EVERY = 0.1
"""Seconds between two writes of progress; of the reports in between the last one of each job is written."""


def endings_by_call(transitions: Sequence[Transition]) -> list[Sequence[Transition]]:
    """Endings cut into what one call carries."""
    return parts_of(transitions, lambda t: len(t.result or b"") + len(t.error or ""), most_bytes=MOST_BYTES_PER_CALL)


def _report_size(report: tuple[Held, bytes]) -> int:
    return len(report[1])


class Completer:
    """The worker's writing hand: one call in flight at a time."""

    def __init__(self, store: Store, patient: Callable[[], bool]) -> None:
        self._store = store
        self._patient = patient
        """Whether it is still worth waiting for a store that does not answer."""
        self._progress: dict[Held, bytes] = {}
        self._loop = asyncio.get_running_loop()
        self._reported = asyncio.Event()
        self.claim_failed = False
        """Whether the last exchange went without its claim, because the store failed at that."""

    async def exchange(self, session: str, transitions: list[Transition], claim: Claim | None) -> Finished | None:
        """Write endings and claim. None when the store stayed away for longer than it is worth waiting.

        What is too much for one call is written in several, and the last of them claims.
        """
        *before, last = endings_by_call(transitions) or [transitions]
        verdicts: list[Verdict] = []
        for part in before:
            written = await self._exchange(session, part, None)
            if written is None:
                return None
            verdicts += written.verdicts
        finished = await self._exchange(session, last, claim)
        return finished and Finished((*verdicts, *finished.verdicts), finished.claimed) if verdicts else finished

    async def _exchange(self, session: str, transitions: Sequence[Transition], claim: Claim | None) -> Finished | None:
        wait = FIRST_WAIT
        failing = False
        tries = 0
        self.claim_failed = False
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
                if claim is not None and not isinstance(exc, StoreUnavailable):
                    # The store answers, and refuses. If that is because of the claim, the endings must not wait for it;
                    # what it has started all the same is taken back, because no renewal names it.
                    tries += 1
                    if transitions:
                        claim, self.claim_failed = None, True
                    elif tries >= CLAIM_TRIES:
                        logger.error("the store fails at a claim (%s); going on without it", exc)
                        self.claim_failed = True
                        return Finished(())
                await asyncio.sleep(wait * random())
                wait = min(LONGEST_WAIT, wait * 2)
            else:
                if failing:
                    logger.warning("the store answers again")
                return finished

    async def _exchange_apart(
        self, session: str, transitions: Sequence[Transition], claim: Claim | None, exc: InvalidInput
    ) -> Finished | None:
        """One of them is refused for good: it must not hold up the others, nor its job for ever."""
        if len(transitions) > 1:
            middle = len(transitions) // 2
            first = await self._exchange(session, transitions[:middle], None)
            second = await self._exchange(session, transitions[middle:], claim)
            return first and second and Finished((*first.verdicts, *second.verdicts), second.claimed)
        logger.error("the store refuses how a job ended (%s); it is written as failed", exc)
        if not transitions or transitions[0].move is Move.FAIL:
            return Finished(())
        return await self._exchange(session, [fail(transitions[0].held, Reason.ERROR, str(exc))], claim)

    async def _write_last(self, session: str, transitions: Sequence[Transition]) -> None:
        """What a body reported just before it ended is written first: once it has ended, nothing is taken any more."""
        last = [(t.held, value) for t in transitions if (value := self._progress.pop(t.held, None)) is not None]
        if last:
            with contextlib.suppress(StoreError):
                for part in parts_of(last, _report_size, most_bytes=MOST_BYTES_PER_CALL):
                    await self._store.progress(session, part)

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
            while self._progress:
                # What is not sent yet stays where it is: if its job ends meanwhile, it is written before that.
                reports = parts_of(list(self._progress.items()), _report_size, most_bytes=MOST_BYTES_PER_CALL)[0]
                for held, _ in reports:
                    self._progress.pop(held, None)
                with contextlib.suppress(Exception):
                    await self._store.progress(session(), reports)
            await asyncio.sleep(PROGRESS_EVERY)
