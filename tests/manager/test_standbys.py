"""When a standby tries to lead: when the term that it knows of has ended, and when it is woken; never by a timer.

The wake-ups here do not wait: they let the time that a standby asks for pass at once, on the clock of the store.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from random import Random
from typing import cast

import msgspec
import pytest

from fairlane.manager.election import Election
from fairlane.manager.leader_context import Contact
from fairlane.manager.manager import Manager
from fairlane.model.intervals import Intervals
from fairlane.model.session import Term
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from fairlane.store.wakeups import Subscription, Wakeups

from .faults import faulty
from .waiting import running, until

USUAL = Intervals(lease=30.0)
"""With such a lease a standby does not wait in parts."""
LATEST = USUAL.leader_lease + USUAL.stand
"""A standby tries at least this often."""


class PassingTime:
    """Wake-ups whose subscriptions advance the clock instead of waiting. No hint arrives."""

    def __init__(self, clock: ManualClock, meanwhile: Callable[[float], Awaitable[None]] | None = None) -> None:
        self._clock = clock
        self.meanwhile = meanwhile
        self.rests: list[float] = []

    def subscribe(self, topics: Iterable[str], wake: Callable[[], None] | None = None) -> Subscription:
        return cast(Subscription, self)

    async def wait(self, timeout: float | None = None) -> frozenset[str]:
        assert timeout is not None
        self.rests.append(timeout)
        if self.meanwhile is None:
            self._clock.advance(timeout)
        else:
            await self.meanwhile(timeout)
        return frozenset()

    def close(self) -> None:
        pass


class Fleet:
    """One leader that renews as a manager does, and a standby; both on one store and one clock."""

    def __init__(self, store: Store, clock: ManualClock, *, seed: int = 1) -> None:
        self.store, self.clock = store, clock
        self.through, self.faults = faulty(store)
        self.leader_lives = True
        self.number = 0
        self.renewed_at = clock.monotonic()
        self.time = PassingTime(clock, self.pass_time)
        self.standby = self.candidate("standby", cast(Wakeups, self.time), seed)

    def candidate(self, name: str, wakeups: Wakeups | None, seed: int) -> Election:
        return Election(
            self.through, name, USUAL, Contact(self.clock.monotonic),
            wakeups=wakeups, monotonic=self.clock.monotonic, rng=Random(seed),
        )  # fmt: skip

    async def begin(self, lease: float = USUAL.leader_lease) -> None:
        term = await self.store.lead("leader", lease=lease)
        assert term is not None
        self.number, self.renewed_at = term.number, self.clock.monotonic()

    async def renew(self, lease: float = USUAL.leader_lease) -> None:
        assert await self.store.lead("leader", lease=lease, term=self.number) is not None
        self.renewed_at = self.clock.monotonic()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass; the leader renews meanwhile, as long as it lives."""
        end = self.clock.monotonic() + seconds
        while self.leader_lives and self.renewed_at + USUAL.leader_renew < end:
            self.clock.advance(self.renewed_at + USUAL.leader_renew - self.clock.monotonic())
            await self.renew()
        self.clock.advance(end - self.clock.monotonic())


async def test_a_standby_sleeps_until_the_term_it_knows_of_ends_while_the_leader_renews(
    store: Store, clock: ManualClock
) -> None:
    fleet = Fleet(store, clock)
    await fleet.begin()

    async def meanwhile(seconds: float) -> None:
        fleet.leader_lives = len(fleet.time.rests) < 6
        await fleet.pass_time(seconds)

    fleet.time.meanwhile = meanwhile
    term = await fleet.standby.win()

    assert term == fleet.number + 1
    least = USUAL.leader_lease - USUAL.leader_renew
    assert all(least <= rest <= LATEST for rest in fleet.time.rests[:6]), "no try before the term it knows of ends"
    assert clock.monotonic() - fleet.renewed_at <= LATEST, "and one soon after the last renewal has run out"


async def test_fifty_standbys_make_about_one_attempt_each_per_term_at_different_moments(
    store: Store, clock: ManualClock
) -> None:
    fleet = Fleet(store, clock)
    await fleet.begin()
    standbys = [fleet.candidate(f"standby-{n}", None, n) for n in range(50)]
    due = [(clock.monotonic(), n) for n in range(50)]
    end = clock.monotonic() + 10 * USUAL.leader_lease
    tries: list[float] = []
    while due[0][0] < end:
        at, n = heapq.heappop(due)
        await fleet.pass_time(max(0.0, at - clock.monotonic()))
        assert await standbys[n].ask(None) is None
        tries.append(clock.monotonic())
        heapq.heappush(due, (clock.monotonic() + standbys[n].rest(), n))
    first, *later = (len([at for at in tries if begin <= at - end < begin + 10]) for begin in range(-100, 0, 10))
    assert first <= 100
    assert sum(later) / len(later) <= 60, later

    # The leader dies: one standby takes over, the others see its term, and not all of them at once.
    fleet.leader_lives = False
    tries.clear()
    winner = None
    while winner is None or len(tries) < 50:
        at, n = heapq.heappop(due)
        await fleet.pass_time(max(0.0, at - clock.monotonic()))
        won = await standbys[n].ask(None)
        assert won is None or winner in (None, n)
        if won is not None and winner is None:
            winner = n
            assert clock.monotonic() - fleet.renewed_at <= LATEST
        tries.append(clock.monotonic())
        heapq.heappush(due, (clock.monotonic() + standbys[n].rest(), n))
    assert max(tries) - min(tries) > USUAL.stand / 2, "they are spread"


