"""The election of the leader. A term is a lease with a number; the store grants terms with growing numbers.

The leader trusts its term until a time that it computes *before* the request: the time of the request by the monotonic
clock, plus the lease, less a margin. So the term ends here before it ends in the store, however slow the answer is. A
renewal that fails, is rejected or is not answered ends the trust: leadership only saves work, and the store's fence on
the term provides safety, so stepping down early costs seconds and nothing else.

A standby sleeps until the term that it knows of ends: the store's answer to an attempt that failed says when. So a
leader that renews its term every 3 s is asked about once per lease by each standby, not every second or two. A leader
that resigns wakes the standbys; if that hint is lost, they find out when the term would have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from random import Random
from typing import NoReturn

from ..errors import FairlaneError, StoreUnavailable, TermLost
from ..model.intervals import Intervals
from ..store.port import Store
from ..store.wakeups import LEADER, Subscription, Wakeups
from .leader_context import Contact, Monotonic, log
from .service import FailureTracker


class Election:
    """One candidate: it stands for election, renews its term, and resigns."""

    def __init__(
        self,
        store: Store,
        session: str,
        intervals: Intervals,
        contact: Contact,
        *,
        wakeups: Wakeups | None = None,
        monotonic: Monotonic = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self._store = store
        self._wakeups = wakeups or store.wakeups
        self._session = session
        self._intervals = intervals
        self._contact = contact
        self._monotonic = monotonic
        self._rng = rng or Random()
        self._failures = FailureTracker("election", log, self._rng)
        self._term: int | None = None
        self._deadline = 0.0
        self._remaining = 0.0

    @property
    def term(self) -> int | None:
        """The term in which it leads; None when it does not lead, or no longer trusts its term."""
        return self._term if self._monotonic() < self._deadline else None

    async def win(self) -> int:
        """Stand for election until it leads. Returns the term."""
        subscription = self._wakeups.subscribe([LEADER])
        try:
            while True:
                try:
                    won = await self.ask(None)
                except Exception as exc:
                    await asyncio.sleep(self._failures.failed(exc))
                    continue
                self._failures.worked()
                if won is not None:
                    return won
                await self._sleep(subscription, self.rest())
        finally:
            subscription.close()

    async def _sleep(self, subscription: Subscription, seconds: float) -> None:
        """Wait for a hint, in parts: one that takes far too long shows that this process was suspended, maybe all.

        The others then need time to renew their leases before a new leader may declare any of them dead.
        """
        longest = (self._intervals.lease - self._intervals.heartbeat) / 2
        hint: Collection[str] = ()
        while seconds > 0 and not hint:
            part = min(seconds, longest)
            began = self._monotonic()
            hint = await subscription.wait(part)
            if self._monotonic() - began > part + longest:
                self._contact.forget()
            seconds -= part

    async def keep(self, term: int) -> NoReturn:
        """Renew the term until that fails or the trust is over, then raise `TermLost` with the reason."""
        while True:
            left = self._deadline - self._monotonic()
            await asyncio.sleep(min(self._intervals.leader_renew, max(0.0, left)))
            if self.term is None:
                raise TermLost("the lease ran out before it was renewed")
            try:
                kept = await self.ask(term)
            except Exception as exc:
                raise TermLost(f"the renewal failed: {exc}") from exc
            if kept is None:
                raise TermLost("the renewal was rejected, or answered too late")

    async def ask(self, term: int | None) -> int | None:
        """Request a new term, or the extension of one, once. None when another candidate leads."""
        asked = self._monotonic()
        trust = self._intervals.leader_lease - self._intervals.trust_margin
        # A renewal that hangs is given up when the current trust ends.
        timeout = trust if term is None else self._deadline - asked
        with self._contact.call():
            try:
                async with asyncio.timeout(timeout):
                    answer = await self._store.lead(self._session, lease=self._intervals.leader_lease, term=term)
            except TimeoutError:
                raise StoreUnavailable(f"the store did not answer within {timeout:.1f} s") from None
        if answer is None or answer.session != self._session:
            self.step_down()
            self._remaining = 0.0 if answer is None else answer.remaining
            return None
        self._term, self._deadline = answer.number, asked + trust
        return self.term

    def step_down(self) -> None:
        """Stop leading in this process."""
        self._term = None

    async def resign(self, term: int) -> None:
        """Give up the term in the store, so that a standby need not wait for its end. Errors are ignored."""
        self.step_down()
        with suppress(FairlaneError, TimeoutError):
            async with asyncio.timeout(self._intervals.leader_renew):
                await self._store.resign(term)

    def rest(self) -> float:
        """How long a standby waits before the next try: until the term that it knows of has ended, and a random time
        longer. Never longer than a lease of its own: a term may be shortened, and the store's clock set back.
        """
        return min(self._remaining, self._intervals.leader_lease) + self._intervals.stand * self._rng.random()

    def pause(self) -> float:
        """How long to wait after a lost term, so that other candidates try first."""
        return self._intervals.stand * self._rng.uniform(0.5, 1.0)
