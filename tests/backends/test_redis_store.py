"""The Redis store, as far as it goes: the modules of the conformance suite that need nothing but its verbs."""

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
)
from tests.conformance.kit import Kit
from tests.servers import valkey

MODULES = (
    test_bindings, test_broadcast, test_cancel, test_claim, test_cron, test_enqueue, test_fair_order, test_find,
    test_finish, test_full, test_grants, test_idle_grants, test_lanes, test_leader, test_leaving, test_releases,
    test_rescue, test_sessions, test_settings, test_slots, test_stale, test_standing, test_time, test_turns,
    test_unique, test_upkeep,
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
async def store(clock: ManualClock) -> AsyncIterator[RedisStore]:
    server = valkey.server()
    opened = RedisStore("127.0.0.1", server.port, server.fresh_prefix(), clock)
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: Store, clock: ManualClock) -> Kit:
    return Kit(store, clock)
