"""Checks before a store is opened: which servers are rejected, with which advice, and what is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane.errors import StoreError, StoreUnavailable
from fairlane.model.job import NewJob
from fairlane.store.diagnosis import Level
from fairlane.store.redis import server_checks
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from fairlane.store.redis.roles import rights
from fairlane.store.redis.store import RedisStore
from tests.servers.postgresql import free_port
from tests.servers.valkey import ValkeyServer, own_server

pytestmark = pytest.mark.anyio
ADDRESS = parse("redis://ann:hush@db")
SOUND = {"redis_version": "7.0.15", "role": "master", "maxmemory_policy": "noeviction"}


@pytest.fixture(scope="module")
def mine() -> Iterator[ValkeyServer]:
    """A server whose settings are changed."""
    with own_server() as started:
        yield started


@pytest.fixture(autouse=True)
def silent_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was logged yet about any server."""
    monkeypatch.setattr(server_checks, "_logged", set())


@pytest.fixture
async def connections(mine: ValkeyServer) -> AsyncIterator[Connections]:
    opened = Connections(parse(mine.url))
    yield opened
    await opened.close()


async def opens(url: str) -> None:
    """Open a store, and use it."""
    store = await RedisStore.open(url)
    await store.enqueue([NewJob(id="a", task="task")])
    await store.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "advice"),
    [
        ({"redis_version": "6.2.14"}, "is Redis 6.2.14. Fairlane needs Redis 7.0"),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.0"}, "is Valkey 7.1.0. Fairlane needs"),
        ({"maxmemory_policy": "allkeys-lru"}, "Set it to noeviction"),
        ({"maxmemory_policy": "allkeys-random"}, "Set it to noeviction"),
        ({"role": "slave", "master_host": "db1", "master_port": "6379"}, "is a replica of db1:6379"),
    ],
)
def test_an_unusable_server_is_rejected_with_advice(info: dict[str, str], advice: str) -> None:
    with pytest.raises(StoreError) as caught:
        server_checks.refuse(SOUND | info, ADDRESS)

    assert advice in str(caught.value)
    assert "redis://ann:***@db" in str(caught.value)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"redis_version": "7.0.0"},
        {"redis_version": "10.1.0"},
        {"redis_version": "7.2.4", "valkey_version": "7.2.5"},
        {"redis_version": "unstable"},
        {"maxmemory_policy": "volatile-lru"},
        {"maxmemory_policy": "volatile-ttl"},
    ],
)
def test_a_usable_server_is_accepted(info: dict[str, str]) -> None:
    server_checks.refuse(SOUND | info, ADDRESS)
    server_checks.refuse({}, ADDRESS)


