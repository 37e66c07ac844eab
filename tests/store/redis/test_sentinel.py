"""A store behind sentinels: how the master is found, what happens when it changes, and which answers are discarded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from fairlane.errors import StoreError, StoreUnavailable
from fairlane.store.redis import sentinels
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from tests.servers import valkey
from tests.servers.postgresql import free_port
from tests.servers.valkey import ValkeyServer, Watched, own_server

from ..redis_clients import failure

pytestmark = pytest.mark.anyio


class Said:
    """What a sentinel of ours answers, and how often it was asked."""

    def __init__(self, port: int, master: int | None) -> None:
        self.port = port
        self.master = master
        self.asked = 0


@asynccontextmanager
async def sentinel(master: int | None) -> AsyncIterator[Said]:
    """A sentinel that names the server at a port, or knows none."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(10_000):
            if b"GET-MASTER-ADDR-BY-NAME" not in data:
                writer.write(b"+OK\r\n" * data.count(b"*"))
                continue
            said.asked += 1
            port = str(said.master)
            named = f"*2\r\n$9\r\n127.0.0.1\r\n${len(port)}\r\n{port}\r\n"
            writer.write(b"*-1\r\n" if said.master is None else named.encode())
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    said = Said(server.sockets[0].getsockname()[1], master)
    yield said
    server.close()
    await server.wait_closed()


def through(*ports: int, options: str = "", seconds: int = 1) -> Connections:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return Connections(parse(f"redis+sentinel://{hosts}/jobs?connect_timeout={seconds}{options}"))


@pytest.fixture(scope="module")
def replica() -> Iterator[ValkeyServer]:
    """A server that may not be written, and whose master is far."""
    with own_server(options=("--replicaof", "127.0.0.1 1")) as started:
        yield started


# -- which one is asked ------------------------------------------------------------------------------------------------


async def test_the_sentinels_are_asked_in_turn_and_the_one_that_knew_first_the_next_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with sentinel(None) as ignorant, sentinel(valkey.server().port) as knowing:
            connections = through(free_port(), silent.getsockname()[1], ignorant.port, knowing.port)
            started = time.monotonic()
            assert await connections.call("PING") == b"PONG"
            first = time.monotonic() - started
            connections._pools[asyncio.get_running_loop()].close_unused()
            started = time.monotonic()
            assert await connections.call("PING") == b"PONG"
            assert (ignorant.asked, knowing.asked) == (1, 2)
            await connections.close()

    assert 0.9 < first < 10, "a silent sentinel does not delay the others"
    assert time.monotonic() - started < 0.9


async def test_a_caller_with_a_short_deadline_asks_another_sentinel_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentinels, "ASKING_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with sentinel(valkey.server().port) as knowing:
            connections = through(silent.getsockname()[1], knowing.port, seconds=60)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await connections.call("PING")
            async with asyncio.timeout(30):
                assert await connections.call("PING") == b"PONG"
            await connections.close()


async def test_a_named_master_must_report_the_same_role(replica: ValkeyServer) -> None:
    async with sentinel(replica.port) as late, sentinel(valkey.server().port) as knowing:
        connections = through(late.port, knowing.port)
        assert await connections.call("ECHO", "mine") == b"mine"
        await connections.close()
        alone = through(late.port)
        error = await failure(alone)
        await alone.close()

    assert type(error) is StoreUnavailable
    assert f"127.0.0.1:{replica.port} is not a master" in str(error)


async def test_the_error_lists_the_answers_of_all_sentinels() -> None:
    async with sentinel(None) as ignorant, sentinel(free_port()) as late:
        connections = through(ignorant.port, late.port, free_port())
        error = await failure(connections)
        await connections.close()

    assert type(error) is StoreUnavailable
    assert "does not know jobs" in str(error)
    assert f"127.0.0.1:{late.master}" in str(error)


async def test_users_of_the_sentinels_and_of_the_server_are_two() -> None:
    with own_server(password="hush1") as server:
        watching = f"sentinel monitor jobs 127.0.0.1 {server.port} 1\nsentinel auth-pass jobs hush1\n"
        with ValkeyServer(configuration=watching, password="hush2") as guarded:
            hosts = f"127.0.0.1:{guarded.port}/jobs"
            right = Connections(parse(f"redis+sentinel://:hush1@{hosts}?sentinel_password=hush2"))
            assert await right.call("PING") == b"PONG"
            await right.close()
            for wrong, advice in (
                (f"redis+sentinel://:hush1@{hosts}", "sentinel_password"),
                (f"redis+sentinel://:hush1@{hosts}?sentinel_password=hush3", "sentinel_password"),
                (f"redis+sentinel://:hush3@{hosts}?sentinel_password=hush2", "Check user and password"),
            ):
                connections = Connections(parse(wrong))
                error = await failure(connections)
                await connections.close()
                assert type(error) is StoreError
                assert advice in str(error)
                assert "hush" not in f"{error} {error.__cause__}"


# -- when the master changes -------------------------------------------------------------------------------------------


async def test_a_master_that_was_demoted_is_left_within_the_call() -> None:
    with own_server() as old:
        async with sentinel(old.port) as knowing:
            connections = through(knowing.port)
            await connections.call("SET", "a", 1)
            old.ask("REPLICAOF", "127.0.0.1", 1)
            knowing.master = valkey.server().port
            assert await connections.call("SET", "a new master", 1) == b"OK"
            await connections.close()

    assert valkey.server().ask("DEL", "a new master") == 1


async def test_a_failover_is_followed() -> None:
    watched = Watched()
    try:
        connections = Connections(parse(watched.url + "?connect_timeout=1"))
        await connections.call("SET", "a", 1)
        await connections.call("WAIT", 1, 1000)
        await asyncio.to_thread(watched.master.kill)
        async with asyncio.timeout(20):
            while True:
                try:
                    await connections.call("INCR", "a")
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.05)
        assert await connections.call("GET", "a") == b"2"
        assert watched.replica.ask("ROLE")[0] == "master"
        await connections.close()
    finally:
        await asyncio.to_thread(watched.close)
