"""The loop around every service: a pass, then a rest, and a back-off when the store fails.

A service does one bounded piece of work in `run_once` and returns when to call it next. It may assume that no other
call is in progress. The loop ends only by cancellation or by `Stale`, never spins, and logs an outage once when it
begins and once when it is over, however long it lasts.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from random import Random
from typing import NoReturn, Protocol

from ..errors import Stale, StoreError, StoreUnavailable
from ..model.retry import Backoff

BACKOFF = Backoff(base=0.1, factor=2.0, most=5.0)
SHORTEST_PAUSE = 0.01
"""Full jitter may draw almost 0, which would make a busy loop of a call that fails at once."""
JITTER = 0.1
"""A rest is shortened by up to this fraction, so that processes started together do not stay in step."""
SMALL_REST = 0.1
"""A rest of up to this length ends at a known due time; shortening it would only make the pass too early."""


class Service(Protocol):
    """Work that is done in passes."""

    name: str
    """Its name in the log."""

    async def run_once(self) -> float:
        """Do one pass. Returns the seconds until the next one: 0 when this one was full and there is more to do."""


class FailureTracker:
    """Logs the failures of one operation, once for each kind, and computes the pause before the next try."""

    def __init__(self, name: str, log: logging.Logger, rng: Random, backoff: Backoff = BACKOFF) -> None:
        self._name = name
        self._log = log
        self._rng = rng
        self._backoff = backoff
        self._logged: type[Exception] | None = None
        self._failures = 0

    @property
    def failing(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def failed(self, exc: Exception) -> float:
        """Record a failure. Returns the seconds to wait before the next try."""
        if self._logged is not type(exc):
            self._logged = type(exc)
            if isinstance(exc, StoreUnavailable):
                self._log.warning("%s: store unavailable, trying again (%s)", self._name, exc)
            elif isinstance(exc, StoreError):
                self._log.error("%s: the store failed, trying again (%s)", self._name, exc)
            else:
                self._log.error("%s: unexpected error, trying again (%s)", self._name, exc, exc_info=exc)
        self._failures += 1
        return max(SHORTEST_PAUSE, self._backoff.delay(self._failures, self._rng.random()))

    def worked(self) -> None:
        """Record a success."""
        if self._logged is not None:
            self._log.info("%s: works again", self._name)
        self._logged = None
        self._failures = 0


class Loop:
    """Runs one service until its task is cancelled. Belongs to one event loop."""

    def __init__(self, service: Service, log: logging.Logger, rng: Random | None = None) -> None:
        self._service = service
        self._rng = rng or Random()
        self._failures = FailureTracker(service.name, log, self._rng)
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """End the current rest; during a pass, skip the next rest. A pause after a failure is not shortened."""
        self._woken.set()

    async def run(self) -> NoReturn:
        """Run passes until cancelled. Raises `Stale` when the term of the service is over."""
        while True:
            try:
                delay = await self._service.run_once()
            except Stale:
                raise
            except Exception as exc:
                await asyncio.sleep(self._failures.failed(exc))
                continue
            self._failures.worked()
            await self._rest(delay)

    async def _rest(self, delay: float) -> None:
        if delay <= 0:
            # Yield: calls to a store that answers without waiting would otherwise block every other task.
            await asyncio.sleep(0)
            return
        if delay > SMALL_REST:
            delay *= 1 - JITTER * self._rng.random()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._woken.wait()
        self._woken.clear()