async def test_a_server_that_would_evict_jobs_is_rejected(mine: ValkeyServer) -> None:
    mine.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreError, match="noeviction"):
            await RedisStore.open(mine.fresh_namespace())
    finally:
        mine.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_keys_never_expire_so_volatile_policies_evict_none(mine: ValkeyServer) -> None:
    mine.ask("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    url = mine.fresh_namespace()
    try:
        await opens(url)
    finally:
        mine.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    names = mine.ask("KEYS", f"{parse(url).prefix}*")

    assert len(names) > 5
    assert {mine.ask("TTL", name) for name in names} == {-1}


async def test_a_replica_is_rejected_until_it_is_promoted(mine: ValkeyServer) -> None:
    mine.ask("REPLICAOF", "127.0.0.1", 1)
    try:
        with pytest.raises(StoreUnavailable, match=r"is a replica of 127\.0\.0\.1:1 and read-only\..*redis\+sentinel"):
            await RedisStore.open(mine.fresh_namespace())
    finally:
        mine.ask("REPLICAOF", "NO", "ONE")
    await opens(mine.fresh_namespace())


async def test_a_node_of_a_cluster_serves_the_namespaces_of_its_slots() -> None:
    # By default a node listens on a second port, which another process may use.
    options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-port", str(free_port())]
    with own_server(options=options) as node:
        with pytest.raises(StoreUnavailable, match="CLUSTERDOWN"):
            await RedisStore.open(f"{node.url}?namespace=jobs")
        node.ask("CLUSTER", "ADDSLOTS", node.ask("CLUSTER", "KEYSLOT", "{jobs}:"))
        async with asyncio.timeout(20):
            while "cluster_state:ok" not in node.ask("CLUSTER", "INFO"):
                await asyncio.sleep(0.02)
        await opens(f"{node.url}?namespace=jobs")
        with pytest.raises(StoreUnavailable, match="CLUSTERDOWN"):
            await RedisStore.open(f"{node.url}?namespace=others")


# -- what is logged ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aof", "config", "level", "summary"),
    [
        ("0", {"save": ""}, Level.WARN, "a restart loses everything"),
        (
            "0",
            {"save": "3600 1 300 100"},
            Level.WARN,
            "(save 3600 1 300 100): a crash loses everything since the last one",
        ),
        ("0", {}, Level.WARN, "a crash loses everything since the last snapshot"),
        ("1", {"appendfsync": "everysec"}, Level.OK, "a crash of its machine loses about the last second"),
        ("1", {"appendfsync": "always"}, Level.OK, "a crash of its machine loses no acknowledged write"),
        ("1", {"appendfsync": "no"}, Level.WARN, "half a minute"),
        ("1", {}, Level.OK, "unless appendfsync is always"),
        ("1", {"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}, Level.WARN, "while the log is rewritten"),
    ],
)
def test_the_possible_loss_with_each_setting(aof: str, config: dict[str, str], level: Level, summary: str) -> None:
    found = server_checks.persistence({"aof_enabled": aof}, config)

    assert found is not None
    assert found.level is level
    assert summary in found.summary
    assert found.lossless == (config == {"appendfsync": "always"})


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"appendfsync": "everysec"}, "set appendfsync always"),
        ({}, "set appendfsync always"),
        ({"appendfsync": "no"}, "appendfsync everysec, or always"),
        ({"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}, "set no-appendfsync-on-rewrite no"),
    ],
)
def test_the_advice_is_not_what_is_set_already(config: dict[str, str], advice: str) -> None:
    found = server_checks.persistence({"aof_enabled": "1"}, config)

    assert found is not None
    assert advice in found.advice
    assert config.get("appendfsync") != "everysec" or "everysec" not in found.advice


def test_hidden_settings_are_not_judged() -> None:
    assert server_checks.persistence({}, {}) is None


@pytest.mark.parametrize(
    ("changed", "level", "summary"),
    [
        ({}, logging.WARNING, "neither appendonly nor save is set: a restart loses everything"),
        ({"save": "3600 1"}, logging.WARNING, "only snapshots (save 3600 1)"),
        ({"appendonly": "yes"}, logging.INFO, "loses about the last second"),
        ({"appendonly": "yes", "appendfsync": "always"}, None, ""),
    ],
)
async def test_it_is_logged_once_for_each_server(
    mine: ValkeyServer, caplog: pytest.LogCaptureFixture, changed: dict[str, str], level: int | None, summary: str
) -> None:
    caplog.set_level(logging.INFO, "fairlane")
    for name, value in changed.items():
        mine.ask("CONFIG", "SET", name, value)
    try:
        await opens(mine.fresh_namespace())
        await opens(mine.fresh_namespace())
    finally:
        for name, value in {"save": "", "appendonly": "no", "appendfsync": "everysec"}.items():
            mine.ask("CONFIG", "SET", name, value)
    logged = [record for record in caplog.records if record.name == "fairlane.store"]

    assert [record.levelno for record in logged] == ([] if level is None else [level])
    assert all(summary in record.getMessage() and "may run again" in record.getMessage() for record in logged)


async def test_a_user_that_may_read_no_setting_can_open_the_store(
    mine: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = mine.fresh_namespace()
    namespace = url.partition("namespace=")[2]
    for name, less in (("few", ["-config"]), ("fewer", ["-config", "-info"])):
        mine.ask("ACL", "SETUSER", name, "on", ">hush", *rights("owner", namespace), *less)
        await opens(url.replace("redis://", f"redis://{name}:hush@"))
    logged = [record.getMessage() for record in caplog.records if record.name == "fairlane.store"]

    assert len(logged) == 1, "INFO alone shows that appendonly is off"
    assert "appendonly is off" in logged[0]


async def test_a_server_without_the_command_is_accepted(connections: Connections) -> None:
    assert await server_checks.asked(connections, "NOSUCH") is None
    assert (await server_checks.information(connections))["role"] == "master"
    assert (await server_checks.settings(connections))["appendfsync"] == "everysec"
