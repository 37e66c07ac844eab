"""Connections: how many there are, who uses them, and how they are cancelled, rejected, forked and closed."""

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
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest

from fairlane.errors import FairlaneError, InvalidInput, StoreError, StoreUnavailable
from fairlane.store.postgresql import database as module
from fairlane.store.postgresql import sockets
from fairlane.store.postgresql.address import parse
from fairlane.store.postgresql.database import Database
from fairlane.store.shared import sockets as lines
from tests.servers.postgresql import free_port, server

from ..postgresql_urls import as_role

pytestmark = pytest.mark.anyio

FORK = """
import asyncio, os, sys
from fairlane.store.postgresql.address import parse
from fairlane.store.postgresql.database import Database
from fairlane.errors import StoreError

database = Database(parse(sys.argv[1]))

async def ask():
    return (await database.fetchrow("SELECT pg_backend_pid() AS pid"))["pid"]

async def in_child():
    try:
        await ask()
    except StoreError as exc:
        print(exc, flush=True)
    await database.close()

async def main():
    before, child = await ask(), os.fork()
    if child == 0:
        # As after any fork: the parent's event loop is not the child's.
        asyncio._set_running_loop(None)
        asyncio.run(in_child())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert await ask() == before, "the child has hurt the parent's connection"
    await database.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A database that the tests of this module share; they need no schema in it."""
    made = server().fresh_database(migrated=False)
    yield made
    server().done(made)


@pytest.fixture
async def watch(url: str) -> AsyncIterator[Database]:
    """Another client that reads from the same server."""
    opened = Database(parse(url))
    yield opened
    await opened.close()


async def failure(database: Database, sql: str, *args: object) -> FairlaneError:
    with pytest.raises(FairlaneError) as caught:
        await database.execute(sql, *args)
    return caught.value


async def pids(database: Database, number: int) -> set[int]:
    """The server's processes behind so many calls at once."""
    rows = await asyncio.gather(
        *(database.fetchrow("SELECT pg_backend_pid() AS pid, pg_sleep(0.05)") for _ in range(number))
    )
    return {row["pid"] for row in rows if row is not None}


async def gone(watch: Database, name: str) -> None:
    """Wait until the server has no connection of this application any more."""
    async with asyncio.timeout(5):
        while await watch.fetch("SELECT FROM pg_stat_activity WHERE application_name = $1", name):
            await asyncio.sleep(0.02)


async def running(watch: Database, words: str) -> int:
    """Wait until a statement with this text runs. Returns the process id of the server."""
    async with asyncio.timeout(5):
        while True:
            look = (
                "SELECT pid FROM pg_stat_activity WHERE query LIKE $1 AND state = 'active' AND pid <> pg_backend_pid()"
            )
            row = await watch.fetchrow(look, f"%{words}%")
            if row is not None:
                return int(row["pid"])
            await asyncio.sleep(0.01)


# -- connections ------------------------------------------------------------------------------------------------------


async def test_connections_are_opened_as_needed_used_again_and_never_too_many(url: str) -> None:
    database = Database(parse(url + "?pool=3"))
    one = {(await pids(database, 1)).pop() for _ in range(10)}
    many = await pids(database, 12)
    await database.close()

    assert len(one) == 1
    assert len(many) == 3


async def test_an_unused_connection_is_closed(url: str, watch: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.3)
    database = Database(parse(url + "?application_name=sleepy"))
    assert len(await pids(database, 3)) == 3
    async with database.connection() as connection:
        await connection.execute("SELECT 1")
    await gone(watch, "sleepy")
    assert len(await pids(database, 1)) == 1
    await database.close()


async def test_a_pool_that_is_used_up_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
    database = Database(parse(url + "?pool=1"))
    async with database.connection():
        error = await failure(database, "SELECT 1")
    await database.execute("SELECT 1")
    await database.close()

    assert type(error) is StoreUnavailable
    assert "pool=" in str(error)


async def test_a_waiter_gets_the_connection_that_is_given_back(url: str) -> None:
    database = Database(parse(url + "?pool=1"))
    async with asyncio.timeout(5):
        await asyncio.gather(*(database.execute("SELECT pg_sleep(0.001)") for _ in range(200)))
    await database.close()


