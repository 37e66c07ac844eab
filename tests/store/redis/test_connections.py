"""Connections to Redis: how many there are, and how they are used, cancelled, refused, forked and closed."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator

import pytest

from fairlane.errors import FairlaneError, StoreError, StoreUnavailable
from fairlane.store.redis import connection_pool as module
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from fairlane.store.shared import sockets
from tests.servers import valkey
from tests.servers.postgresql import free_port

from ..redis_clients import NOTHING, blocked, connected, failure, gone, ids, url

pytestmark = pytest.mark.anyio


@pytest.fixture
async def alone() -> AsyncIterator[Connections]:
    """With a single connection."""
    opened = Connections(parse(url("pool=1", db=1)))
    yield opened
    await opened.close()


# -- calls -------------------------------------------------------------------------------------------------------------


async def test_a_call_sends_bytes_texts_and_numbers_and_returns_the_reply(alone: Connections) -> None:
    assert await alone.call("SET", b"kind\xff", "größe") == b"OK"
    assert await alone.call(b"GET", b"kind\xff") == "größe".encode()
    assert await alone.call("RPUSH", "{list}", 1, 2.5, "") == 3
    assert await alone.call("LRANGE", "{list}", 0, -1) == [b"1", b"2.5", b""]
    assert await alone.call("GET", "nothing") is None
    assert await alone.call("EVAL", "return {1, 'a', {redis.status_reply('ok')}, false}", 0) == [1, b"a", [b"ok"], None]
    large = bytes(3_000_000)
    assert await alone.call("ECHO", large) == large
    await alone.call("DEL", b"kind\xff", "{list}")


async def test_a_command_that_cannot_be_sent_costs_nothing(alone: Connections) -> None:
    before = await alone.call("CLIENT", "ID")
    with pytest.raises(TypeError):
        await alone.call("SET", None)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(UnicodeEncodeError):
        await alone.call("SET", "\ud800")

    assert await alone.call("CLIENT", "ID") == before


async def test_connections_set_their_name_and_use_their_database(alone: Connections) -> None:
    await alone.call("PING")

    [line] = connected(1)
    assert {"name=fairlane:fairlane", "resp=2"} <= set(line.split())


async def test_a_socket_is_another_way() -> None:
    connections = Connections(parse(f"unix://{valkey.server().socket}?db=2"))
    assert await connections.call("PING") == b"PONG"
    assert " flags=U " in connected(2)[0]
    await connections.close()


# -- connections -------------------------------------------------------------------------------------------------------


async def test_connections_are_opened_as_needed_used_again_and_never_too_many() -> None:
    connections = Connections(parse(url("pool=3", db=3)))
    one = {await connections.call("CLIENT", "ID") for _ in range(10)}
    many = await ids(connections, 12)
    found = len(connected(3))
    await connections.close()

    assert len(one) == 1
    assert one < many
    assert (len(many), found) == (3, 3)


async def test_an_unused_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    connections = Connections(parse(url(db=3)))
    assert len(await ids(connections, 3)) == 3
    await gone(3)
    assert await connections.call("PING") == b"PONG"
    await connections.close()


async def test_a_pool_without_a_free_connection_raises(alone: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
    holding = asyncio.create_task(alone.call("BLPOP", NOTHING, 0.5))
    await blocked(1)
    errors = await asyncio.gather(*(failure(alone) for _ in range(3)))

    assert {type(error) for error in errors} == {StoreUnavailable}
    assert "pool=" in str(errors[0])
    assert await holding is None
    assert await alone.call("PING") == b"PONG"


async def test_waiting_callers_are_served_in_order(alone: Connections) -> None:
    async with asyncio.timeout(30):
        await asyncio.gather(*(alone.call("RPUSH", "order", number) for number in range(300)))
        order = await alone.call("LRANGE", "order", 0, -1)
    await alone.call("DEL", "order")

    assert [int(number) for number in order] == list(range(300))


async def test_a_broken_connection_makes_room_for_a_waiting_caller(alone: Connections) -> None:
    broken = asyncio.create_task(failure(alone, "BLPOP", NOTHING, "0"))
    await blocked(1)
    waiting = asyncio.create_task(alone.call("PING"))
    await asyncio.sleep(0.01)
    [line] = connected(1)
    valkey.server().ask("CLIENT", "KILL", "ID", line.partition(" ")[0].removeprefix("id="))

    assert type(await broken) is StoreUnavailable
    assert await asyncio.wait_for(waiting, 30) == b"PONG"


async def test_the_kernel_watches_the_other_side(alone: Connections) -> None:
    await alone.call("PING")
    [(line, _)] = alone._pools[asyncio.get_running_loop()]._kept
    assert line.socket is not None
    assert line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert line.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == sockets.UNANSWERED_SECONDS * 1000


@pytest.mark.parametrize("pause", [0.0, 0.01])
async def test_a_connection_with_unrequested_replies_is_not_used(pause: float) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(10_000):
            writer.write(b"+OK\r\n" * data.count(b"*"))
            if b"PING" in data:
                await asyncio.sleep(pause)
                writer.write(b"+meant for nobody\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    connections = Connections(parse(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}?pool=1"))
    for _ in range(3):
        assert await connections.call("PING") == b"OK"
        await asyncio.sleep(0.05)
    await connections.close()
    server.close()
    await server.wait_closed()


# -- cancelling --------------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_spoils_nothing(alone: Connections) -> None:
    call = asyncio.create_task(alone.call("BLPOP", NOTHING, 30))
    await blocked(1)
    started = time.monotonic()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert await alone.call("ECHO", "mine") == b"mine"
    assert time.monotonic() - started < 10
    assert len(connected(1)) == 1


async def test_the_reply_to_a_cancelled_call_is_never_read_by_another() -> None:
    connections = Connections(parse(url("pool=2", db=4)))
    rng = random.Random(1)
    cancelled = number = 0
    while cancelled < 1_000:
        number += 1
        calls = [asyncio.create_task(connections.call("ECHO", f"{number}.{place}")) for place in range(6)]
        for _ in range(rng.randrange(10)):
            await asyncio.sleep(0)
        if rng.random() < 0.2:
            await asyncio.sleep(0.0003)
        for call in calls[:5]:
            cancelled += call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for place, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError) or answer == f"{number}.{place}".encode()
        assert answers[5] == f"{number}.5".encode()
    found = len(await ids(connections, 8))
    await connections.close()

    assert found == 2, "places of the pool were lost"


async def test_a_call_that_takes_too_long_is_an_outage_and_its_task_goes_on(alone: Connections) -> None:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        await alone.call("BLPOP", NOTHING, 30, timeout=0.2)

    assert 0.2 <= time.monotonic() - started < 15
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert await alone.call("ECHO", "mine") == b"mine"


# -- not getting in ----------------------------------------------------------------------------------------------------


async def refused(there: str) -> FairlaneError:
    connections = Connections(parse(there))
    error = await failure(connections)
    await connections.close()
    assert "hush" not in f"{error}{error.__cause__!r}{error.__cause__}"
    return error


@pytest.mark.parametrize("place", ["redis://ann:hush@127.0.0.1:{port}", "unix://:hush@/nowhere/{port}.sock"])
async def test_a_server_that_is_not_there(place: str) -> None:
    error = await refused(place.format(port=free_port()))

    assert type(error) is StoreUnavailable
    assert "Is the server running" in str(error)


async def test_a_host_that_is_not_there() -> None:
    assert type(await refused("redis://ann:hush@nowhere.invalid")) is StoreUnavailable


async def test_a_database_that_is_not_there() -> None:
    error = await refused(url(db=999))

    assert type(error) is StoreError
    assert "no database 999" in str(error)


async def test_a_server_that_is_not_redis() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    error = await refused(f"redis://:hush@127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    await server.wait_closed()

    assert type(error) is StoreUnavailable


async def test_a_hundred_callers_wait_once_for_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        connections = Connections(parse(f"redis://127.0.0.1:{port}?pool=4&connect_timeout=1"))
        started = time.monotonic()
        errors = await asyncio.gather(*(failure(connections) for _ in range(100)))
        took = time.monotonic() - started
        await connections.close()

    assert {type(error) for error in errors} == {StoreUnavailable}
    assert "did not answer within 1 s" in str(errors[0])
    assert 0.9 < took < 12
