"""Workers that are gone lose their keys in steps: what happens to keys, jobs and newcomers in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fairlane.backends.redis import store as redis_store
from fairlane.backends.redis.store import RedisStore
from fairlane.binding import BindingState, Release
from fairlane.clock import ManualClock
from fairlane.job import Held, JobKind, JobState, Reason
from fairlane.settings import LaneRule
from tests.conformance.kit import Kit, Worker
from tests.conformance.runs import drain, everything
from tests.servers import valkey

KEYS = [f"key-{number}" for number in range(6)]


class DiedError(Exception):
    """Whoever leaves is gone after the first step."""


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisStore]:
    """Each step sees to two keys or jobs."""
    monkeypatch.setattr(redis_store, "MOST_LOST", 2)
    opened = await RedisStore.open(valkey.server().fresh_namespace(), clock=ManualClock())
    yield opened
    await opened.close()


@pytest.fixture
def kit(store: RedisStore) -> Kit:
    clock = store._functions._clock
    assert isinstance(clock, ManualClock)
    return Kit(store, clock)


async def leave_and_die(worker: Worker, patch: pytest.MonkeyPatch) -> None:
    """The first step of a leave, and no more."""
    store = worker.kit.store
    assert isinstance(store, RedisStore)
    call = store._call

    async def dying(verb: str, *arguments: Any) -> Any:
        if verb == "lose":
            raise DiedError
        return await call(verb, *arguments)

    with patch.context() as while_leaving:
        while_leaving.setattr(store, "_call", dying)
        with pytest.raises(DiedError):
            await worker.leave()


async def rescue_all(kit: Kit) -> int:
    """Rescue until there is nothing more to do; returns how many bindings were lost."""
    lost, more = 0, True
    while more:
        rescued = await kit.store.rescue()
        lost, more = lost + rescued.lost_bindings, rescued.more
    return lost


async def states(kit: Kit) -> set[BindingState]:
    return {binding.state for key in KEYS for binding in await kit.store.bindings(key=key, limit=10)}


async def test_a_worker_that_leaves_loses_all_its_keys(store: RedisStore, kit: Kit) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky=key) for key in KEYS for _ in range(3)]
    other = await kit.worker()
    await gone.leave()
    assert [(await kit.job(id)).worker for id in jobs] == [other.name] * len(jobs)
    assert await drain(other) == jobs
    assert (await store.recount()).differences == ()


async def test_the_leader_goes_on_where_whoever_left_has_died(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky=key) for key in KEYS for _ in range(3)]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    assert not await other.claim(100)
    assert await rescue_all(kit) == len(KEYS) - 2
    assert await states(kit) == {BindingState.LOST, BindingState.OPEN}
    assert await drain(other) == jobs
    assert (await store.recount()).differences == ()


async def test_no_step_sees_to_more_than_it_may(kit: Kit) -> None:
    """Keys and jobs alike: one key can have as many jobs as a thousand others."""
    await kit.worker(lease=5.0)
    for key in ("single", "double"):
        for _ in range(7):
            await kit.enqueue(sticky=key)
    kit.clock.advance(6)
    other = await kit.worker()
    before, passes = 0, 0
    while (await kit.store.rescue()).more:
        await other.renew()
        moved = len(await everything(kit, worker=other.name))
        assert moved - before <= 2
        before, passes = moved, passes + 1
    assert passes >= 7
    assert len(await everything(kit, worker=other.name)) == 14


async def test_another_dead_worker_need_not_wait_for_one_with_many_keys(kit: Kit) -> None:
    await kit.worker(lease=5.0)
    for key in KEYS:
        await kit.enqueue(sticky=key)
    busy = await kit.worker(lease=10.0)
    plain = await kit.enqueue()
    await busy.claim(1)
    kit.clock.advance(6)
    await busy.renew(Held(plain, 1))
    assert (await kit.store.rescue()).more
    kit.clock.advance(11)
    rescued = await kit.store.rescue()
    assert rescued.declared == (busy.id,)
    assert rescued.retried == 1


async def test_nobody_gets_an_index_whose_keys_are_being_lost(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inbox still has jobs for keys whose state is gone."""
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky=key) for key in KEYS]
    await leave_and_die(gone, monkeypatch)
    newcomer = await kit.worker()
    assert newcomer.name == "default/1"
    await rescue_all(kit)
    assert sorted(await newcomer.claim_ids(100)) == sorted(jobs)
    assert (await kit.worker()).name == "default/0"


@pytest.mark.parametrize("host", ["localhost", "elsewhere"])
async def test_a_named_worker_gets_its_index_when_the_keys_of_the_one_before_are_lost(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky=key) for key in KEYS]
    await leave_and_die(gone, monkeypatch)
    newcomer = await kit.worker(index=0, host=host)
    assert newcomer.name == "default/0"
    # They were given up: all are bound anew, and none is taken over.
    assert len([binding for key in KEYS for binding in await kit.store.bindings(key=key, limit=10)]) == 2 * len(KEYS)
    await kit.store.admit()
    assert sorted(await newcomer.claim_ids(100)) == sorted(jobs)


async def test_a_named_worker_that_comes_back_in_time_has_its_keys_however_many(kit: Kit) -> None:
    old = await kit.worker(index=3)
    jobs = [await kit.enqueue(sticky=key) for key in KEYS]
    await kit.worker()
    await old.leave()
    back = await kit.worker(index=3)
    assert await back.claim_ids(100) == jobs
    assert await states(kit) == {BindingState.OPEN}


async def test_what_comes_for_a_key_that_is_not_lost_yet_moves_with_it(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky=key) for key in KEYS]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    jobs += [await kit.enqueue(sticky=key) for key in KEYS]
    await rescue_all(kit)
    assert sorted(await drain(other)) == sorted(jobs)
    assert (await store.recount()).differences == ()


async def test_a_key_that_is_not_lost_yet_can_be_released(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await kit.worker()
    for key in KEYS:
        await kit.enqueue(sticky=key)
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    last = KEYS[-1]
    assert await store.release("default", last, kit.new("tidy", id="tidy", kind=JobKind.CLEANUP)) is Release.DRAINING
    await rescue_all(kit)
    tidy = await kit.job("tidy")
    assert (tidy.state, tidy.reason) == (JobState.CANCELLED, Reason.WORKER_LOST)
    assert len(await drain(other)) == len(KEYS)
    assert (await store.recount()).differences == ()


async def test_what_runs_waits_or_is_cleaned_up_at_a_worker_that_dies_goes_as_with_few_keys(
    store: RedisStore, kit: Kit
) -> None:
    await kit.settings("default", LaneRule(pattern="line", limit=1))
    gone = await kit.worker(lease=5.0)
    jobs = [await kit.enqueue(sticky=key, lane="line" if key == KEYS[-1] else None) for key in KEYS for _ in range(2)]
    held = await gone.claim(4)
    await gone.retry(held[0], delay=1.0)
    await store.release("default", KEYS[1], kit.new("tidy", id="tidy", kind=JobKind.CLEANUP))
    kit.clock.advance(6)
    other = await kit.worker(lease=100.0)
    await rescue_all(kit)
    await store.promote()
    kit.clock.advance(60)
    await store.promote()
    assert sorted(await drain(other, batch=3)) == sorted(jobs)
    assert (await kit.job("tidy")).reason is Reason.WORKER_LOST
    assert (await store.recount()).differences == ()
