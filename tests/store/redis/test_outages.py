"""A server that stops, dies, freezes or throws us out: no call hangs, and the next one works when it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from fairlane.errors import FairlaneError, StoreUnavailable
from fairlane.store.redis import connection_pool as module
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from fairlane.store.shared import deadlines
from tests.servers.valkey import ValkeyServer, own_server, system

from ..redis_clients import NOTHING, failure

pytestmark = pytest.mark.anyio
PROGRAMS: list[Path | None] = [None, *([found] if (found := system()) else [])]


@pytest.fixture(scope="module", params=PROGRAMS, ids=["first", "system"][: len(PROGRAMS)])
def mine(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    """A server that may be stopped and killed, and keeps its data."""
    with own_server(request.param, durable=True) as started:
        yield started


@pytest.fixture
async def connections(mine: ValkeyServer) -> AsyncIterator[Connections]:
    if mine.pid is None:
        mine.start()
    opened = Connections(parse(mine.url + "?pool=3"))
    yield opened
    await opened.close()


async def all_in_use(connections: Connections) -> set[int]:
    """Use every connection of the pool at once."""
    return set(await asyncio.gather(*(connections.call("CLIENT", "ID") for _ in range(3))))


def end_all(mine: ValkeyServer) -> None:
    """End all connections, while the event loop stands still."""
    mine.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    # Those used within the last moment are not looked at again.
    time.sleep(2 * module.FRESH_SECONDS)


async def begun(mine: ValkeyServer, connections: Connections) -> asyncio.Task[FairlaneError]:
    """A call that waits on the server."""
    call = asyncio.create_task(failure(connections, "BLPOP", NOTHING, "30"))
    async with asyncio.timeout(30):
        while " flags=b " not in mine.ask("CLIENT", "LIST"):
            await asyncio.sleep(0.01)
    return call


async def back(connections: Connections, within: float) -> None:
    """Wait until calls work again."""
    async with asyncio.timeout(within):
        while True:
            try:
                assert await connections.call("PING") == b"PONG"
                return
            except StoreUnavailable:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("busy", [True, False], ids=["busy loop", "idle loop"])
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_restart_between_calls_goes_unnoticed(
    mine: ValkeyServer, connections: Connections, end: str, busy: bool
) -> None:
    assert len(await all_in_use(connections)) == 3
    await connections.call("SET", "kept", end)
    if busy:
        # The event loop is blocked meanwhile, so it has noticed nothing when the next call is made.
        getattr(mine, end)()
        mine.start()
    else:
        await asyncio.to_thread(getattr(mine, end))
        await asyncio.to_thread(mine.start)

    assert await connections.call("GET", "kept") == end.encode()
    assert len(await all_in_use(connections)) == 3


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_call_in_progress_fails_at_once_and_the_next_one_works(
    mine: ValkeyServer, connections: Connections, end: str
) -> None:
    call = await begun(mine, connections)
    started = time.monotonic()
    await asyncio.to_thread(getattr(mine, end))
    error = await asyncio.wait_for(call, 30)
    assert time.monotonic() - started < 5
    assert type(error) is StoreUnavailable
    assert "Repeating the call is safe" in str(error)
    await asyncio.to_thread(mine.start)

    await back(connections, within=30)


async def test_connections_that_were_ended_while_idle_are_not_used(
    mine: ValkeyServer, connections: Connections
) -> None:
    for _ in range(5):
        before = await all_in_use(connections)
        end_all(mine)
        after = await all_in_use(connections)
        assert (len(before), len(after), before & after) == (3, 3, set())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_that_is_so_on_every_kind_of_event_loop(mine: ValkeyServer, run: Callable[[Any], None]) -> None:
    async def main() -> None:
        connections = Connections(parse(mine.url + "?pool=3"))
        for pause in (0.0, 0.05):
            before = await all_in_use(connections)
            end_all(mine)
            await asyncio.sleep(pause)
            assert not before & await all_in_use(connections)
        await connections.close()

    run(main())


async def test_connections_that_were_ended_in_the_middle(mine: ValkeyServer, connections: Connections) -> None:
    call = await begun(mine, connections)
    mine.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    assert type(await asyncio.wait_for(call, 30)) is StoreUnavailable
    assert len(await all_in_use(connections)) == 3


async def test_calls_during_an_outage_fail_fast_and_cost_little(mine: ValkeyServer, connections: Connections) -> None:
    await all_in_use(connections)
    mine.stop()
    started, used = time.monotonic(), time.process_time()
    errors = [await failure(connections) for _ in range(200)]
    took, used = time.monotonic() - started, time.process_time() - used
    mine.start()

    assert {type(error) for error in errors} == {StoreUnavailable}
    assert took < 20
    assert used < 2
    await back(connections, within=30)


async def test_calls_under_way_while_it_is_killed_again_and_again(mine: ValkeyServer, connections: Connections) -> None:
    """Each call is answered or fails with an unknown outcome, and what was answered is kept."""
    answered: list[int] = []
    over = False

    async def work(place: int) -> None:
        number = place
        while not over:
            try:
                await connections.call("SADD", "{done}", number)
                answered.append(number)
                number += 4
            except StoreUnavailable:
                await asyncio.sleep(0.01)

    await connections.call("DEL", "{done}")
    workers = [asyncio.create_task(work(place)) for place in range(4)]
    for _ in range(3):
        await asyncio.sleep(0.1)
        await asyncio.to_thread(mine.kill)
        await asyncio.to_thread(mine.start)
        before = len(answered)
        async with asyncio.timeout(30):
            while len(answered) == before:
                await asyncio.sleep(0.01)
    over = True
    await asyncio.gather(*workers)
    kept = {int(number) for number in await connections.call("SMEMBERS", "{done}")}

    assert len(answered) > 50
    assert set(answered) <= kept


async def test_a_frozen_server_is_noticed(mine: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CALL_SECONDS", 0.3)
    connections = Connections(parse(mine.url + "?pool=3&connect_timeout=1"))
    await all_in_use(connections)
    with mine.frozen():
        started = time.monotonic()
        assert type(await failure(connections)) is StoreUnavailable
        assert time.monotonic() - started < 5
        # The others lead to the same server, and were closed; a new one is not answered.
        error = await failure(connections)
        assert type(error) is StoreUnavailable
        assert "within 1 s" in str(error)
        assert time.monotonic() - started < 8
    await back(connections, within=30)
    await connections.close()


async def test_a_cancelled_call_does_not_wait_for_a_frozen_server(mine: ValkeyServer, connections: Connections) -> None:
    await connections.call("PING")
    with mine.frozen():
        call = asyncio.create_task(connections.call("ECHO", "theirs"))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - started < 5
    assert await connections.call("ECHO", "mine") == b"mine"


async def test_closing_does_not_wait_for_a_frozen_server(mine: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.3)
    connections = Connections(parse(mine.url))
    await connections.call("PING")
    with mine.frozen():
        call = asyncio.create_task(failure(connections))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await connections.close()
        assert time.monotonic() - started < 8
        assert type(await call) is StoreUnavailable
