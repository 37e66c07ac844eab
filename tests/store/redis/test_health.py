"""What the doctor reports about a server: each problem is found, and a healthy server has none."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fairlane.doctor import diagnose
from fairlane.model.job import NewJob
from fairlane.runtime.connection import Connection
from fairlane.store.diagnosis import Finding, Level
from fairlane.store.port import Store
from fairlane.store.redis import health
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from fairlane.store.redis.data_loss import EMPTIED
from fairlane.store.redis.roles import rights
from fairlane.store.redis.store import RedisStore
from tests.cli.project import Project
from tests.servers.valkey import ValkeyServer, own_server

pytestmark = pytest.mark.anyio
GIB = 2**30
SOUND = {
    "valkey_version": "9.1.2",
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "used_memory": "1048576",
    "maxmemory": str(GIB),
    "aof_enabled": "1",
    "master_repl_offset": "1000",
}
SAFE = {"appendfsync": "always"}


@pytest.fixture(scope="module")
def mine() -> Iterator[ValkeyServer]:
    """A server that keeps everything, and whose settings are changed."""
    with own_server(durable=True) as started:
        yield started


@pytest.fixture
async def store(mine: ValkeyServer) -> AsyncIterator[RedisStore]:
    opened = await RedisStore.open(mine.fresh_namespace())
    yield opened
    await opened.close()


async def found(store: RedisStore, topic: str) -> Finding:
    """The only finding about a topic."""
    [finding] = [finding for finding in await store.findings() if finding.topic == topic]
    return finding


def findings_of(**changed: str) -> list[tuple[str, Level, str]]:
    """The findings for a server that is sound except for this."""
    info = SOUND | changed
    findings = [
        *(health._server(info), health._eviction(info), health._memory(info), health._replication(info)),
        *health._persistence(info, SAFE),
    ]
    return [(each.topic, each.level, each.what) for each in findings if each is not None]


async def test_a_healthy_server(store: RedisStore) -> None:
    findings = await store.findings()

    assert {finding.level for finding in findings} == {Level.OK}
    topics = ["server", "eviction", "memory", "persistence", "replication", "losses", "slow"]
    assert [finding.topic for finding in findings] == topics
    assert findings[0].what.startswith(("Valkey ", "Redis "))
    assert "loses no acknowledged write" in findings[3].what


def test_settings_that_are_hidden_are_no_finding() -> None:
    assert [finding for finding in (health._eviction({}), health._memory({}), health._replication({})) if finding] == []
    assert {level for _, level, _ in findings_of()} == {Level.OK}


@pytest.mark.parametrize(
    ("changed", "topic", "level", "words"),
    [
        ({"role": "slave"}, "server", Level.ERROR, "now a replica"),
        ({"cluster_enabled": "1"}, "server", Level.OK, "a node of a cluster"),
        ({"maxmemory_policy": "allkeys-lfu", "evicted_keys": "7"}, "eviction", Level.ERROR, "7 keys were evicted"),
        ({"maxmemory_policy": "volatile-lru", "evicted_keys": "7"}, "eviction", Level.OK, "Fairlane has none"),
        ({"evicted_keys": "7"}, "eviction", Level.WARN, "7 keys were evicted"),
        ({"used_memory": str(int(0.79 * GIB))}, "memory", Level.OK, "79% of maxmemory, 1.0 GiB"),
        ({"used_memory": str(int(0.81 * GIB))}, "memory", Level.WARN, "81% of maxmemory"),
        ({"used_memory": str(int(0.96 * GIB))}, "memory", Level.ERROR, "96% of maxmemory"),
        ({"maxmemory": "0", "total_system_memory": str(GIB)}, "memory", Level.OK, "maxmemory is not set"),
        ({"slave0": "ip=b,port=1,state=online,offset=990,lag=1"}, "replication", Level.OK, "at most 10 bytes behind"),
        (
            {"slave0": "ip=b,port=1,state=online,offset=990,lag=30"},
            "replication",
            Level.WARN,
            "b:1 (online, last seen 30 s",
        ),
        ({"slave0": "ip=b,port=1,state=wait_bgsave,offset=0,lag=0"}, "replication", Level.WARN, "b:1 (wait_bgsave"),
    ],
)
def test_the_finding_for_each_setting(changed: dict[str, str], topic: str, level: Level, words: str) -> None:
    [(found_level, what)] = [(level, what) for each, level, what in findings_of(**changed) if each == topic]

    assert found_level is level
    assert words in what


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("aof_last_write_status", Level.ERROR),
        ("rdb_last_bgsave_status", Level.ERROR),
        ("aof_last_bgrewrite_status", Level.WARN),
    ],
)
def test_a_server_that_cannot_write_to_its_disk(name: str, level: Level) -> None:
    levels = [level for topic, level, _ in findings_of(**{name: "err"}) if topic == "persistence"]

    assert levels == [Level.OK, level]


async def test_a_server_that_fills_up(mine: ValkeyServer, store: RedisStore) -> None:
    used = int(dict(mine.ask("INFO", "memory"))["used_memory"])
    try:
        mine.ask("CONFIG", "SET", "maxmemory", int(used / 0.87))
        assert (await found(store, "memory")).level is Level.WARN
        mine.ask("CONFIG", "SET", "maxmemory", int(used / 0.98))
        assert (await found(store, "memory")).level is Level.ERROR
    finally:
        mine.ask("CONFIG", "SET", "maxmemory", 0)


async def snapshot(mine: ValkeyServer) -> None:
    """Let the server try to make one."""
    mine.ask("BGSAVE")
    async with asyncio.timeout(10):
        while mine.ask("INFO", "persistence")["rdb_bgsave_in_progress"]:
            await asyncio.sleep(0.01)


async def test_a_snapshot_that_failed(mine: ValkeyServer, store: RedisStore) -> None:
    obstacle = mine.folder / "dump.rdb"
    obstacle.mkdir()
    (obstacle / "file").touch()
    await snapshot(mine)
    levels = [finding.level for finding in await store.findings() if finding.topic == "persistence"]
    shutil.rmtree(obstacle)
    await snapshot(mine)

    assert levels == [Level.OK, Level.ERROR]
    assert (await found(store, "persistence")).level is Level.OK


async def test_slow_calls_are_reported_by_verb(mine: ValkeyServer, store: RedisStore) -> None:
    others = await RedisStore.open(mine.fresh_namespace())
    mine.ask("CONFIG", "SET", "slowlog-log-slower-than", 0)
    try:
        await store.queues()
        await store.queues()
        finding, beside = await found(store, "slow"), await found(others, "slow")
    finally:
        mine.ask("CONFIG", "SET", "slowlog-log-slower-than", 10_000)
        mine.ask("SLOWLOG", "RESET")
        await others.close()

    assert finding.level is Level.WARN
    assert "queues 2 times, up to " in finding.what
    assert beside.level is Level.OK


async def test_data_loss_is_reported_for_a_day(mine: ValkeyServer, store: RedisStore) -> None:
    await store.enqueue([NewJob(id="a", task="task")])
    mine.ask("FLUSHALL")
    await store.enqueue([NewJob(id="b", task="task")])
    finding = await found(store, "losses")
    later = health._data_loss([{"at": 1_000.0, "what": EMPTIED}], 1_000.0 + health.DAY_SECONDS)

    assert finding.level is Level.ERROR
    assert EMPTIED in finding.what
    assert later.level is Level.OK


async def test_what_a_user_may_not_see_is_left_out(mine: ValkeyServer) -> None:
    mine.ask("ACL", "SETUSER", "few", "on", ">hush", *rights("worker"))
    connections = Connections(parse(mine.url.replace("redis://", "redis://few:hush@")))
    topics = [finding.topic for finding in await health.findings(connections)]
    mine.ask("ACL", "SETUSER", "few", "-info")
    [nothing] = await health.findings(connections)
    await connections.close()

    assert topics == ["server", "eviction", "memory", "persistence", "replication", "losses"]
    assert nothing.level is Level.WARN
    assert nothing.advice is not None
    assert "+info" in nothing.advice


async def test_the_findings_match_the_server(store: RedisStore) -> None:
    async def same() -> Store:
        return store

    findings = await diagnose(Connection(same))
    assert [finding.topic for finding in findings[:9]] == [
        *("store", "clock", "server", "eviction", "memory", "persistence", "replication", "losses", "slow")
    ]


def test_the_command_prints_the_findings(mine: ValkeyServer, tmp_path: Path) -> None:
    project = Project(tmp_path)
    url = mine.fresh_namespace()
    project.run("migrate", "--url", url)
    result = project.run("doctor", "--url", url)
    silent = project.run("status", "--url", url)

    assert result.exit_code == 0
    assert "appendfsync always" in result.stdout
    assert silent.stderr == ""
