"""A Redis that is down, frozen or back: no call waits for it, and jobs of its priority are found by polling."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from fairlane.errors import StoreUnavailable
from fairlane.model.job import Priority
from fairlane.store.diagnosis import Level
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql_redis import shard, work
from fairlane.store.postgresql_redis.shard import ANSWER_SECONDS, Shard
from fairlane.store.postgresql_redis.store import PostgresqlRedisStore
from fairlane.store.redis.address import parse
from tests.servers.valkey import ValkeyServer
from tests.store.postgresql.test_promotion import LOCKS

from .bench import ALL, PATIENCE, Bench, never_answers, trusted, until

HIGH, NORMAL, LOW = Priority


async def test_a_redis_that_is_gone_delays_no_call_and_is_reported_once(
    fragile: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await fragile.kit.worker(slots=50)
    fragile.server.kill()
    with caplog.at_level(logging.WARNING, "fairlane.store.tokens"):
        for _ in range(20):
            await fragile.kit.enqueue()
        await fragile.sweep()
        assert len(await worker.claim(50)) == 20
        await fragile.settled()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "polling PostgreSQL" in caplog.text
    counters = await fragile.store.counters()
    assert counters["redis_down"] == 1
    assert counters["tokens_failed"] >= 20
    found = [finding for finding in await fragile.store.findings() if "tokens" in finding.topic]
    assert [finding.level for finding in found] == [Level.WARN, Level.WARN]
    assert "PostgreSQL alone" in found[-1].what


async def test_the_tokens_are_back_when_the_redis_is(fragile: Bench) -> None:
    await fragile.kit.worker(slots=50)
    fragile.server.kill()
    await fragile.kit.enqueue_all([fragile.kit.new() for _ in range(20)])
    await fragile.settled()
    fragile.server.start()

    async def back() -> bool:
        await fragile.sweep()
        return len(fragile.tokens()) == 20

    await until(back, "the tokens are back")
    assert await fragile.counted("failed") >= 20


async def test_a_frozen_redis_is_waited_for_once_and_not_by_each_call(fragile: Bench) -> None:
    await fragile.kit.worker(slots=50)
    await fragile.kit.enqueue()
    await fragile.has_tokens(1)
    loop = asyncio.get_running_loop()
    with fragile.server.frozen():
        began = loop.time()
        await fragile.kit.enqueue()
        await fragile.settled()
        first = loop.time() - began
        began = loop.time()
        for _ in range(10):
            await fragile.kit.enqueue()
        ten = loop.time() - began
    # The push of the first waits in the background for its deadline, once. The others do not wait for theirs.
    assert first >= ANSWER_SECONDS * 0.9
    assert ten < 5 * first


async def test_after_a_failure_one_call_tries_and_the_others_fail_without_touching_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard, "SHORTEST_PAUSE", 10 * PATIENCE)
    monkeypatch.setattr(shard, "LONGEST_PAUSE", 10 * PATIENCE)
    made = Shard(parse("redis://nowhere"), Priority, "x")
    calls: list[object] = []

    async def answer(*arguments: object, timeout: float) -> None:
        calls.append(arguments)
        await asyncio.sleep(0)
        if len(calls) == 1:
            raise StoreUnavailable("the connection broke")

    monkeypatch.setattr(made._connections, "call", answer)
    with pytest.raises(StoreUnavailable, match="broke"):
        await made.call("GET", "x")
    with pytest.raises(StoreUnavailable, match="a moment ago"):
        await made.call("GET", "x")
    assert len(calls) == 1
    made._open_until = 0.0
    answers = await asyncio.gather(*(made.call("GET", "x") for _ in range(3)), return_exceptions=True)
    assert [answer is None for answer in answers] == [True, False, False]
    assert len(calls) == 2
    assert made.is_well
    await made.close()


async def test_a_pass_of_the_leader_does_not_wait_for_redis(fragile: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await fragile.sweep()
    never_answers(monkeypatch)
    dispatcher = fragile.store._dispatcher()
    with fragile.server.frozen():
        for _ in range(5):
            await asyncio.wait_for(fragile.store.admit(), PATIENCE)
        await until(lambda: len(dispatcher._tasks) == 1, "all passes wait in one task")
    await fragile.settled()


async def test_no_lock_of_postgresql_is_held_while_redis_does_not_answer(
    fragile: Bench, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await fragile.kit.worker(slots=50)
    # Nothing that is claimable may be left: a promotion does not announce more jobs for a lane that has some already.
    jobs = [await fragile.kit.enqueue() for _ in range(3)]
    assert len(await worker.claim(50)) == len(jobs)
    await fragile.kit.enqueue_all([fragile.kit.new(delay=0.01) for _ in range(300)])
    await fragile.sweep()
    await asyncio.sleep(0.02)
    observer = await driver().connect(database)
    other = await PostgresqlRedisStore.open(fragile.url)
    never_answers(monkeypatch)

    async def nothing_is_held() -> bool:
        return bool(await observer.fetchval(LOCKS) == 0)

    try:
        with fragile.server.frozen():
            assert (await fragile.store.promote(limit=100)).promoted == 100
            outbox = fragile.store._dispatcher()._outboxes[fragile.store._shards[0]]
            await until(lambda: outbox.sending, "a call to Redis is on its way")
            await until(nothing_is_held, "nothing is held for the first")
            assert (await other.promote(limit=200)).promoted == 200
            await until(nothing_is_held, "nothing is held for either")
            assert outbox.sending
        await fragile.settled()
        await fragile.has_tokens(50)
    finally:
        await other.close()
        await observer.close()


async def test_the_opening_of_a_connection_counts_towards_the_deadline_of_a_call(
    own_redis: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "CALL_SECONDS", 0.05)
    made = Shard(parse(own_redis.url), Priority, "x")
    with own_redis.frozen(), pytest.raises(StoreUnavailable, match="did not answer in time"):
        await made.call("GET", "x")
    await made.close()


async def test_a_worker_polls_as_usual_from_the_moment_its_redis_is_gone(fragile: Bench) -> None:
    worker = await fragile.waiting()
    await fragile.sweep()
    await worker.offer(*ALL)
    await trusted(fragile, worker)
    before = worker.woken
    fragile.server.kill()
    await worker.wakes(before + 1)
    assert worker.work.patience == 1.0
    fragile.server.start()

    async def well() -> bool:
        await fragile.sweep()
        return worker.work.patience > 1.0

    await until(well, "the worker relies on tokens again")
    await worker.claim()
    worker.work.offer(ALL)
    before = worker.woken
    await fragile.kit.enqueue()
    await worker.wakes(before + 1)


async def test_a_worker_notices_a_frozen_redis(fragile: Bench) -> None:
    worker = await fragile.waiting()
    await fragile.sweep()
    await worker.offer(*ALL)
    await trusted(fragile, worker)
    before = worker.woken
    with fragile.server.frozen():
        await worker.wakes(before + 1)
        assert worker.work.patience == 1.0


async def test_a_redis_that_refuses_only_blocking_calls_is_not_trusted(
    fragile: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To a user without the right to them. A replica, or one with a full disk, refuses every call that writes."""
    monkeypatch.setattr(work, "SHORTEST_PAUSE", 0.05)
    loop = asyncio.get_running_loop()
    failed: list[float] = []
    real = Shard.failed

    def fails(shard: Shard, exc: Exception) -> None:
        failed.append(loop.time())
        real(shard, exc)

    await fragile.sweep()
    await fragile.settled()
    fragile.server.ask("ACL", "SETUSER", "default", "-blpop")
    monkeypatch.setattr(Shard, "failed", fails)
    worker = await fragile.waiting()
    with caplog.at_level(logging.INFO, "fairlane.store.tokens"):
        worker.work.offer(ALL)

        async def fails_again() -> bool:
            assert worker.work.patience == 1.0
            # Another call is answered in between.
            await fragile.sweep()
            return len(failed) >= 6

        await until(fails_again, "the worker has tried six times")
    # Its pauses grow, and the log does not.
    assert failed[5] - failed[4] >= 0.05 * 2**4 / 2
    assert [record.levelname for record in caplog.records if "polling" in record.message] == ["WARNING"]
    fragile.server.ask("ACL", "SETUSER", "default", "+blpop")
    await trusted(fragile, worker)


