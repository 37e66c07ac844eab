"""The Redis store, as far as it goes: the modules of the conformance suite that need its verbs and wake-ups alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from inspect import signature

import pytest

from fairlane.backends.redis.store import RedisStore
from fairlane.clock import ManualClock
from fairlane.store import Store
from tests.conformance import (
    test_bindings,
    test_broadcast,
    test_cancel,
    test_claim,
    test_corners,
    test_cron,
    test_enqueue,
    test_fair_order,
    test_find,
    test_finish,
    test_full,
    test_grants,
    test_idle_grants,
    test_lanes,
    test_leader,
    test_leaving,
    test_releases,
    test_rescue,
    test_sessions,
    test_settings,
    test_slots,
    test_stale,
    test_standing,
    test_time,
    test_turns,
    test_unique,
    test_upkeep,
    test_wakeups,
)
from tests.conformance.kit import Kit
from tests.servers import valkey

MODULES = (
    test_bindings, test_broadcast, test_cancel, test_claim, test_corners, test_cron, test_enqueue, test_fair_order,
    test_find, test_finish, test_full, test_grants, test_idle_grants, test_lanes, test_leader, test_leaving,
    test_releases, test_rescue, test_sessions, test_settings, test_slots, test_stale, test_standing, test_time,
    test_turns, test_unique, test_upkeep, test_wakeups,
)  # fmt: skip
for _module in MODULES:
    # What opens a second store does so by a URL, which this store has none yet.
    globals().update(
        {
            name: test
            for name, test in vars(_module).items()
            if name.startswith("test_") and "store_url" not in signature(test).parameters
        }
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def prefix() -> str:
    return valkey.server().fresh_prefix()


@pytest.fixture
async def store(clock: ManualClock, prefix: str) -> AsyncIterator[RedisStore]:
    opened = RedisStore("127.0.0.1", valkey.server().port, prefix, clock)
    yield opened
    await opened.close()


@pytest.fixture
async def ear(clock: ManualClock, prefix: str) -> AsyncIterator[RedisStore]:
    """A second store object on the same namespace."""
    opened = RedisStore("127.0.0.1", valkey.server().port, prefix, clock)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: Store, clock: ManualClock) -> Kit:
    return Kit(store, clock)
