"""Which jobs get tokens, and when: one for each claimable job, never more than workers have slots."""

from __future__ import annotations

import asyncio

import pytest

from fairlane.model.job import Priority
from fairlane.model.settings import LaneRule
from fairlane.model.states import complete
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql_redis.dispatcher import Claimable

from .bench import Bench, until


async def test_each_claimable_job_has_a_token_in_the_list_of_its_queue_and_class(bench: Bench) -> None:
    await bench.kit.worker(slots=10)
    first = await bench.kit.enqueue()
    await bench.has_tokens(1)
    second = await bench.kit.enqueue()
    urgent = await bench.kit.enqueue(priority=Priority.HIGH)
    other = await bench.kit.enqueue(queue="other", priority=Priority.LOW)
    assert await bench.has_tokens(2) == [first, second]
    assert await bench.has_tokens(1, "default", Priority.HIGH) == [urgent]
    assert await bench.has_tokens(1, "other", Priority.LOW) == [other]


async def test_many_jobs_of_one_call_have_as_many_tokens(bench: Bench) -> None:
    await bench.kit.worker(slots=50)
    await bench.sweep()
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(30)])
    await bench.has_tokens(30)
    await bench.kit.enqueue_all([bench.kit.new(lane=f"user:{n % 3}", queue="lanes") for n in range(30)])
    await bench.has_tokens(30, "lanes")


async def test_tokens_are_never_more_than_workers_have_slots(bench: Bench) -> None:
    await bench.kit.worker(slots=7)
    await bench.sweep()
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(100)])
    await bench.has_tokens(7)
    await bench.kit.enqueue()
    await bench.settled()
    await bench.sweep()
    assert len(bench.tokens()) == 7


async def test_tokens_of_many_jobs_and_queues_are_pushed_by_one_short_script(fragile: Bench) -> None:
    queues = [f"q{n}" for n in range(10)]
    await fragile.kit.worker(*queues, slots=100)
    await fragile.sweep()
    await fragile.settled()
    fragile.server.ask("CONFIG", "RESETSTAT")
    await fragile.store.enqueue([fragile.kit.new(queue=queues[n % 10]) for n in range(1_000)])
    for queue in queues:
        await fragile.has_tokens(100, queue)
    found = fragile.server.ask("INFO", "commandstats")
    scripts = {name: found[name] for name in ("cmdstat_eval", "cmdstat_evalsha") if name in found}
    answered = sum(each["calls"] - each.get("failed_calls", 0) for each in scripts.values())
    assert answered == 1, scripts
    assert sum(each["usec"] for each in scripts.values()) < 100_000, scripts


async def test_jobs_that_are_stored_while_another_call_has_the_locks_get_tokens(bench: Bench, database: str) -> None:
    await bench.kit.enqueue(queue="elsewhere")
    await bench.kit.settings("default")
    other = await driver().connect(database)
    try:
        await other.execute(
            "SELECT pg_advisory_lock(pg_typeof(NULL::fairlane.queue)::oid::integer, id) FROM fairlane.queue "
            "WHERE name = 'default'"
        )
        jobs = [bench.kit.new(lane=f"user:{n}") for n in range(3)]
        await bench.kit.enqueue_all([*jobs, bench.kit.new(delay=60)])
        await bench.has_tokens(3)
    finally:
        await other.close()
    worker = await bench.kit.worker()
    assert len(await worker.claim(10)) == 3


async def test_a_count_that_another_call_has_asked_for_is_made(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = bench.store._dispatcher()
    real = dispatcher._count
    counted: list[str] = []
    goes_on = asyncio.Event()

    async def count(queues: list[str] | None) -> Claimable:
        counted.extend(queues or ())
        await goes_on.wait()
        return await real(queues)

    monkeypatch.setattr(dispatcher, "_count", count)
    dispatcher.count(["elsewhere"])
    await until(lambda: counted, "a count is under way")
    # A promotion, and then jobs whose tokens need no count.
    dispatcher.count(["default"])
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(2)])
    goes_on.set()
    await bench.settled()
    assert counted == ["elsewhere", "default"]


async def test_a_job_that_is_stored_already_gets_no_second_token(bench: Bench) -> None:
    await bench.kit.enqueue(id="once")
    await bench.has_tokens(1)
    for _ in range(2):
        await bench.kit.enqueue(id="once")
    await bench.settled()
    assert bench.tokens() == ["once"]


async def test_a_delayed_job_gets_its_token_when_it_is_due(bench: Bench) -> None:
    await bench.kit.enqueue(delay=0.2)
    await bench.settled()
    assert bench.tokens() == []

    async def promoted() -> bool:
        return (await bench.store.promote()).promoted > 0

    await until(promoted, "the job is due")
    await bench.has_tokens(1)


async def test_delayed_jobs_get_their_tokens_beside_jobs_that_are_claimable_already(bench: Bench) -> None:
    await bench.kit.worker(slots=10)
    await bench.kit.enqueue()
    await bench.has_tokens(1)
    await bench.kit.enqueue_all([bench.kit.new(delay=0.01) for _ in range(3)])
    await asyncio.sleep(0.02)
    assert (await bench.store.promote()).promoted == 3
    await bench.has_tokens(4)


