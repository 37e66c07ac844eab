"""Connections to Redis: how many there are, who uses them, and how they are cancelled, refused, forked and let go."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator

import pytest
import uvloop

from fairlane.backends import sockets
from fairlane.backends.redis import connections as module
from fairlane.backends.redis.address import parse
from fairlane.backends.redis.connections import Connections
from fairlane.errors import FairlaneError, StoreError, StoreUnavailable
from tests.servers import valkey
from tests.servers.postgresql import free_port

pytestmark = pytest.mark.anyio
NOTHING = "a list that nobody fills"
FORK = """
import asyncio, os, sys
from fairlane.backends.redis.address import parse
from fairlane.backends.redis.connections import Connections
from fairlane.errors import StoreError

connections = Connections(parse(sys.argv[1]))

async def in_child():
    try:
        await connections.call("PING")
    except StoreError as exc:
        print(exc, flush=True)
    await connections.close()

async def main():
    before, child = await connections.call("CLIENT", "ID"), os.fork()
    if child == 0:
        # As after any fork: the parent's event loop is not the child's.
        asyncio._set_running_loop(None)
        asyncio.run(in_child())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert await connections.call("CLIENT", "ID") == before, "the child has hurt the parent's connection"
    await connections.close()

asyncio.run(main())
"""


def url(*options: str, db: int = 0) -> str:
    """The shared server. Those who look at its list of connections tell theirs by the database."""
    return f"{valkey.server().url}/{db}?{'&'.join(options)}"


def connected(db: int) -> list[str]:
    """The connections that use a database."""
    return [line for line in valkey.server().ask("CLIENT", "LIST").splitlines() if f" db={db} " in line]


async def gone(db: int) -> None:
    """Wait until nobody uses a database any more."""
    async with asyncio.timeout(5):
        while connected(db):
            await asyncio.sleep(0.02)


async def blocked(db: int, number: int = 1) -> None:
    """Wait until so many connections wait on the server."""
    async with asyncio.timeout(5):
        while sum(" flags=b " in line for line in connected(db)) < number:
            await asyncio.sleep(0.01)


async def ids(connections: Connections, number: int) -> set[int]:
    """The connections behind so many calls at once."""
    return set(await asyncio.gather(*(connections.call("CLIENT", "ID") for _ in range(number))))


async def failure(connections: Connections, *command: str) -> FairlaneError:
    with pytest.raises(FairlaneError) as caught:
        await connections.call(*(command or ("PING",)))
    return caught.value


@pytest.fixture
async def alone() -> AsyncIterator[Connections]:
    """With a single connection."""
    opened = Connections(parse(url("pool=1", db=1)))
    yield opened
    await opened.close()


# -- calls -------------------------------------------------------------------------------------------------------------


async def test_a_call_sends_bytes_texts_and_numbers_and_gets_what_the_server_says(alone: Connections) -> None:
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
        await alone.call("SET", None)  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        await alone.call("SET", "\ud800")

    assert await alone.call("CLIENT", "ID") == before


async def test_connections_say_who_they_are_and_use_their_database(alone: Connections) -> None:
    await alone.call("PING")

    [line] = connected(1)
    assert " name=fairlane " in line
    assert " resp=2 " in line


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


async def test_a_connection_that_nobody_uses_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    connections = Connections(parse(url(db=3)))
    assert len(await ids(connections, 3)) == 3
    await gone(3)
    assert await connections.call("PING") == b"PONG"
    await connections.close()


async def test_a_pool_that_is_used_up_says_so(alone: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
    holding = asyncio.create_task(alone.call("BLPOP", NOTHING, 1))
    await blocked(1)
    errors = await asyncio.gather(*(failure(alone) for _ in range(3)))

    assert {type(error) for error in errors} == {StoreUnavailable}
    assert "pool=" in str(errors[0])
    assert await holding is None
    assert await alone.call("PING") == b"PONG"


async def test_those_who_wait_come_in_their_order(alone: Connections) -> None:
    async with asyncio.timeout(5):
        await asyncio.gather(*(alone.call("RPUSH", "order", number) for number in range(300)))
        order = await alone.call("LRANGE", "order", 0, -1)
    await alone.call("DEL", "order")

    assert [int(number) for number in order] == list(range(300))


async def test_the_place_of_a_connection_that_broke_goes_to_who_waits(alone: Connections) -> None:
    broken = asyncio.create_task(failure(alone, "BLPOP", NOTHING, "0"))
    await blocked(1)
    waiting = asyncio.create_task(alone.call("PING"))
    await asyncio.sleep(0.01)
    [line] = connected(1)
    valkey.server().ask("CLIENT", "KILL", "ID", line.partition(" ")[0].removeprefix("id="))

    assert type(await broken) is StoreUnavailable
    assert await asyncio.wait_for(waiting, 2) == b"PONG"


async def test_the_kernel_watches_the_other_side(alone: Connections) -> None:
    await alone.call("PING")
    [(line, _)] = alone._pools[asyncio.get_running_loop()]._kept
    assert line.socket is not None
    assert line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert line.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == sockets.UNANSWERED_SECONDS * 1000


@pytest.mark.parametrize("pause", [0.0, 0.01])
async def test_a_server_that_says_more_than_it_was_asked_is_not_listened_to(pause: float) -> None:
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
    assert time.monotonic() - started < 0.5
    assert len(connected(1)) == 1


async def test_nobody_gets_the_answer_to_a_call_that_was_cancelled() -> None:
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

    assert 0.2 <= time.monotonic() - started < 2
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert await alone.call("ECHO", "mine") == b"mine"


# -- event loops, threads and forks ------------------------------------------------------------------------------------


async def test_every_event_loop_has_its_own_connections_at_the_same_time() -> None:
    connections = Connections(parse(url()))
    here = await ids(connections, 2)
    found: list[set[int]] = []
    threads = [
        threading.Thread(target=lambda run=run: found.append(run(ids(connections, 2))))  # type: ignore[misc]
        for run in (asyncio.run, asyncio.run, uvloop.run)
    ]
    for thread in threads:
        thread.start()
    also_here = await ids(connections, 2)
    for thread in threads:
        await asyncio.to_thread(thread.join)

    assert also_here == here
    assert len(set.union(here, *found)) == 8
    await connections.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
async def test_connections_end_with_their_event_loop(run: object) -> None:
    connections = Connections(parse(url(db=5)))
    assert callable(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert len(await asyncio.to_thread(lambda: run(ids(connections, 2)))) == 2
            assert not connections._pools
        gc.collect()
    await gone(5)
    await connections.close()


async def test_a_task_that_ends_with_its_event_loop_can_still_call() -> None:
    connections = Connections(parse(url()))
    said: list[object] = []

    async def last_words() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            said.append(await connections.call("PING"))

    async def main() -> None:
        await connections.call("PING")
        await asyncio.wait([asyncio.create_task(last_words())], timeout=0.01)

    await asyncio.to_thread(lambda: asyncio.run(main()))

    assert said == [b"PONG"]
    await connections.close()


async def test_an_event_loop_that_was_just_closed_is_forgotten() -> None:
    connections = Connections(parse(url(db=6)))

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(connections.call("PING"))
        loop.close()

    await asyncio.to_thread(abandon)
    [left] = connections._pools.values()
    with warnings.catch_warnings():
        # What Python says of a loop that is closed with its connections open.
        warnings.simplefilter("ignore", ResourceWarning)
        await connections.call("PING")
        assert left not in connections._pools.values()
        await connections.close()
        await gone(6)
        del left
        gc.collect()


def test_a_fork_has_to_open_its_own() -> None:
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, url()], capture_output=True, text=True, timeout=30, check=False
    )

    assert (told.returncode, told.stderr) == (0, "")
    assert "before a fork" in told.stdout


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_closing_ends_every_connection_and_every_call() -> None:
    connections = Connections(parse(url(db=7)))
    await ids(connections, 3)
    await connections.close()
    await connections.close()

    await gone(7)
    assert "closed" in str(await failure(connections))


async def test_a_call_that_runs_is_finished_before_the_end_and_one_that_waits_is_refused(alone: Connections) -> None:
    call = asyncio.create_task(alone.call("BLPOP", "seven", 5))
    await blocked(1)
    waiting = asyncio.create_task(failure(alone))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(alone.close())
    await asyncio.sleep(0.05)
    valkey.server().ask("EVAL", "redis.call('SELECT', 1) redis.call('RPUSH', 'seven', 7)", 0)
    await closing

    assert await call == [b"seven", b"7"]
    assert type(await waiting) is StoreError


async def test_a_call_that_does_not_end_is_ended(alone: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.2)
    call = asyncio.create_task(failure(alone, "BLPOP", NOTHING, "30"))
    await blocked(1)
    started = time.monotonic()
    await alone.close()

    assert type(await call) is StoreUnavailable
    assert time.monotonic() - started < 2


async def test_closing_reaches_event_loops_of_other_threads() -> None:
    connections = Connections(parse(url(db=8)))
    ready, over = threading.Event(), threading.Event()

    async def stay() -> None:
        await connections.call("PING")
        ready.set()
        while not over.is_set():
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(stay()))
    thread.start()
    await asyncio.to_thread(ready.wait)
    try:
        await connections.close()
        await gone(8)
    finally:
        over.set()
        await asyncio.to_thread(thread.join)


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


async def test_somebody_who_is_no_redis() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    error = await refused(f"redis://:hush@127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    await server.wait_closed()

    assert type(error) is StoreUnavailable


async def test_a_hundred_callers_wait_once_for_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        connections = Connections(parse(f"redis://127.0.0.1:{port}?pool=4&connect_timeout=1"))
        started = time.monotonic()
        errors = await asyncio.gather(*(failure(connections) for _ in range(100)))
        took = time.monotonic() - started
        await connections.close()

    assert {type(error) for error in errors} == {StoreUnavailable}
    assert "did not answer within 1 s" in str(errors[0])
    assert 0.9 < took < 2.5