async def test_a_redis_that_refuses_only_topics_is_not_trusted(fragile: Bench) -> None:
    """To a user without the right to channels, as Redis makes them: jobs in inboxes have no token."""
    await fragile.sweep()
    worker = await fragile.waiting()
    await worker.offer(*ALL)
    await trusted(fragile, worker)
    fragile.server.ask("ACL", "SETUSER", "default", "resetchannels")
    before = worker.woken
    await worker.wakes(before + 1)
    assert worker.work.patience == 1.0
    found = [each for each in await fragile.store.findings() if each.topic.startswith("tokens")]
    assert [(each.level, "PUBLISH" in each.what) for each in found] == [(Level.WARN, True)]
    fragile.server.ask("ACL", "SETUSER", "default", "allchannels")
    await trusted(fragile, worker)


async def test_a_redis_without_memory_left_takes_tokens_all_the_same(
    fragile: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers blocking calls, so workers would rely on tokens, although none can be pushed."""
    worker = await fragile.waiting()
    other = await fragile.waiting("other")
    await worker.offer(*ALL)
    await fragile.kit.enqueue(queue="other")
    other.work.offer(ALL)
    await other.wakes(1)
    fragile.server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    fragile.server.ask("CONFIG", "SET", "maxmemory", 1)
    with caplog.at_level(logging.WARNING, "fairlane.store.tokens"):
        await fragile.kit.enqueue()
        await worker.wakes(1)
        other.work.close()
        await fragile.has_tokens(1, "other")
        await fragile.sweep()
        await trusted(fragile, worker)
    assert caplog.records == []


async def test_a_worker_whose_connection_is_cut_is_woken_again(fragile: Bench) -> None:
    worker = await fragile.waiting()
    await fragile.sweep()
    await worker.offer(*ALL)
    fragile.server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await fragile.kit.enqueue()

    async def woken() -> bool:
        # A token that was popped on the cut connection is pushed again by the leader's pass.
        await fragile.sweep()
        return worker.woken > 0

    await until(woken, "the worker is woken")
    assert len(await worker.claim()) == 1


@pytest.mark.parametrize("how", ["died before", "was not answered"])
async def test_a_push_that_is_lost_delays_the_job_to_the_leaders_pass(
    fragile: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A sender that dies between its commit and the push, and one to which the result of the push is unknown."""
    real = Shard.run

    async def lost(shard: Shard, script: str, *arguments: Any) -> Any:
        if script != "push":
            return await real(shard, script, *arguments)
        if how == "was not answered":
            await real(shard, script, *arguments)
        raise StoreUnavailable("the connection is gone")

    worker = await fragile.waiting()
    await worker.offer(*ALL)
    monkeypatch.setattr(Shard, "run", lost)
    await fragile.kit.enqueue()
    await fragile.settled()
    assert (worker.woken > 0) == (how == "was not answered")
    await fragile.sweep()
    await worker.wakes(1)
    assert len(await worker.claim()) == 1
    # A token that was doubled is an empty claim.
    assert await worker.claim() == []
