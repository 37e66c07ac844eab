"""The leader's pass: tokens are made to match what PostgreSQL counts, whatever happened to Redis."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fairlane.errors import StoreUnavailable, TermLost
from fairlane.model.job import Priority
from fairlane.store.diagnosis import Level
from fairlane.store.postgresql_redis.dispatcher import Claimable

from .bench import ALL, Bench, trusted

NORMAL = Priority.NORMAL


def list_of(bench: Bench, queue: str = "default") -> str:
    """The key of a list."""
    return bench.store._shards[0].keys.list(queue, NORMAL)


async def test_tokens_that_lack_are_pushed(bench: Bench) -> None:
    await bench.kit.worker(slots=10)
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(4)])
    await bench.has_tokens(4)
    bench.server.ask("LTRIM", list_of(bench), 0, 0)
    await bench.sweep()
    assert len(bench.tokens()) == 4
    assert await bench.counted("pushed") == 7
    assert await bench.counted("scanned") >= 1


async def test_old_tokens_that_are_too_many_are_trimmed_and_young_ones_stay(bench: Bench) -> None:
    worker = await bench.kit.worker(slots=10)
    await bench.kit.enqueue_all([bench.kit.new() for _ in range(4)])
    await bench.has_tokens(4)
    await worker.claim(4)
    await bench.sweep()
    assert len(bench.tokens()) == 4, "a young token may be that of a job stored after the count"
    old = [f"{1_700_000_000_000_000 + n} old" for n in range(6)]
    bench.server.ask("LPUSH", list_of(bench), *old)
    await bench.sweep()
    assert "old" not in bench.tokens()
    assert await bench.counted("trimmed") == 6


async def test_a_list_of_a_queue_without_jobs_is_forgotten(bench: Bench) -> None:
    bench.server.ask("RPUSH", list_of(bench, "gone"), "1 old")
    bench.server.ask("SADD", bench.store._shards[0].keys.lists, list_of(bench, "gone"))
    await bench.sweep()
    assert bench.tokens("gone") == []
    assert bench.server.ask("SCARD", bench.store._shards[0].keys.lists) == 0


async def test_a_pass_that_names_an_old_term_touches_no_token(bench: Bench) -> None:
    await bench.kit.enqueue()
    await bench.has_tokens(1)
    await bench.lose_tokens()
    term = await bench.store.lead("me", lease=10)
    assert term is not None
    with pytest.raises(TermLost):
        await bench.store.admit(term=term.number + 1)
    assert bench.tokens() == []
    await bench.store.admit(term=term.number)
    await bench.settled()
    assert len(bench.tokens()) == 1


async def test_a_flushed_redis_has_its_tokens_back_with_the_next_pass_and_a_new_generation(
    fragile: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await fragile.kit.worker(slots=5)
    await fragile.kit.enqueue_all([fragile.kit.new() for _ in range(20)])
    await fragile.sweep()
    [shard] = fragile.store._shards
    before = fragile.server.ask("HGET", shard.keys.state, "generation")
    with caplog.at_level(logging.WARNING):
        await fragile.sweep()
        assert "flushed" not in caplog.text
        fragile.wipe()
        await fragile.sweep()
    assert len(fragile.tokens()) == 5
    assert fragile.server.ask("HGET", shard.keys.state, "generation") != before
    assert "was flushed, replaced or rolled back" in caplog.text


async def test_a_redis_that_was_rolled_back_gets_a_new_generation(bench: Bench) -> None:
    [shard] = bench.store._shards
    for _ in range(3):
        await bench.sweep()
    generation = bench.server.ask("HGET", shard.keys.state, "generation")
    bench.server.ask("HSET", shard.keys.state, "sweeps", 1)
    await bench.sweep()
    assert bench.server.ask("HGET", shard.keys.state, "generation") != generation
    assert await bench.counted("generations") == 2


async def test_workers_poll_rarely_only_while_a_leader_reconciles(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    assert worker.work.patience == 1.0
    await trusted(bench, worker)
    # Without another pass the sign of life expires, and the worker claims at once because its next poll is far away.
    before = worker.woken
    assert 0 < bench.server.ask("PTTL", bench.store._shards[0].keys.alive) <= 5_000
    bench.server.ask("DEL", bench.store._shards[0].keys.alive)
    await worker.wakes(before + 1)
    assert worker.work.patience == 1.0


async def test_a_worker_claims_when_the_generation_changes(bench: Bench) -> None:
    worker = await bench.waiting()
    await worker.offer(*ALL)
    await trusted(bench, worker)
    before = worker.woken
    bench.server.ask("SET", bench.store._shards[0].keys.alive, "another")
    await worker.wakes(before + 1)


async def test_the_pass_reminds_the_worker_of_an_inbox(bench: Bench) -> None:
    """The topic was lost, and polls are rare."""
    worker = await bench.waiting()
    await bench.kit.enqueue(sticky="plan")
    await worker.wakes(1)
    await bench.settled()
    before = worker.woken
    await bench.sweep()
    await worker.wakes(before + 1)


async def test_a_pass_that_cannot_count_tokens_has_admitted_its_jobs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(queues: list[str] | None) -> Claimable:
        raise StoreUnavailable("the count was not answered")

    monkeypatch.setattr(bench.store._dispatcher(), "_count", fails)
    assert (await bench.store.admit()).admitted == 0
    await bench.settled()


async def test_what_became_of_tokens_is_reported(bench: Bench) -> None:
    await bench.kit.enqueue()
    await bench.has_tokens(1)
    [before] = [found for found in await bench.store.findings() if found.topic.startswith("tokens")]
    assert before.level is Level.WARN
    assert "no leader has reconciled" in before.what
    await bench.sweep()
    [after] = [found for found in await bench.store.findings() if found.topic.startswith("tokens")]
    assert after.level is Level.OK
    assert "1 pushed" in after.what
    counters = await bench.store.counters()
    assert counters["tokens_pushed"] == 1
    assert counters["redis_down"] == 0


async def test_a_pass_that_is_asked_for_during_another_sees_what_came_since(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.kit.worker(slots=10)
    await bench.kit.enqueue_all([bench.kit.new(delay=0.01) for _ in range(3)])
    dispatcher = bench.store._dispatcher()
    count, counted = dispatcher._count, asyncio.Event()

    async def slow(queues: list[str] | None) -> Claimable:
        found = await count(queues)
        if queues is None and not counted.is_set():
            # The first pass has counted, and others promote before it goes on.
            counted.set()
            await asyncio.sleep(0.05)
            assert (await bench.store.promote()).promoted == 3
            dispatcher.reconcile()
        return found

    monkeypatch.setattr(dispatcher, "_count", slow)
    monkeypatch.setattr(dispatcher, "count", lambda queues: None)
    dispatcher.reconcile()
    await bench.has_tokens(3)
