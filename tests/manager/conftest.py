"""Stores for the manager's tests: on a manual clock for single passes, on the machine's own for running managers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fairlane.manager.leader_context import COUNTED, Contact, LeaderContext, StoreClock
from fairlane.model.intervals import Intervals
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.conformance.kit import Kit

MakeContext = Callable[..., Awaitable[LeaderContext]]
LONG = 1_000_000.0
"""A lease that a test does not outlive, however far it moves the clock."""


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the store, and of the manager beside it."""
    return ManualClock()


@pytest.fixture
async def store(store_url: str, clock: ManualClock) -> AsyncIterator[Store]:
    """An empty store on a manual clock."""
    opened = await open_store(store_url, clock=clock)
    yield opened
    await opened.close()


@pytest.fixture
async def live_store(store_url: str) -> AsyncIterator[Store]:
    """An empty store on the machine's clock."""
    opened = await open_store(store_url)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: Store, clock: ManualClock) -> Kit:
    """The store on the manual clock, with short names for what tests do."""
    return Kit(store, clock)


@pytest.fixture
def make_context(store: Store, clock: ManualClock) -> MakeContext:
    """Makes the context of a leader that has just been elected; its clocks are the store's."""

    async def make(
        session: str = "leader", through: Store | None = None, contact: Contact | None = None
    ) -> LeaderContext:
        term = await store.lead(session, lease=LONG)
        assert term is not None
        assert term.session == session, "another session leads"
        return LeaderContext(
            store=through or store,
            term=term.number,
            intervals=Intervals(),
            contact=contact or Contact(clock.monotonic),
            clock=StoreClock(clock.monotonic),
            counts=dict.fromkeys(COUNTED, 0),
        )

    return make


@pytest.fixture
async def context(make_context: MakeContext) -> LeaderContext:
    """A leader that has just been elected."""
    return await make_context()
