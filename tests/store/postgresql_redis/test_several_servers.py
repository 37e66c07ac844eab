"""A deployment with a Redis for high priority and one for the others: what happens to one does not touch the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from fairlane.errors import StoreUnavailable
from fairlane.model.job import Priority
from fairlane.store.deployment import with_redis
from fairlane.store.postgresql_redis.store import PostgresqlRedisStore
from fairlane.store.postgresql_redis.wakeups import TokenWakeups
from fairlane.store.redis import wakeups
from fairlane.store.redis.wakeups import Notifier
from fairlane.store.wakeups import job_topic
from tests.servers import valkey
from tests.servers.valkey import ValkeyServer

from .bench import ALL, PATIENCE, Bench, never_answers, until

HIGH, NORMAL, LOW = Priority


@contextlib.asynccontextmanager
async def two_servers(database: str, high: ValkeyServer, low: ValkeyServer) -> AsyncIterator[PostgresqlRedisStore]:
    url = with_redis(database, {"redis_high": high.url, "redis_low": low.url})
    store = await PostgresqlRedisStore.open(url)
    try:
        yield store
    finally:
        await store.close()


def notifiers_of(store: PostgresqlRedisStore) -> list[Notifier]:
    """The notifiers of its servers, high first."""
    assert isinstance(store.wakeups, TokenWakeups)
    return store.wakeups._notifier._all


async def test_with_one_redis_down_the_other_priority_flows_on(database: str, own_redis: ValkeyServer) -> None:
    with valkey.own_server() as low:
        async with two_servers(database, own_redis, low) as store:
            bench = Bench(store, low)
            worker = await bench.waiting(slots=50)
            await store.admit()
            await worker.offer(*ALL)
            own_redis.kill()
            for count in range(1, 6):
                await bench.kit.enqueue(priority=LOW)
                await until(lambda: worker.work._held, "the token of the other server arrives")
                assert len(await worker.claim()) == 1, f"job {count}"
                worker.work.offer(ALL)
            # Urgent jobs are in PostgreSQL, where a poll finds them.
            await bench.kit.enqueue(priority=HIGH)
            assert len(await worker.claim()) == 1
            assert worker.work.patience == 1.0
            worker.work.close()


async def test_a_frozen_redis_does_not_delay_what_is_counted_for_the_other(
    database: str, own_redis: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with valkey.own_server() as low:
        async with two_servers(database, own_redis, low) as store:
            bench = Bench(store, low)
            await bench.kit.worker(slots=50)
            for priority in Priority:
                await bench.kit.enqueue(priority=priority)
            await bench.settled()
            never_answers(monkeypatch)
            with own_redis.frozen():
                for count in range(2, 5):
                    # Jobs with a lane are counted, for all servers at once.
                    await bench.kit.enqueue_all([bench.kit.new(lane="a", priority=each) for each in (HIGH, LOW)])
                    await bench.has_tokens(count, "default", LOW)
            await bench.settled()


async def test_normal_goes_with_low_and_each_priority_has_its_list_on_its_server(
    database: str, own_redis: ValkeyServer
) -> None:
    with valkey.own_server() as low:
        async with two_servers(database, own_redis, low) as store:
            kit = Bench(store, low).kit
            for priority in Priority:
                await kit.enqueue(priority=priority)
            high_bench, low_bench = Bench(store, own_redis), Bench(store, low)
            await high_bench.has_tokens(1, "default", HIGH)
            await low_bench.has_tokens(1, "default", NORMAL)
            await low_bench.has_tokens(1, "default", LOW)
            assert high_bench.tokens("default", LOW) == []
            assert low_bench.tokens("default", HIGH) == []


async def test_one_server_under_two_names_is_two_that_leave_each_other_alone(
    database: str, own_redis: ValkeyServer
) -> None:
    url = with_redis(database, {"redis_high": own_redis.url, "redis_low": f"{own_redis.url}/0"})
    store = await PostgresqlRedisStore.open(url)
    try:
        bench = Bench(store, own_redis)
        await bench.kit.worker(slots=10)
        for shard, priority in zip(store._shards, (HIGH, LOW), strict=True):
            await bench.kit.enqueue(priority=priority)
            await bench.has_tokens(1, "default", priority)
            # Old enough to be trimmed by a pass that does not know its job.
            own_redis.ask("LSET", shard.keys.list("default", priority), 0, "1700000000000000 old")
        await bench.sweep()
        assert bench.tokens("default", HIGH) == bench.tokens("default", LOW) == ["old"]
        assert (await store.counters())["tokens_pushed"] == 2
    finally:
        await store.close()


async def test_the_first_topic_of_a_process_arrives_with_the_first_redis_down(
    database: str, own_redis: ValkeyServer
) -> None:
    with valkey.own_server() as low:
        async with two_servers(database, own_redis, low) as store, two_servers(database, own_redis, low) as ear:
            own_redis.kill()
            subscription = ear.wakeups.subscribe([job_topic("x")])
            notifiers = notifiers_of(ear)
            await until(lambda: notifiers[1].is_there and notifiers[1].listens(jobs=True, others=False), "it listens")
            while await subscription.wait(0.1):
                """A loss delivers every topic once."""
            store.wakeups.publish([job_topic("x")])
            assert await subscription.wait(PATIENCE) == {job_topic("x")}
            subscription.close()


async def test_topics_arrive_by_the_other_redis_as_soon_as_a_call_shows_that_the_first_is_frozen(
    database: str, own_redis: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The notifier itself would notice it much later.
    monkeypatch.setattr(wakeups, "COMMAND_SECONDS", 10 * PATIENCE)
    with valkey.own_server() as low:
        async with two_servers(database, own_redis, low) as store, two_servers(database, own_redis, low) as ear:
            store.wakeups.publish([job_topic("x")])
            notifiers = notifiers_of(store)
            await until(lambda: all(notifier.is_there for notifier in notifiers), "both servers are used")
            subscription = ear.wakeups.subscribe([job_topic("x")])
            with own_redis.frozen():
                with pytest.raises(StoreUnavailable):
                    await store._shards[0].call("GET", "x")
                while await subscription.wait(0.1):
                    """Topics that were published before."""
                store.wakeups.publish([job_topic("x")])
                assert await subscription.wait(PATIENCE) == {job_topic("x")}
            subscription.close()


async def test_watchers_are_notified_of_jobs_with_either_redis_down(database: str, own_redis: ValkeyServer) -> None:
    with valkey.own_server() as low:
        async with two_servers(database, own_redis, low) as store, two_servers(database, own_redis, low) as ear:
            subscription = ear.wakeups.subscribe([job_topic("x")])
            for server in (own_redis, low):
                server.kill()

                async def heard() -> bool:
                    store.wakeups.publish([job_topic("x")])
                    return bool(await subscription.wait(0.1))

                # The loss of a connection delivers every topic once; what counts is what comes after.
                for _ in range(3):
                    await until(heard, "the topic arrives by the other server")
                server.start()
                await until(
                    lambda: all(notifier.is_there for notifier in notifiers_of(store)),
                    "the server is used again",
                ) if server is own_redis else None
            subscription.close()