async def test_statements_are_kept_unless_connections_do_not_last(url: str) -> None:
    kept = {}
    for listen in ("on", "off"):
        database = Database(parse(url + f"?listen={listen}&pool=1"))
        for _ in range(3):
            await database.fetch("SELECT 'of ours'")
        rows = await database.fetch("SELECT FROM pg_prepared_statements WHERE statement = 'SELECT ''of ours'''")
        kept[listen] = len(rows)
        await database.close()

    assert kept == {"on": 1, "off": 0}


async def test_the_kernel_watches_the_other_side(url: str) -> None:
    database = Database(parse(url))
    async with database.connection() as connection:
        line = sockets.socket_of(connection)
        assert line is not None
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == lines.UNANSWERED_SECONDS * 1000
    await database.close()


# -- cancelling -------------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_is_stopped_and_spoils_nothing(url: str, watch: Database) -> None:
    database = Database(parse(url + "?pool=1"))
    call = asyncio.create_task(database.execute("SELECT pg_sleep(30), 'to be cancelled'"))
    pid = await running(watch, "to be cancelled")
    call.cancel()
    cancelled = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.monotonic() - cancelled < 10

    row = await database.fetchrow("SELECT pg_backend_pid() AS pid")
    assert time.monotonic() - cancelled < 15
    assert row is not None
    assert row["pid"] == pid, "the connection itself was fine"
    await database.close()


async def test_cancelling_at_any_moment_leaves_a_pool_that_works(url: str) -> None:
    database = Database(parse(url + "?pool=2"))
    rng = random.Random(1)
    for number in range(150):
        calls = [asyncio.create_task(database.fetchrow("SELECT $1::int AS n", number)) for _ in range(3)]
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.choice((0, 0, 0.0005, 0.001)))
        for call in calls[:2]:
            call.cancel()
        rest = await calls[2]
        await asyncio.gather(*calls, return_exceptions=True)
        assert rest is not None
        assert rest["n"] == number
    assert len(await pids(database, 8)) == 2
    await database.close()


async def test_a_cancelled_transaction_is_rolled_back(url: str) -> None:
    database = Database(parse(url + "?pool=1"))
    await database.execute("CREATE TABLE IF NOT EXISTS half (number int); TRUNCATE half")
    begun = asyncio.Event()

    async def work() -> None:
        async with database.transaction() as connection:
            await connection.execute("INSERT INTO half VALUES (1)")
            begun.set()
            await connection.execute("SELECT pg_sleep(30)")

    task = asyncio.create_task(work())
    await begun.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await database.fetch("SELECT * FROM half") == []
    await database.close()


# -- event loops, threads and forks -----------------------------------------------------------------------------------


async def test_every_event_loop_has_its_own_connections_at_the_same_time(url: str) -> None:
    database = Database(parse(url))
    here = await pids(database, 2)
    found: list[set[int]] = []

    def elsewhere() -> None:
        found.append(asyncio.run(pids(database, 2)))

    threads = [threading.Thread(target=elsewhere) for _ in range(3)]
    for thread in threads:
        thread.start()
    also_here = await pids(database, 2)
    for thread in threads:
        await asyncio.to_thread(thread.join)

    assert also_here == here
    assert len(set.union(here, *found)) == 8
    await database.close()


async def test_connections_end_with_their_event_loop(url: str, watch: Database) -> None:
    database = Database(parse(url + "?application_name=short-lived"))
    for _ in range(3):
        assert len(await asyncio.to_thread(lambda: asyncio.run(pids(database, 2)))) == 2
        assert not database._pools
    await gone(watch, "short-lived")
    await database.close()


async def test_a_task_that_ends_with_its_event_loop_can_still_call(url: str) -> None:
    database = Database(parse(url))
    said: list[object] = []

    async def last_words() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            said.append(await database.fetchrow("SELECT 1 AS one"))

    async def main() -> None:
        await database.execute("SELECT 1")
        await asyncio.wait([asyncio.create_task(last_words())], timeout=0.01)

    await asyncio.to_thread(lambda: asyncio.run(main()))

    assert len(said) == 1
    await database.close()


async def test_an_event_loop_that_was_just_closed_is_forgotten(url: str, watch: Database) -> None:
    database = Database(parse(url + "?application_name=abandoned"))

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(database.execute("SELECT 1"))
        loop.close()

    await asyncio.to_thread(abandon)
    [left] = database._pools.values()
    with warnings.catch_warnings():
        # Python's warnings about a loop that is closed with open connections.
        warnings.simplefilter("ignore", ResourceWarning)
        await database.execute("SELECT 1")
        assert left not in database._pools.values()
        await database.close()
        await gone(watch, "abandoned")
        del left
        gc.collect()