async def test_a_promotion_counts_its_own_queues_and_no_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promotions follow each other all the time where jobs are retried, and counting every queue takes long."""
    await bench.kit.enqueue_all([bench.kit.new(queue=f"q{n}") for n in range(5)])
    await bench.kit.enqueue(queue="default")
    await bench.kit.enqueue_all([bench.kit.new(queue=queue, delay=0.01) for queue in ("default", "fresh")])
    await bench.settled()
    dispatcher = bench.store._dispatcher()
    real = dispatcher._count
    counted: list[str | None] = []

    async def count(queues: list[str] | None) -> Claimable:
        counted.extend(queues or (None,))
        return await real(queues)

    monkeypatch.setattr(dispatcher, "_count", count)
    await asyncio.sleep(0.02)
    assert (await bench.store.promote()).promoted == 2
    await bench.has_tokens(2)
    await bench.has_tokens(1, "fresh")
    await bench.settled()
    assert set(counted) == {"default", "fresh"}


async def test_of_a_lane_at_its_limit_only_the_next_job_has_a_token(bench: Bench) -> None:
    await bench.kit.settings("default", LaneRule(pattern="only", limit=1))
    worker = await bench.kit.worker(slots=10)
    await bench.kit.enqueue_all([bench.kit.new(lane="only") for _ in range(5)])
    await bench.has_tokens(1)
    await bench.lose_tokens()
    [first] = await worker.claim(10)
    await bench.settled()
    assert bench.tokens() == []
    await worker.complete(first)
    # The next one is granted the place in the same step.
    await bench.has_tokens(1)


async def test_a_paused_queue_has_no_tokens_until_it_is_resumed(bench: Bench) -> None:
    await bench.kit.settings("default", paused=True)
    await bench.kit.enqueue_all([bench.kit.new(lane="a") for _ in range(3)])
    await bench.settled()
    await bench.sweep()
    assert bench.tokens() == []
    await bench.kit.worker(slots=10)
    await bench.kit.settings("default", version=1)
    await bench.has_tokens(3)


async def test_a_queue_at_its_limit_has_tokens_for_its_room(bench: Bench) -> None:
    await bench.kit.settings("default", limit=2)
    worker = await bench.kit.worker(slots=10)
    await bench.kit.enqueue_all([bench.kit.new(lane="a") for _ in range(5)])
    await bench.has_tokens(2)
    taken = await worker.claim(10)
    assert len(taken) == 2
    await bench.lose_tokens()
    await bench.sweep()
    assert bench.tokens() == []
    await worker.complete(taken[0])
    await bench.has_tokens(1)


async def test_a_job_that_comes_back_has_a_token_again(bench: Bench) -> None:
    worker = await bench.kit.worker()
    await bench.kit.enqueue()
    await bench.has_tokens(1)
    [job] = await worker.claim()
    await bench.lose_tokens()
    await worker.hand_back(job)
    await bench.has_tokens(1)


async def test_a_job_of_a_users_transaction_has_a_token_with_the_leaders_next_pass(bench: Bench) -> None:
    connection = await driver().connect(bench.store._address.dsn)
    job = bench.kit.new()
    await bench.store.transactions.prepare([job])
    async with connection.transaction():
        await bench.store.transactions.enqueue_on(connection, [job])
        await bench.sweep()
        assert bench.tokens() == []
    await connection.close()
    await bench.sweep()
    await bench.has_tokens(1)


@pytest.mark.parametrize("ends", ["committed", "rolled back"])
async def test_a_job_of_a_body_transaction_has_a_token_with_its_commit(bench: Bench, ends: str) -> None:
    worker = await bench.kit.worker(slots=10)
    await bench.kit.enqueue(queue="default")
    [first] = await worker.claim(10)
    await bench.sweep()
    before = bench.tokens("other")
    transaction = await bench.store.transactions.begin()
    job = bench.kit.new(queue="other")
    await bench.store.transactions.prepare([job])
    await bench.store.transactions.enqueue_on(transaction.connection, [job])
    if ends == "committed":
        assert await transaction.commit(worker.id, complete(first.held, b"1"), None)
        assert await bench.has_tokens(1, "other") == [job.id]
    else:
        await transaction.roll_back()
        await bench.settled()
        assert bench.tokens("other") == before == []


async def test_a_lane_that_moves_on_with_a_body_transaction_gets_its_token_with_the_commit(bench: Bench) -> None:
    await bench.kit.settings("default", LaneRule(pattern="only", limit=1))
    worker = await bench.kit.worker(slots=10)
    await bench.kit.enqueue_all([bench.kit.new(lane="only") for _ in range(2)])
    await bench.has_tokens(1)
    [first] = await worker.claim(10)
    await bench.lose_tokens()
    transaction = await bench.store.transactions.begin()
    assert await transaction.commit(worker.id, complete(first.held, b"1"), None)
    await bench.has_tokens(1)


async def test_no_statement_sends_a_notify(bench: Bench) -> None:
    listener = await driver().connect(bench.store._address.dsn)
    received: list[str] = []
    for channel in ("fairlane.jobs.fairlane", "fairlane.topics.fairlane"):
        await listener.add_listener(channel, lambda *message: received.append(message[3]))
    worker = await bench.kit.worker()
    await bench.kit.enqueue()
    await bench.kit.enqueue_all([bench.kit.new(lane="a") for _ in range(3)])
    job = bench.kit.new()
    await bench.store.transactions.prepare([job])
    async with listener.transaction():
        await bench.store.transactions.enqueue_on(listener, [job])
    await worker.complete(*await worker.claim(10))
    await bench.settled()
    await listener.execute("SELECT 1")
    assert received == []
    await listener.close()
