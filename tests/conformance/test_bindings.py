"""Sticky keys: which worker a key is bound to, who gets its jobs, and what happens when the worker goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from fairlane.errors import IndexTaken
from fairlane.model.binding import Binding, BindingState, Release
from fairlane.model.job import JobKind, JobState, Priority, Reason
from fairlane.model.reading import Gate
from fairlane.model.session import NewSession
from fairlane.model.slots import Reserved
from tests.sizes import sized

from .kit import Kit, Worker

LIVE_BINDINGS = (BindingState.OPEN, BindingState.DRAINING)


async def _binding(kit: Kit, key: str, pool: str = "default") -> Binding:
    """The one binding a key ever had."""
    [binding] = await kit.store.bindings(pool, key)
    return binding


async def _worker_of(kit: Kit, id: str) -> str | None:
    return (await kit.job(id)).worker


async def test_keys_go_to_the_worker_with_the_fewest_bindings_then_to_the_lowest_index(kit: Kit) -> None:
    for index in (2, 0, 1):
        await kit.worker(index=index)
    ids = [await kit.enqueue(sticky=f"plan-{number}") for number in range(7)]
    assert [await _worker_of(kit, id) for id in ids] == [f"default/{index}" for index in (0, 1, 2, 0, 1, 2, 0)]
    assert [(await _binding(kit, f"plan-{number}")).index for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


async def test_a_whole_call_binds_its_keys_one_after_the_other(kit: Kit) -> None:
    for index in range(3):
        await kit.worker(index=index)
    answers = await kit.store.enqueue([kit.new(sticky=f"plan-{number // 2}") for number in range(8)])
    places = [await _worker_of(kit, answer.id) for answer in answers]
    assert places == [f"default/{index}" for index in (0, 0, 1, 1, 2, 2, 0, 0)]


async def test_released_bindings_do_not_count_when_the_next_is_placed(kit: Kit) -> None:
    workers = [await kit.worker(index=index) for index in range(2)]
    for key in ("a", "b", "c"):
        await kit.enqueue(sticky=key)
    for worker in workers:
        await worker.complete(*await worker.claim(10))
    for key in ("a", "c"):
        await kit.store.release("default", key)
    again = await kit.enqueue(sticky="d")
    assert await _worker_of(kit, again) == "default/0"


async def test_every_job_of_a_key_goes_to_its_worker_although_others_have_less_to_do(kit: Kit) -> None:
    first, second = await kit.worker(index=0), await kit.worker(index=1)
    ids = [await kit.enqueue(sticky="plan") for _ in range(5)]
    assert {await _worker_of(kit, id) for id in ids} == {"default/0"}
    assert await second.claim(10) == []
    assert await first.claim_ids(10) == ids
    assert (await _binding(kit, "plan")).state is BindingState.OPEN


async def test_a_bound_job_reaches_its_worker_whatever_queues_that_worker_serves(kit: Kit) -> None:
    owner = await kit.worker("other", index=0)
    serving = await kit.worker("default", index=1)
    id = await kit.enqueue(queue="default", sticky="plan")
    assert await serving.claim(10) == []
    assert await owner.claim_ids(10) == [id]


async def test_the_scope_of_a_key_is_its_pool(kit: Kit) -> None:
    cpu, gpu = await kit.worker(pool="cpu"), await kit.worker(pool="gpu")
    here, there = await kit.enqueue(sticky="plan", pool="cpu"), await kit.enqueue(sticky="plan", pool="gpu")
    assert await cpu.claim_ids(10) == [here]
    assert await gpu.claim_ids(10) == [there]
    assert len(await kit.store.bindings(key="plan")) == 2


async def test_without_a_worker_a_sticky_job_waits_unbound_and_is_bound_when_one_registers(kit: Kit) -> None:
    ids = [await kit.enqueue(sticky=key) for key in ("a", "b", "a")]
    await kit.worker(pool="elsewhere")
    position = await kit.positions(ids[0])
    assert position is not None
    assert position.gate is Gate.UNBOUND
    assert await kit.store.bindings("default") == []
    worker = await kit.worker()
    assert sorted(await worker.claim_ids(10)) == sorted(ids)
    assert [(await _binding(kit, key)).index for key in "ab"] == [0, 0]


async def _renew(worker: Worker) -> None:
    await worker.renew()


async def _register_again(worker: Worker) -> None:
    session = worker.session
    await worker.kit.store.register(
        NewSession(
            id=session.id,
            kind=session.kind,
            lease=session.lease,
            host=session.host,
            queues=session.queues,
            slots=session.slots,
        )
    )


@pytest.mark.parametrize("come_back", [_renew, _register_again])
async def test_what_found_no_live_worker_is_bound_when_the_expired_one_is_back(
    kit: Kit, come_back: Callable[[Worker], Awaitable[None]]
) -> None:
    worker = await kit.worker()
    due = [await kit.enqueue(sticky=key, delay=5) for key in ("a", "b")]
    kit.clock.advance(16)
    await kit.store.promote()
    sent = await kit.enqueue(sticky="a")
    for id in (*due, sent):
        position = await kit.positions(id)
        assert position is not None
        assert position.gate is Gate.UNBOUND
    await come_back(worker)
    late = await kit.enqueue(sticky="a")
    assert [await _worker_of(kit, id) for id in (*due, sent, late)] == ["default/0"] * 4
    assert await kit.store.release("default", "a") is Release.DRAINING
    assert (await kit.store.admit()).admitted == 0
    assert (await _binding(kit, "a")).state is BindingState.DRAINING, "no job of the key came since its release"
    first = await worker.claim(10)
    assert [job.id for job in first] == [*due, sent, late]
    await worker.complete(*first)
    assert (await _binding(kit, "a")).state is BindingState.RELEASED
    assert (await kit.store.recount()).differences == ()


async def test_a_stopping_worker_that_renews_late_gets_nothing_that_waits_unbound(kit: Kit) -> None:
    worker = await kit.worker()
    kit.clock.advance(16)
    id = await kit.enqueue(sticky="a")
    await worker.renew(stopping=True)
    assert await _worker_of(kit, id) is None
    assert await kit.store.bindings() == []


async def test_a_direct_job_waits_for_its_index_and_makes_no_binding(kit: Kit) -> None:
    other = await kit.worker(index=0)
    id = await kit.enqueue(worker=2)
    assert await other.claim(10) == []
    position = await kit.positions(id)
    assert position is not None
    assert (position.gate, position.worker) == (Gate.WORKER_GONE, "default/2")
    worker = await kit.worker(index=2)
    assert await worker.claim_ids(10) == [id]
    assert await kit.store.bindings() == []


async def test_a_direct_job_whose_worker_never_comes_expires(kit: Kit) -> None:
    id = await kit.enqueue(worker=2, expires=30)
    kit.clock.advance(31)
    await kit.store.promote()
    job = await kit.job(id)
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.EXPIRED)


async def test_a_stopping_worker_gets_no_new_bindings_and_keeps_the_ones_it_has(kit: Kit) -> None:
    stopping = await kit.worker(index=0)
    await kit.worker(index=1)
    await kit.enqueue(sticky="old")
    await stopping.renew(stopping=True)
    ids = [await kit.enqueue(sticky=f"new-{number}") for number in range(3)]
    assert {await _worker_of(kit, id) for id in ids} == {"default/1"}
    assert await _worker_of(kit, await kit.enqueue(sticky="old")) == "default/0"


async def test_a_lone_stopping_worker_leaves_a_new_key_unbound(kit: Kit) -> None:
    worker = await kit.worker()
    await worker.renew(stopping=True)
    id = await kit.enqueue(sticky="plan")
    position = await kit.positions(id)
    assert position is not None
    assert position.gate is Gate.UNBOUND


async def _lose(kit: Kit, *staying: Worker) -> int:
    """Let the leases of all other workers end. Returns how many bindings were lost."""
    kit.clock.advance(16)
    for worker in staying:
        await worker.renew()
    return (await kit.store.rescue()).lost_bindings


async def test_a_lost_worker_loses_its_bindings_and_its_waiting_jobs_move(kit: Kit) -> None:
    lost, stays = await kit.worker(index=0), await kit.worker(index=1)
    began = await kit.enqueue(sticky="plan")
    waits = await kit.enqueue(sticky="plan")
    assert await lost.claim_ids(1) == [began]
    assert await _lose(kit, stays) == 1
    history = await kit.store.bindings("default", "plan")
    assert [(binding.state, binding.index) for binding in history] == [
        (BindingState.OPEN, 1),
        (BindingState.LOST, 0),
    ]
    assert history[1].closed_at == kit.clock.now()
    assert sorted(await stays.claim_ids(10)) == sorted([began, waits])


async def test_jobs_of_a_lost_worker_wait_unbound_when_no_worker_is_left(kit: Kit) -> None:
    await kit.worker(index=0)
    id = await kit.enqueue(sticky="plan")
    assert await _lose(kit) == 1
    position = await kit.positions(id)
    assert position is not None
    assert position.gate is Gate.UNBOUND
    worker = await kit.worker(index=5)
    assert await worker.claim_ids(10) == [id]


@pytest.mark.parametrize("started", [False, True])
async def test_the_clean_up_of_a_lost_worker_is_cancelled_and_not_moved(kit: Kit, started: bool) -> None:
    lost, stays = await kit.worker(index=0), await kit.worker(index=1)
    await kit.enqueue(sticky="plan")
    await lost.complete(*await lost.claim())
    cleanup = kit.new("tidy", kind=JobKind.CLEANUP)
    await kit.store.release("default", "plan", cleanup)
    if started:
        assert await lost.claim_ids() == [cleanup.id]
    await _lose(kit, stays)
    job = await kit.job(cleanup.id)
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.WORKER_LOST)
    assert (await _binding(kit, "plan")).state is BindingState.LOST
    assert await stays.claim(10) == []


async def test_a_job_behind_the_running_clean_up_of_a_lost_worker_moves(kit: Kit) -> None:
    lost, stays = await kit.worker(index=0), await kit.worker(index=1)
    await kit.enqueue(sticky="plan")
    await lost.complete(*await lost.claim())
    await kit.store.release("default", "plan", kit.new("tidy", kind=JobKind.CLEANUP))
    await lost.claim()
    late = await kit.enqueue(sticky="plan")
    await _lose(kit, stays)
    assert await stays.claim_ids(10) == [late]
    assert [b.state for b in await kit.store.bindings("default", "plan")] == [BindingState.OPEN, BindingState.LOST]


async def test_an_automatic_index_gives_its_bindings_up_when_it_leaves(kit: Kit) -> None:
    leaving, stays = await kit.worker(), await kit.worker()
    id = await kit.enqueue(sticky="plan")
    assert await _worker_of(kit, id) == leaving.name
    await leaving.leave()
    assert await stays.claim_ids(10) == [id]
    now, before = await kit.store.bindings("default", "plan")
    assert (now.state, now.index) == (BindingState.OPEN, 1)
    assert (before.state, before.index) == (BindingState.LOST, 0)


async def test_a_named_index_keeps_its_bindings_when_it_comes_back_within_the_lease(kit: Kit) -> None:
    leaving, other = await kit.worker(index=0), await kit.worker(index=1)
    id = await kit.enqueue(sticky="plan")
    await leaving.leave()
    kit.clock.advance(10)
    await other.renew()
    assert (await kit.store.rescue()).lost_bindings == 0
    assert await other.claim(10) == []
    back = await kit.worker(index=0)
    assert await back.claim_ids(10) == [id]
    binding = await _binding(kit, "plan")
    assert (binding.state, binding.index) == (BindingState.OPEN, 0)


async def test_a_named_index_that_does_not_come_back_within_the_lease_loses_its_bindings(kit: Kit) -> None:
    leaving, other = await kit.worker(index=0), await kit.worker(index=1)
    id = await kit.enqueue(sticky="plan")
    await leaving.leave()
    assert await _lose(kit, other) == 1
    assert await other.claim_ids(10) == [id]


async def test_a_named_index_taken_over_on_the_same_host_comes_with_its_bindings(kit: Kit) -> None:
    old = await kit.worker(index=0, host="alpha")
    began, waits = await kit.enqueue(sticky="plan"), await kit.enqueue(sticky="plan")
    assert await old.claim_ids(1) == [began]
    with pytest.raises(IndexTaken):
        await kit.worker(index=0, host="beta")
    new = await kit.worker(index=0, host="alpha")
    assert sorted(await new.claim_ids(10)) == sorted([began, waits])
    assert (await _binding(kit, "plan")).state is BindingState.OPEN


async def test_a_high_job_of_a_bound_key_uses_the_reserved_slot_of_its_worker(kit: Kit) -> None:
    owner = await kit.worker(slots=3, reserved=Reserved(high=1), index=1)
    long = [await kit.enqueue(sticky="p", priority=Priority.LOW) for _ in range(2)]
    assert await owner.claim_ids(10) == long
    idle = await kit.worker(slots=3, reserved=Reserved(high=1), index=0)
    low = await kit.enqueue(sticky="p", priority=Priority.LOW)
    high = await kit.enqueue(sticky="p", priority=Priority.HIGH)
    new = await kit.enqueue(sticky="q", priority=Priority.LOW)
    assert await owner.claim_ids(10) == [high]
    assert await idle.claim_ids(10) == [new]
    assert await kit.state(low) is JobState.PENDING


async def test_a_scheduled_job_of_a_key_is_bound_when_it_arrives(kit: Kit) -> None:
    worker = await kit.worker()
    id = await kit.enqueue(sticky="plan", delay=60)
    assert await kit.store.bindings() == []
    kit.clock.advance(60)
    await worker.renew()
    await kit.store.promote()
    assert await worker.claim_ids(10) == [id]
    assert (await _binding(kit, "plan")).state is BindingState.OPEN


async def test_a_binding_that_was_not_used_for_a_day_is_drained(kit: Kit) -> None:
    worker = await kit.worker()
    for key in ("idle", "used"):
        await kit.enqueue(sticky=key)
    await worker.complete(*await worker.claim(10))
    kit.clock.advance(43_200)
    await worker.renew()
    await kit.enqueue(sticky="used")
    await worker.complete(*await worker.claim(10))
    kit.clock.advance(43_201)
    await worker.renew()
    rescued = await kit.store.rescue()
    assert (rescued.drained, rescued.lost_bindings) == (1, 0)
    assert (await _binding(kit, "idle")).state is BindingState.RELEASED
    assert (await _binding(kit, "used")).state is BindingState.OPEN


async def test_a_binding_is_idle_only_since_its_last_job_ended(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(sticky="plan")
    claimed = await worker.claim()
    kit.clock.advance(86_000)
    await worker.renew(*claimed)
    await worker.complete(*claimed)
    kit.clock.advance(1_000)
    await worker.renew()
    assert (await kit.store.rescue()).drained == 0
    assert (await _binding(kit, "plan")).state is BindingState.OPEN


async def test_a_binding_with_waiting_jobs_is_not_idle(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.settings(paused=True)
    id = await kit.enqueue(sticky="plan")
    kit.clock.advance(90_000)
    await worker.renew()
    assert (await kit.store.rescue()).drained == 0
    await kit.settings(version=1)
    assert await worker.claim_ids(10) == [id]


@pytest.mark.parametrize("seed", sized([1], [1, 2]))
async def test_a_key_never_has_two_live_bindings_whatever_comes_and_goes(kit: Kit, seed: int) -> None:
    rng = Random(seed)
    workers: list[Worker] = []
    keys = [f"plan-{number}" for number in range(4)]
    for _ in range(80):
        match rng.randrange(6):
            case 0:
                workers.append(await kit.worker())
            case 1 if workers:
                await workers.pop(rng.randrange(len(workers))).leave()
            case 2 if workers:
                # A session that does not renew is lost.
                workers = [worker for worker in workers if rng.random() < 0.7]
                await _lose(kit, *workers)
            case 3:
                cleanup = kit.new("tidy", kind=JobKind.CLEANUP) if rng.random() < 0.5 else None
                await kit.store.release("default", rng.choice(keys), cleanup)
            case 4 if workers:
                worker = rng.choice(workers)
                await worker.complete(*await worker.claim(rng.randrange(5)))
            case _:
                await kit.enqueue(sticky=rng.choice(keys))
        live = [b for b in await kit.store.bindings(limit=500) if b.state in LIVE_BINDINGS]
        assert all(count == 1 for count in Counter(binding.key for binding in live).values()), live
    assert (await kit.store.recount()).differences == ()