def test_a_fork_has_to_open_its_own(url: str) -> None:
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, url], capture_output=True, text=True, timeout=30, check=False
    )

    assert (told.returncode, told.stderr) == (0, "")
    assert "before a fork" in told.stdout


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_closing_ends_every_connection_and_every_call(url: str, watch: Database) -> None:
    database = Database(parse(url + "?application_name=closing"))
    await pids(database, 3)
    await database.close()
    await database.close()

    await gone(watch, "closing")
    for call in (database.execute("SELECT 1"), database.fetch("SELECT 1")):
        with pytest.raises(StoreError, match="closed"):
            await call
    with pytest.raises(StoreError, match="closed"):
        async with database.snapshot():
            pass


async def test_a_call_that_runs_is_finished_before_the_end(url: str, watch: Database) -> None:
    database = Database(parse(url))
    call = asyncio.create_task(database.fetchrow("SELECT 7 AS seven, pg_sleep(0.3), 'still running'"))
    await running(watch, "still running")
    await database.close()

    row = await call
    assert row is not None
    assert row["seven"] == 7


async def test_a_call_that_does_not_end_is_ended(url: str, watch: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.2)
    database = Database(parse(url + "?application_name=stuck"))
    call = asyncio.create_task(database.execute("SELECT pg_sleep(30), 'does not end'"))
    await running(watch, "does not end")
    started = time.monotonic()
    await database.close()

    with pytest.raises(StoreUnavailable):
        await call
    assert time.monotonic() - started < 15


async def test_closing_reaches_event_loops_of_other_threads(url: str, watch: Database) -> None:
    database = Database(parse(url + "?application_name=elsewhere"))
    ready, over = threading.Event(), threading.Event()

    async def stay() -> None:
        await database.execute("SELECT 1")
        ready.set()
        while not over.is_set():
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(stay()))
    thread.start()
    await asyncio.to_thread(ready.wait)
    try:
        await database.close()
        await gone(watch, "elsewhere")
    finally:
        over.set()
        await asyncio.to_thread(thread.join)


# -- not getting in ---------------------------------------------------------------------------------------------------


async def refused(url: str) -> FairlaneError:
    database = Database(parse(as_role(url, f"{urlsplit(url).username}:hush")))
    error = await failure(database, "SELECT 1")
    await database.close()
    assert "hush" not in f"{error}{error.__cause__}"
    return error


async def test_a_server_that_is_not_there(url: str) -> None:
    error = await refused(f"postgresql://fairlane@127.0.0.1:{free_port()}/jobs")

    assert type(error) is StoreUnavailable
    assert "Is the server running" in str(error)


async def test_a_host_that_is_not_there() -> None:
    error = await refused("postgresql://fairlane@nowhere.invalid/jobs")

    assert type(error) is StoreUnavailable


async def test_a_database_or_a_role_that_is_not_there(url: str) -> None:
    for wrong in (url + "_not", as_role(url, "stranger")):
        error = await refused(wrong)
        assert type(error) is StoreError, error


async def test_an_option_that_the_server_does_not_know(url: str) -> None:
    error = await refused(url + "?pol=5")

    assert type(error) is InvalidInput
    assert '"pol"' in str(error)


async def test_a_server_that_has_no_connection_left(url: str, watch: Database) -> None:
    await watch.execute("DROP ROLE IF EXISTS lonely; CREATE ROLE lonely LOGIN CONNECTION LIMIT 1")
    database = Database(parse(as_role(url, "lonely")))
    try:
        async with database.connection():
            error = await failure(database, "SELECT 1")
        await database.execute("SELECT 1")
    finally:
        await database.close()
        await asyncio.sleep(0.05)
        await watch.execute("DROP ROLE lonely")

    assert type(error) is StoreUnavailable
    assert "pool=" in str(error)


async def test_a_hundred_callers_wait_once_for_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        database = Database(parse(f"postgresql://x@127.0.0.1:{silent.getsockname()[1]}/x?pool=4&connect_timeout=1"))
        started = time.monotonic()
        errors = await asyncio.gather(*(failure(database, "SELECT 1") for _ in range(100)))
        took = time.monotonic() - started
        await database.close()

    assert {type(error) for error in errors} == {StoreUnavailable}
    assert "did not answer within 1 s" in str(errors[0])
    assert 0.9 < took < 12
