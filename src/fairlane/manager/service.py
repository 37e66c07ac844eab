"""The loop around every service, written once: a pass, then a rest, and patience when the store fails.

A service does one bounded piece of work in `run_once` and says when to come back. It may assume that nobody
else calls it meanwhile. The loop promises: it ends only by cancellation or by `Stale`, never spins, and tells
of trouble once when it begins and once when it is over, however long it lasts.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from random import Random
from typing import NoReturn, Protocol

from ..errors import Stale, StoreError, StoreUnavailable
from ..model.retry import Backoff

PATIENCE = Backoff(base=0.1, factor=2.0, most=5.0)
SHORTEST_PAUSE = 0.01
"""Full jitter may draw next to nothing, and a failing call that returns at once would then be a busy loop."""
JITTER = 0.1
"""A rest is shorter by up to this part, so that processes started together do not stay in step."""
SMALL_REST = 0.1
"""A rest as short as this waits for a known moment: made shorter, it would only bring a pass too early."""


class Service(Protocol):
    """Work that is done again and again."""

    name: str
    """What the log calls it."""

    async def run_once(self) -> float:
        """Do one pass. Returns the seconds until the next: 0 when this one was full, and more waits."""


class FailureTracker:
    """How failures of one thing are told, once for each change, and how long to wait before it is tried again."""

    def __init__(self, name: str, log: logging.Logger, rng: Random) -> None:
        self._name = name
        self._log = log
        self._rng = rng
        self._told: type[Exception] | None = None
        self._failures = 0

    def failed(self, exc: Exception) -> float:
        """It failed. Returns the seconds to wait."""
        if self._told is not type(exc):
            self._told = type(exc)
            if isinstance(exc, StoreUnavailable):
                self._log.warning("%s: store unavailable, trying again (%s)", self._name, exc)
            elif isinstance(exc, StoreError):
                self._log.error("%s: the store failed, trying again (%s)", self._name, exc)
            else:
                self._log.error("%s: unexpected error, trying again", self._name, exc_info=exc)
        self._failures += 1
        return max(SHORTEST_PAUSE, PATIENCE.delay(self._failures, self._rng.random()))

    def worked(self) -> None:
        """It worked."""
        if self._told is not None:
            self._log.info("%s: works again", self._name)
        self._told = None
        self._failures = 0


class Loop:
    """Runs one service for as long as its task lives. Used from one event loop."""

    def __init__(self, service: Service, log: logging.Logger, rng: Random | None = None) -> None:
        self._service = service
        self._rng = rng or Random()
        self._failures = FailureTracker(service.name, log, self._rng)
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """End the present rest; during a pass, skip the one after it. A pause after a failure is not cut short."""
        self._woken.set()

    async def run(self) -> NoReturn:
        """Pass after pass, until cancelled. Raises `Stale` when the service has lost its right to go on."""
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
            # A store that answers without waiting would otherwise keep every other task from running.
            await asyncio.sleep(0)
            return
        if delay > SMALL_REST:
            delay *= 1 - JITTER * self._rng.random()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._woken.wait()
        self._woken.clear()
