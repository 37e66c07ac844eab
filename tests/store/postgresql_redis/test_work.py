"""How tokens reach workers: one worker for each token, and no token too many or too few after its claim."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from fairlane.model.job import Priority
from fairlane.model.slots import Reserved
from fairlane.store.postgresql_redis import work
from fairlane.store.wakeups import queue_topic

from .bench import ALL, PATIENCE, Bench, until

HIGH, NORMAL, LOW = Priority


async def test_one_token_wakes_one_of_many_workers(bench: Bench) -> None:
    workers = [await bench.waiting() for _ in range(5)]
    for worker in workers:
        await worker.offer(*ALL)
    await bench.kit.enqueue()
    await until(lambda: sum(worker.woken for worker in workers), "a worker is woken")
    await bench.settled()
    await asyncio.sleep(0.1)
    assert sum(worker.woken for worker in workers) == 1


async def test_workers_are_woken_in_turn(bench: Bench) -> None:
    workers = [await bench.waiting() for _ in range(3)]
    for worker in workers:
        await worker.offer(*ALL)

    def have_been_woken(times: int) -> bool:
        return sum(worker.woken for worker in workers) == times

    for done in range(1, 7):
        await bench.kit.enqueue()
        await until(partial(have_been_woken, done), "a worker is woken")
        [woken] = [worker for worker in workers if worker.work._held]
        assert len(await woken.claim()) == 1
        await woken.offer(*ALL)
    assert [worker.woken for worker in workers] == [2, 2, 2]


async def test_nothing_is_popped_before_the_claim_for_the_last_token_is_answered(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    await bench.kit.enqueue()
    await worker.wakes(1)
    await bench.kit.enqueue()
    await bench.has_tokens(1)
    await asyncio.sleep(0.1)
    assert worker.woken == 1
    assert len(bench.tokens()) == 1
    assert len(await worker.claim(1)) == 1
    worker.work.offer(ALL)
    await worker.wakes(2)
    assert bench.tokens() == []


async def test_a_claim_of_several_jobs_removes_their_tokens(bench: Bench) -> None:
    worker = await bench.waiting()
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(6)])
    await bench.has_tokens(6)
    worker.work.offer(ALL)
    await worker.wakes(1)
    assert len(await worker.claim(4)) == 4
    # The four jobs are full measure: the tokens of the other two stay.
    await bench.has_tokens(2)
    worker.work.offer(ALL)
    await worker.wakes(2)
    assert len(await worker.claim(4)) == 2
    await bench.has_tokens(0)


async def test_a_claim_without_a_token_removes_tokens_too(bench: Bench) -> None:
    """It rides on a finish, or is a poll."""
    worker = await bench.waiting()
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(3)])
    await bench.has_tokens(3)
    assert len(await worker.claim(10)) == 3
    await bench.has_tokens(0)


async def test_a_claim_that_finds_nothing_removes_the_tokens_that_are_older(bench: Bench) -> None:
    worker = await bench.waiting()
    other = await bench.kit.worker()
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(8)])
    await bench.has_tokens(8)
    assert len(await other.claim(8)) == 8
    await asyncio.sleep(0.05)
    worker.work.offer(ALL)
    await worker.wakes(1)
    assert await worker.claim() == []
    await bench.has_tokens(0)


async def test_a_token_that_is_younger_than_an_empty_claim_stays(bench: Bench) -> None:
    worker = await bench.waiting()
    other = await bench.kit.worker()
    await worker.offer(*ALL)
    await bench.kit.enqueue()
    await worker.wakes(1)
    assert len(await other.claim()) == 1
    worker.work.claiming()
    claim = worker.worker.everything(1)
    jobs = await bench.store.claim(worker.worker.id, claim)
    # Stored after the claim had searched.
    late = await bench.kit.enqueue()
    await bench.has_tokens(1)
    worker.work.claimed(claim, jobs)
    await bench.settled()
    assert bench.tokens() == [late]


async def test_a_token_without_room_for_its_class_is_given_back_as_the_next(bench: Bench) -> None:
    full = await bench.waiting()
    await full.offer(*ALL)
    # Its slots were filled meanwhile, all but the one reserved for high.
    full.work.offer(frozenset({HIGH}))
    first = await bench.kit.enqueue()
    await bench.has_tokens(1)
    await bench.kit.enqueue()
    assert (await bench.has_tokens(2))[0] == first
    assert full.woken == 0
    # It still waits for high, although its worker has not called it again.
    await bench.kit.enqueue(priority=HIGH)
    await full.wakes(1)
    assert len(bench.tokens()) == 2


async def test_a_worker_that_has_room_again_blocks_on_all_its_lists(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that only an interruption ends it.
    monkeypatch.setattr(work, "BLOCK_SECONDS", 10 * PATIENCE)
    worker = await bench.waiting(slots=4, reserved=Reserved(high=1))
    await worker.offer(HIGH)
    await bench.kit.enqueue(priority=LOW)
    await bench.has_tokens(1, "default", LOW)
    assert worker.woken == 0
    # The call that waits for high alone is interrupted at once.
    worker.work.offer(ALL)
    await worker.wakes(1)
    assert len(await worker.claim()) == 1


async def test_a_worker_that_was_full_during_a_blocking_call_goes_on_waiting_after_it(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    worker.work.offer(frozenset())
    worker.work.offer(ALL)
    # The call ends without a token, as it does after a second.
    [popper] = worker.work._poppers
    worker.work.interrupt(popper.shard, popper._interruption)
    await bench.settled()
    await bench.kit.enqueue()
    await worker.wakes(1)


async def test_a_claim_that_other_jobs_have_filled_leaves_the_tokens_of_its_list(bench: Bench) -> None:
    worker = await bench.waiting("other", "default")
    worker.work.offer(ALL)
    for _ in range(2):
        await bench.kit.enqueue()
    await worker.wakes(1)
    await bench.kit.enqueue(queue="other")
    await bench.has_tokens(1, "other")
    [job] = await worker.claim(1)
    assert job.queue == "other"
    # With room for another job, it claims again for the token that it holds.
    worker.work.offer(ALL)
    await worker.wakes(2)
    worker.work.offer(frozenset())
    await bench.has_tokens(0, "other")
    await bench.has_tokens(2)


async def test_a_claim_that_was_not_made_keeps_the_token(bench: Bench) -> None:
    """It failed, and only the results that it came with were written."""
    worker = await bench.waiting()
    await worker.offer(*ALL)
    await bench.kit.enqueue()
    await worker.wakes(1)
    worker.work.claiming()
    worker.work.offer(ALL)
    await worker.wakes(2)


async def test_an_interruption_that_comes_too_late_does_not_stay(bench: Bench) -> None:
    worker = await bench.waiting()
    shard = bench.store._shards[0]
    worker.work.interrupt(shard, shard.keys.interruption("nobody"))
    await bench.settled()
    assert 0 < bench.server.ask("PTTL", shard.keys.interruption("nobody")) <= 10_000


async def test_a_token_that_arrives_during_the_claim_that_takes_its_job_wakes_no_worker_again(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    worker.work.claiming()
    await bench.kit.enqueue()
    await until(lambda: worker.work._held, "the token arrives")
    assert worker.woken == 0
    claim = worker.worker.everything(10)
    jobs = await bench.store.claim(worker.worker.id, claim)
    worker.work.claimed(claim, jobs)
    assert len(jobs) == 1
    worker.work.offer(ALL)
    await asyncio.sleep(0.05)
    assert worker.woken == 0


async def test_a_token_that_arrives_during_a_claim_that_misses_its_job_wakes_afterwards(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    worker.work.claiming()
    claim = worker.worker.everything(10)
    jobs = await bench.store.claim(worker.worker.id, claim)
    await bench.kit.enqueue()
    await until(lambda: worker.work._held, "the token arrives")
    worker.work.claimed(claim, jobs)
    worker.work.offer(ALL)
    await worker.wakes(1)
    assert len(await worker.claim()) == 1


async def test_a_worker_that_ends_gives_its_token_back(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    await bench.kit.enqueue()
    await worker.wakes(1)
    assert bench.tokens() == []
    worker.work.close()
    await bench.has_tokens(1)


async def test_a_token_given_back_to_a_list_that_is_gone_does_not_stay_for_ever(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    job = await bench.kit.enqueue()
    await worker.wakes(1)
    await bench.store.cancel([job])
    # The leader forgets a list that is empty, and whose queue has no job.
    await bench.sweep()
    worker.work.close()
    await bench.has_tokens(1)
    [shard] = bench.store._shards
    tokens = shard.keys.list("default", NORMAL)
    assert bench.server.ask("PTTL", tokens) > 0
    assert bench.server.ask("SISMEMBER", shard.keys.lists, tokens) == 1, "the leader's pass trims it"


async def test_a_sticky_job_wakes_the_worker_it_is_bound_to(bench: Bench) -> None:
    workers = [await bench.waiting() for _ in range(2)]
    for worker in workers:
        await worker.offer(*ALL)
    await bench.kit.enqueue(sticky="plan-1")
    [bound] = await bench.store.bindings("default", "plan-1")
    bound_to = next(worker for worker in workers if worker.worker.session.index == bound.index)
    await bound_to.wakes(1)
    await bench.settled()
    assert sum(worker.woken for worker in workers) == bound_to.woken
    assert bench.tokens() == []


async def test_a_declined_job_wakes_the_workers_that_may_know_its_task(bench: Bench) -> None:
    choosy = await bench.kit.worker(tasks=("other",))
    knowing = await bench.waiting(tasks=("task",))
    await bench.kit.enqueue()
    await bench.has_tokens(1)
    [job] = await choosy.claim()
    await choosy.decline(job)
    await knowing.wakes(1)
    assert [each.id for each in await knowing.claim()] == [job.id]


async def test_a_hint_of_this_process_wakes_its_own_worker(bench: Bench) -> None:
    worker = await bench.waiting("default", "mail")
    bench.store.wakeups.publish([queue_topic("elsewhere")])
    assert worker.woken == 0
    bench.store.wakeups.publish([queue_topic("mail")])
    await worker.wakes(1)