async def test_a_lost_hint_costs_at_most_the_rest_of_the_term(store: Store, clock: ManualClock) -> None:
    fleet = Fleet(store, clock)
    await fleet.begin()
    resigned_at = 0.0

    async def meanwhile(seconds: float) -> None:
        nonlocal resigned_at
        if not resigned_at:
            clock.advance(1.0)
            seconds -= 1.0
            resigned_at = clock.monotonic()
            await store.resign(fleet.number)
        clock.advance(seconds)

    fleet.time.meanwhile = meanwhile

    assert await fleet.standby.win() == fleet.number + 1
    assert fleet.faults.calls["lead"] == 2
    assert clock.monotonic() - resigned_at <= LATEST - 1.0


async def test_a_term_that_is_shortened_is_noticed_within_a_lease(store: Store, clock: ManualClock) -> None:
    fleet = Fleet(store, clock)
    await fleet.begin(lease=3_600.0)

    async def meanwhile(seconds: float) -> None:
        if len(fleet.time.rests) == 2:
            await fleet.renew(lease=1.0)
        clock.advance(seconds)

    fleet.time.meanwhile = meanwhile

    assert await fleet.standby.win() == fleet.number + 1
    assert len(fleet.time.rests) == 2
    assert max(fleet.time.rests) <= LATEST


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_standby_that_was_suspended_knows_nothing_of_the_others(
    store: Store, clock: ManualClock, suspended: bool
) -> None:
    """They may have been suspended with it, as in a paused container, and had no time to renew their leases."""
    intervals, contact = Intervals(), Contact(clock.monotonic)
    assert await store.lead("leader", lease=intervals.leader_lease) is not None
    time = PassingTime(clock)

    async def meanwhile(seconds: float) -> None:
        # Just long enough that leases have expired which were renewed in time.
        longer = suspended and len(time.rests) == 2
        clock.advance(intervals.lease - intervals.heartbeat + 0.1 if longer else seconds)

    time.meanwhile = meanwhile
    wakeups = cast(Wakeups, time)
    standby = Election(store, "another", intervals, contact, wakeups=wakeups, monotonic=clock.monotonic, rng=Random(1))

    assert await standby.win() == 2
    assert (contact.clean_seconds >= intervals.caution) != suspended


async def test_a_step_of_the_stores_clock_does_not_put_a_standby_to_sleep(store: Store, clock: ManualClock) -> None:
    """Set back by an hour, the term seems to last an hour longer; set forward, it is over at once."""
    fleet = Fleet(store, clock)
    await fleet.begin()
    real = store.lead

    class SetBack:
        wakeups = store.wakeups

        async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
            answer = await real(session, lease=lease, term=term)
            if answer is None or len(fleet.time.rests) >= 3 or answer.session == session:
                return answer
            return msgspec.structs.replace(answer, remaining=answer.remaining + 3_600.0)

    fleet.through = cast(Store, SetBack())
    standby = fleet.candidate("standby", cast(Wakeups, fleet.time), 1)

    async def meanwhile(seconds: float) -> None:
        if len(fleet.time.rests) == 4:
            clock.advance(3_600.0)
        else:
            await fleet.pass_time(seconds)

    fleet.time.meanwhile = meanwhile

    assert await standby.win() == fleet.number + 1
    assert len(fleet.time.rests) == 4
    assert max(fleet.time.rests) <= LATEST


async def test_a_term_that_is_about_to_end_does_not_make_a_busy_loop(store: Store, clock: ManualClock) -> None:
    fleet = Fleet(store, clock, seed=3)
    await fleet.begin()
    fleet.leader_lives = False
    clock.advance(USUAL.leader_lease - 0.001)

    assert await fleet.standby.win() == fleet.number + 1
    assert len(fleet.time.rests) == 1


async def test_standbys_of_a_living_leader_ask_once_and_one_succeeds_it_when_it_resigns(live_store: Store) -> None:
    """By the machine's clock, with real wake-ups: a graceful handover does not wait for the end of the term."""
    intervals = Intervals(leader_lease=60.0, leader_renew=0.2, stand=30.0)
    counted, leader_faults = faulty(live_store)
    leader = Manager(counted, session="leader", intervals=intervals)
    stores = [faulty(live_store) for _ in range(5)]
    standbys = [Manager(made, session=f"standby-{n}", intervals=intervals) for n, (made, _) in enumerate(stores)]
    async with AsyncExitStack() as stack:
        leading = await stack.enter_async_context(running(leader.run()))
        await until(lambda: leader.leads)
        for standby in standbys:
            await stack.enter_async_context(running(standby.run()))
        await until(lambda: leader_faults.calls["lead"] >= 5)
        assert [faults.calls["lead"] for _, faults in stores] == [1] * 5

        leading.cancel()

        # The term would have lasted a minute longer, so a hint brought it.
        await until(lambda: any(standby.leads for standby in standbys))
        assert [standby.term for standby in standbys if standby.leads] == [2]
