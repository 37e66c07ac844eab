"""Workers that are gone lose their keys in steps: what happens to keys, jobs and newcomers in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from fairlane.model.binding import BindingState, Release
from fairlane.model.ids import new_id
from fairlane.model.job import Held, JobKind, JobState, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.session import NewSession, SessionKind
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Slots
from fairlane.store.clock import ManualClock
from fairlane.store.redis import encoding
from fairlane.store.redis import store as redis_store
from fairlane.store.redis.encoding import encode
from fairlane.store.redis.store import RedisStore
from tests.conformance.kit import Kit, Worker
from tests.conformance.runs import drain, everything
from tests.servers import valkey

KEYS = [f"key-{number}" for number in range(6)]


class DiedError(Exception):
    """The process that leaves dies after the first step."""


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisStore]:
    """Each step sees to two keys or jobs."""
    monkeypatch.setattr(redis_store, "MOST_MOVED_KEYS", 2)
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


async def test_the_leader_continues_for_a_process_that_died_while_leaving(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky=key) for key in KEYS for _ in range(3)]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    assert len(await everything(kit, worker=gone.name)) > 2 * len(KEYS)
    assert await rescue_all(kit) == len(KEYS) - 1
    assert await states(kit) == {BindingState.LOST, BindingState.OPEN}
    assert await drain(other) == jobs
    assert (await store.recount()).differences == ()


async def test_no_step_moves_more_than_its_limit(kit: Kit) -> None:
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


async def test_an_index_is_not_assigned_while_its_keys_are_being_released(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_a_call_to_leave_that_is_repeated_goes_on(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky=key) for key in KEYS]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    await gone.leave()
    assert {(await kit.job(id)).worker for id in jobs} == {other.name}


async def test_one_key_is_not_at_two_workers_when_the_old_host_comes_back_between_steps(
    store: RedisStore, kit: Kit
) -> None:
    old = await kit.worker(index=3, host="here")
    jobs = [await kit.enqueue(sticky="key") for _ in range(6)]
    other = await kit.worker(index=1)
    await old.leave()
    elsewhere = NewSession(
        id=new_id(), kind=SessionKind.WORKER, lease=15.0, host="elsewhere", index=3, slots=Slots(total=1)
    )
    # Another host asks for the index, and dies after the first step.
    assert (await store._call("register", encode(encoding.session_of(elsewhere)), 2))["more"]
    back = await kit.worker(index=3, host="here")
    jobs.append(await kit.enqueue(sticky="key"))
    ran = [await drain(worker) for worker in (other, back)]
    assert sorted(ran, key=len) == [[], jobs]


async def test_the_index_of_a_forgotten_worker_is_not_assigned_before_its_keys_are_released(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky="key") for _ in range(6)]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    kit.clock.advance(1)
    await store.prune(Retention(history_seconds=0), limit=1_000)
    newcomer = await kit.worker(host="elsewhere")
    assert newcomer.name == "default/2"
    named = await kit.worker(index=0, host="elsewhere")
    assert not await named.claim(10)
    assert await drain(other) == jobs


async def test_a_key_can_be_released_at_any_moment(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await kit.worker()
    for key in KEYS:
        await kit.enqueue(sticky=key)
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    for key in KEYS:
        assert await store.release("default", key, None) is Release.DRAINING
    await rescue_all(kit)
    assert len(await drain(other)) == len(KEYS)


@pytest.mark.parametrize("late", [False, True])
async def test_a_clean_up_waits_for_the_jobs_of_its_key_that_have_not_moved_yet(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky="key") for _ in range(6)]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    if late:
        jobs.append(await kit.enqueue(sticky="key"))
    ran = await drain(other)
    await store.release("default", "key", kit.new("tidy", id="tidy", kind=JobKind.CLEANUP))
    ran += await drain(other)
    assert ran
    assert "tidy" not in ran
    await rescue_all(kit)
    ran += await drain(other)
    # Older jobs that move are no late ones, which would have cancelled it.
    assert sorted(ran[:-1]) == sorted(jobs)
    assert ran[-1] == "tidy"
    assert (await store.recount()).differences == ()


@pytest.mark.parametrize("retries", [0, 3])
async def test_a_clean_up_that_runs_at_a_worker_that_dies_is_cancelled_however_many_keys_it_has(
    store: RedisStore, kit: Kit, retries: int
) -> None:
    gone = await kit.worker(lease=5.0)
    for key in KEYS:
        await kit.enqueue(sticky=key)
    await gone.complete(*await gone.claim(10))
    await store.release("default", KEYS[-1], kit.new("tidy", id="tidy", kind=JobKind.CLEANUP, retries=retries))
    assert await gone.claim_ids(10) == ["tidy"]
    behind = await kit.enqueue(sticky=KEYS[-1])
    kit.clock.advance(6)
    other = await kit.worker()
    await rescue_all(kit)
    tidy = await kit.job("tidy")
    assert (tidy.state, tidy.reason) == (JobState.CANCELLED, Reason.WORKER_LOST)
    assert await drain(other) == [behind]


async def test_a_key_whose_next_worker_dies_as_well_moves_on(store: RedisStore, kit: Kit) -> None:
    await kit.worker(lease=5.0)
    jobs = [await kit.enqueue(sticky="key") for _ in range(9)]
    await kit.worker(lease=7.0)
    kit.clock.advance(6)
    assert (await store.rescue()).more
    kit.clock.advance(2)
    last = await kit.worker()
    jobs.append(await kit.enqueue(sticky="key"))
    await rescue_all(kit)
    assert sorted(await drain(last)) == sorted(jobs)
    with redis.Redis(port=valkey.server().port) as client:
        prefix = store._functions._prefix
        assert not client.keys(f"{prefix}*lost:*"), "nothing is left of it"
    assert (await store.recount()).differences == ()


async def test_a_key_is_cleaned_up_when_the_last_of_its_jobs_was_cancelled_instead_of_moved(
    store: RedisStore, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = await kit.worker()
    jobs = [await kit.enqueue(sticky="key") for _ in range(6)]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    ran = await drain(other)
    await store.release("default", "key", kit.new("tidy", id="tidy", kind=JobKind.CLEANUP))
    await store.cancel([id for id in jobs if id not in ran])
    await rescue_all(kit)
    assert await drain(other) == ["tidy"]


async def test_a_key_whose_jobs_fit_into_a_step_moves_as_a_whole(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "MOST_MOVED_KEYS", 4)
    gone = await kit.worker()
    await kit.enqueue(sticky="first")
    second = [await kit.enqueue(sticky="second") for _ in range(3)]
    other = await kit.worker()
    await leave_and_die(gone, monkeypatch)
    assert [(await kit.job(id)).worker for id in second] == [gone.name] * 3
    await kit.store.rescue()
    assert [(await kit.job(id)).worker for id in second] == [other.name] * 3
