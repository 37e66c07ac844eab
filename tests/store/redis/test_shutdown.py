"""Connections to Redis belong to event loops and processes: they end with them, with forks and with the store."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator

import pytest
import uvloop

from fairlane.errors import StoreError, StoreUnavailable
from fairlane.store.redis import connection_pool as module
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from tests.servers import valkey

from ..redis_clients import NOTHING, blocked, failure, gone, ids, url

pytestmark = pytest.mark.anyio
FORK = """
import asyncio, os, sys
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
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


@pytest.fixture
async def alone() -> AsyncIterator[Connections]:
    """With a single connection."""
    opened = Connections(parse(url("pool=1", db=9)))
    yield opened
    await opened.close()


# -- event loops, threads and forks ------------------------------------------------------------------------------------


async def test_every_event_loop_has_its_own_connections_at_the_same_time() -> None:
    connections = Connections(parse(url()))
    here = await ids(connections, 2)
    found: list[set[int]] = []
    threads = [
        threading.Thread(target=lambda run=run: found.append(run(ids(connections, 2))))
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
        # What Python reports about a loop that is closed with open connections.
        warnings.simplefilter("ignore", ResourceWarning)
        await connections.call("PING")
        assert left not in connections._pools.values()
        await connections.close()
        await gone(6)
        del left
        gc.collect()


def test_a_fork_has_to_open_its_own() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, url()], capture_output=True, text=True, timeout=30, check=False
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert "before a fork" in result.stdout


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
    await blocked(9)
    waiting = asyncio.create_task(failure(alone))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(alone.close())
    await asyncio.sleep(0.05)
    valkey.server().ask("EVAL", "redis.call('SELECT', 9) redis.call('RPUSH', 'seven', 7)", 0)
    await closing

    assert await call == [b"seven", b"7"]
    assert type(await waiting) is StoreError


async def test_a_call_that_does_not_end_is_ended(alone: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.2)
    call = asyncio.create_task(failure(alone, "BLPOP", NOTHING, "30"))
    await blocked(9)
    started = time.monotonic()
    await alone.close()

    assert type(await call) is StoreUnavailable
    assert time.monotonic() - started < 15


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
