"""Writes the results of jobs, all that are ready in one fenced call, and claims the next jobs in the same call.

During an outage the same call is repeated, with the same fences and the same claim number, until the store has
answered, so nothing is lost and nothing happens twice. Progress is written separately, a few times a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from random import Random

from ..errors import InvalidInput, SessionLost, Stale, StoreError, StoreUnavailable
from ..manager.service import FailureTracker
from ..model.job import MOST_BYTES_PER_CALL, Held, Reason, Verdict, parts_of
from ..model.session import Claim, Finished
from ..model.states import Move, Transition, fail
from ..store.port import Store

logger = logging.getLogger("fairlane.worker")
_COMPLETE = Move.COMPLETE
CLAIM_TRIES = 3
"""How often a failing claim is tried before the worker goes on without it, so that results are not held up."""
PROGRESS_EVERY = 0.1
"""Seconds between two writes of progress. Of several reports of one job in between, only the last one is written."""


def endings_by_call(transitions: Sequence[Transition]) -> list[Sequence[Transition]]:
    """Results in parts that fit into one call each."""
    return parts_of(transitions, _transition_size, most_bytes=MOST_BYTES_PER_CALL)


def _transition_size(t: Transition) -> int:
    if t.move is _COMPLETE:
        return len(t.result or b"")
    return len(t.error or "") + len(t.payload or b"")


def _report_size(report: tuple[Held, bytes]) -> int:
    return len(report[1])


class Completer:
    """Writes results and progress of one worker, with one call in flight at a time."""

    def __init__(self, store: Store, may_retry: Callable[[], bool]) -> None:
        self._store = store
        self._may_retry = may_retry
        """Whether to try again when the store fails."""
        self._rng = Random()
        self._progress: dict[Held, bytes] = {}
        self._in_flight: frozenset[Held] = frozenset()
        """The jobs whose progress is being written."""
        self._landed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._reported = asyncio.Event()
        self.claim_failed = False
        """Whether the last exchange was done without its claim: the store failed at it, or has seen a later one."""

    async def exchange(self, session: str, transitions: list[Transition], claim: Claim | None) -> Finished | None:
        """Write results and claim. None when the store failed and `may_retry` returned False.

        Results that are too large for one call are written in several, and the last of them claims.
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
        tries = 0
        failures: FailureTracker | None = None
        self.claim_failed = False
        while True:
            try:
                if self._progress or self._in_flight:
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
                # The claim is older than one the store has seen: the answer was overtaken by a repetition. Claim again.
                claim, self.claim_failed = None, True
            except Exception as exc:
                if not self._may_retry():
                    logger.error("the store does not answer (%s); the rescuer will recover the remaining jobs", exc)
                    return None
                failures = failures or FailureTracker("writing results and claiming", logger, self._rng)
                pause = failures.failed(exc)
                if claim is not None and not isinstance(exc, StoreUnavailable):
                    # The store answers, but fails. If the claim is the cause, results must not wait for it. Jobs that
                    # it started nevertheless are taken back, because no renewal names them.
                    tries += 1
                    if transitions:
                        claim, self.claim_failed = None, True
                    elif tries >= CLAIM_TRIES:
                        logger.error("the store cannot process a claim (%s); going on without it", exc)
                        self.claim_failed = True
                        return Finished(())
                await asyncio.sleep(pause)
            else:
                if failures is not None:
                    failures.worked()
                return finished

    async def _exchange_apart(
        self, session: str, transitions: Sequence[Transition], claim: Claim | None, exc: InvalidInput
    ) -> Finished | None:
        """Write results of which one is rejected for good, so that it holds up neither the others nor its own job."""
        if len(transitions) > 1:
            middle = len(transitions) // 2
            first = await self._exchange(session, transitions[:middle], None)
            second = await self._exchange(session, transitions[middle:], claim)
            return first and second and Finished((*first.verdicts, *second.verdicts), second.claimed)
        logger.error("the store rejects the result of a job (%s); the job is marked as failed", exc)
        if not transitions or transitions[0].move is Move.FAIL:
            return Finished(())
        return await self._exchange(session, [fail(transitions[0].held, Reason.ERROR, str(exc))], claim)

    async def _write_last(self, session: str, transitions: Sequence[Transition]) -> None:
        """Write the last progress of jobs that end: the store accepts none after their end."""
        if self._in_flight and not self._in_flight.isdisjoint(transition.held for transition in transitions):
            # Another connection may carry the end, and overtake the report.
            await self._landed.wait()
        last = [(t.held, value) for t in transitions if (value := self._progress.pop(t.held, None)) is not None]
        if last:
            with contextlib.suppress(StoreError):
                for part in parts_of(last, _report_size, most_bytes=MOST_BYTES_PER_CALL):
                    await self._store.progress(session, part)

    def report(self, held: Held, value: bytes) -> None:
        """Record the latest progress of a job, to be written soon. Never waits; from any thread."""
        self._progress[held] = value
        with contextlib.suppress(RuntimeError):  # the loop is closed: progress is not written any more
            self._loop.call_soon_threadsafe(self._reported.set)

    def forget(self, held: Held) -> None:
        """Drop the progress of a job that has ended: its last report was written with its result."""
        self._progress.pop(held, None)

    async def write_progress(self, session: Callable[[], str]) -> None:
        """Write progress until cancelled. A report that cannot be written is dropped: the next one replaces it."""
        while True:
            await self._reported.wait()
            self._reported.clear()
            while self._progress:
                # The other reports stay in `_progress`: if a job ends meanwhile, its report is written with its result.
                reports = parts_of(list(self._progress.items()), _report_size, most_bytes=MOST_BYTES_PER_CALL)[0]
                for held, _ in reports:
                    self._progress.pop(held, None)
                self._in_flight = frozenset(held for held, _ in reports)
                self._landed.clear()
                try:
                    with contextlib.suppress(Exception):
                        await self._store.progress(session(), reports)
                finally:
                    self._in_flight = frozenset()
                    self._landed.set()
            await asyncio.sleep(PROGRESS_EVERY)
