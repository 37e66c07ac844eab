"""Error replies of Redis: which error they become, with which advice, and without data."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.exceptions

from fairlane.errors import FairlaneError, StoreError, StoreFull, StoreUnavailable
from fairlane.store.redis.address import parse
from fairlane.store.redis.connection_pool import Connections
from fairlane.store.redis.driver_errors import (
    NotAllowed,
    Refusal,
    ServerError,
    did_nothing,
    translate,
    translate_connecting,
)
from tests.servers.valkey import ValkeyServer, own_server

from ..redis_clients import failure

pytestmark = pytest.mark.anyio
ADDRESS = parse("redis://ann:hush@db")
INSIDE = "script: f, on @user_function:12."


@pytest.fixture(scope="module")
def mine() -> Iterator[ValkeyServer]:
    """A server whose settings are changed."""
    with own_server() as started:
        yield started


@pytest.fixture
async def connections(mine: ValkeyServer) -> AsyncIterator[Connections]:
    opened = Connections(parse(mine.url + "?pool=3"))
    yield opened
    await opened.close()


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kind", "advice"),
    [
        ("LOADING Valkey is loading the dataset in memory", StoreUnavailable, "is loading its data"),
        ("BUSY Valkey is busy running a script.", StoreUnavailable, "busy"),
        ("MASTERDOWN Link with MASTER is down", StoreUnavailable, "has lost its master"),
        ("READONLY You can't write against a read only replica.", StoreUnavailable, "is a replica at the moment"),
        ("CLUSTERDOWN The cluster is down", StoreUnavailable, "cluster that is down"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", StoreUnavailable, "moving keys"),
        ("NOREPLICAS Not enough good replicas to write.", StoreUnavailable, "too few replicas"),
        ("MISCONF Errors writing to the AOF file: No space left on device", StoreUnavailable, "disk"),
        ("UNBLOCKED force unblock from blocking operation", StoreUnavailable, "role changed"),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreFull, "Raise maxmemory"),
        ("NOAUTH Authentication required.", StoreError, "Check user and password"),
        ("WRONGPASS invalid username-password pair or user is disabled.", StoreError, "Check user and password"),
        ("ERR AUTH <password> called without any password configured", StoreError, "Check user and password"),
        ("NOPERM No permissions to access a key", NotAllowed, "the command FCALL"),
        (f"ERR ACL failure in script: User ann {INSIDE}", StoreError, "Grant the whole role"),
        (f"ERR The user executing the script can't run this command {INSIDE}", StoreError, "Grant the whole role"),
        ("MOVED 866 127.0.0.1:7001", StoreError, "MOVED 866 127.0.0.1:7001"),
        ("ASK 866 127.0.0.1:7001", StoreError, "name that one in the URL"),
        ("ERR unknown command 'FCALL'", ServerError, "Redis 7.0"),
        ("WRONGTYPE Operation against a key", ServerError, "WRONGTYPE"),
        ("Some words of a script", ServerError, "Some words"),
    ],
)
def test_error_replies_are_translated(said: str, kind: type[FairlaneError], advice: str) -> None:
    error = translate(Refusal(said), ADDRESS, "FCALL")

    assert type(error) is kind
    assert advice in str(error)
    assert "redis://ann:***@db" in str(error)


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (redis.exceptions.ConnectionError("Connection closed by server."), StoreUnavailable),
        (redis.exceptions.InvalidResponse("Protocol error"), StoreUnavailable),
        (ConnectionResetError(104, "Connection reset by peer"), StoreUnavailable),
        (asyncio.IncompleteReadError(b"", 3), StoreUnavailable),
        (TimeoutError(), StoreUnavailable),
        (ZeroDivisionError("a mistake of ours"), StoreError),
        (StoreFull("as it is"), StoreFull),
    ],
)
def test_what_the_driver_and_the_network_say(exc: Exception, kind: type[FairlaneError]) -> None:
    assert type(translate(exc, ADDRESS, "PING")) is kind
    assert type(translate_connecting(exc, ADDRESS)) is kind


def test_errors_without_effect_are_recognised() -> None:
    before = Refusal("OOM command not allowed when used memory > 'maxmemory'.")
    inside = Refusal("OOM command not allowed when used memory > 'maxmemory'. script: 7c1, on @user_function:12.")
    broken = translate(redis.exceptions.ConnectionError("closed"), ADDRESS, "FCALL")
    loading = translate(Refusal("LOADING it is"), ADDRESS, "FCALL")
    loading.__cause__ = Refusal("LOADING it is")

    assert (did_nothing(before), did_nothing(inside)) == (True, False)
    assert (did_nothing(loading), did_nothing(broken)) == (True, False)
    assert not did_nothing(Refusal("ERR something else"))
    assert type(translate(before, ADDRESS, "FCALL")) is StoreFull
    assert type(translate(inside, ADDRESS, "FCALL")) is StoreError, "something may have been stored"


def test_a_server_error_has_a_code_and_can_be_sent_to_another_process() -> None:
    error = translate(Refusal("WRONGTYPE Operation against a key"), ADDRESS, "GET")
    assert isinstance(error, ServerError)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was written a moment ago

    assert (error.code, error.said) == ("WRONGTYPE", "WRONGTYPE Operation against a key")
    assert (str(again), again.code, again.said) == (str(error), error.code, error.said)


# -- a server that refuses ---------------------------------------------------------------------------------------------


async def test_a_function_that_is_not_there_is_recognised(connections: Connections) -> None:
    error = await failure(connections, "FCALL", "nothing", 0)

    assert isinstance(error, ServerError)
    assert "Function not found" in error.said


async def test_arguments_are_never_shown(connections: Connections) -> None:
    error = await failure(connections, "NOSUCH", "hush")

    assert isinstance(error, ServerError)
    assert "hush" not in "".join(traceback.format_exception(error)).replace('"NOSUCH", "hush"', "")


async def test_a_refused_command_leaves_its_connection_as_it_was(connections: Connections) -> None:
    before = await connections.call("CLIENT", "ID")
    await failure(connections, "NOSUCH")
    await failure(connections, "EVAL", "return redis.error_reply('MY own')", 0)

    assert await connections.call("CLIENT", "ID") == before


async def test_a_server_that_is_full(mine: ValkeyServer, connections: Connections) -> None:
    mine.ask("CONFIG", "SET", "maxmemory", 1)
    try:
        refused = await failure(connections, "SET", "a", "b")
        inside = await failure(connections, "EVAL", "return redis.call('SET', KEYS[1], 1)", 1, "a")
    finally:
        mine.ask("CONFIG", "SET", "maxmemory", 0)

    assert type(refused) is StoreFull
    assert did_nothing(refused)
    assert "Raise maxmemory" in str(inside)
    assert not did_nothing(inside)
    assert await connections.call("EXISTS", "a") == 0


async def test_a_server_without_replicas(mine: ValkeyServer, connections: Connections) -> None:
    mine.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        error = await failure(connections, "SET", "a", "b")
    finally:
        mine.ask("CONFIG", "SET", "min-replicas-to-write", 0)

    assert type(error) is StoreUnavailable
    assert did_nothing(error)


async def test_a_server_that_is_busy(mine: ValkeyServer, connections: Connections) -> None:
    mine.ask("CONFIG", "SET", "busy-reply-threshold", 20)
    running = asyncio.create_task(failure(connections, "EVAL", "while true do end", 0))
    await asyncio.sleep(0.1)
    error = await failure(connections, "GET", "a")
    await connections.call("SCRIPT", "KILL")

    assert type(error) is StoreUnavailable
    assert "busy" in str(error)
    assert isinstance(await running, StoreError)


async def test_a_replica_is_left_and_all_connections_to_it(mine: ValkeyServer, connections: Connections) -> None:
    before = set(await asyncio.gather(*(connections.call("CLIENT", "ID") for _ in range(3))))
    mine.ask("REPLICAOF", "127.0.0.1", 1)
    try:
        error = await failure(connections, "SET", "a", "b")
        # As with a failover, another server is the master the next time.
    finally:
        mine.ask("REPLICAOF", "NO", "ONE")
    after = set(await asyncio.gather(*(connections.call("CLIENT", "ID") for _ in range(3))))

    assert type(error) is StoreUnavailable
    assert did_nothing(error)
    assert (len(before), before & after) == (3, set())


async def test_a_server_that_has_no_connection_left(mine: ValkeyServer) -> None:
    limit = mine.ask("CONFIG", "GET", "maxclients")[1]
    here, there = Connections(parse(mine.url)), Connections(parse(mine.url))
    await here.call("CONFIG", "SET", "maxclients", 1)
    try:
        error = await failure(there, "PING")
    finally:
        await here.call("CONFIG", "SET", "maxclients", limit)
    await here.close()
    await there.close()

    assert type(error) is StoreUnavailable
    assert "pool=" in str(error)


# -- users -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[ValkeyServer]:
    """A server with a password, and a user with few rights."""
    with own_server(password="open:ses@me") as started:
        started.ask("ACL", "SETUSER", "ann", "on", ">hush", "~{mine}:*", "+get", "+ping", "+set")
        yield started


async def test_the_right_password_is_accepted(locked: ValkeyServer) -> None:
    connections = Connections(parse(locked.url))
    assert await connections.call("ACL", "WHOAMI") == b"default"
    await connections.close()


@pytest.mark.parametrize("login", ["", ":hush@", "ann:hushed@", "stranger:hush@", "ann@"])
async def test_a_wrong_password_is_reported(locked: ValkeyServer, login: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    connections = Connections(parse(f"redis://{login}127.0.0.1:{locked.port}"))
    error = await failure(connections, "PING")
    await connections.close()

    assert type(error) is StoreError
    assert "Check user and password" in str(error)
    assert "hush" not in "".join(traceback.format_exception(error)) + caplog.text


async def test_a_password_for_a_server_without_one_is_reported(mine: ValkeyServer) -> None:
    connections = Connections(parse(f"redis://:hush@127.0.0.1:{mine.port}"))
    error = await failure(connections, "PING")
    await connections.close()

    assert type(error) is StoreError
    assert "Check user and password" in str(error)


async def test_a_user_with_few_rights(locked: ValkeyServer) -> None:
    connections = Connections(parse(f"redis://ann:hush@127.0.0.1:{locked.port}"))
    # It may not even call CLIENT SETNAME.
    assert await connections.call("SET", "{mine}:a", 1) == b"OK"
    command = await failure(connections, "FCALL", "a", 0)
    key = await failure(connections, "GET", "yours")
    await connections.close()

    assert type(command) is type(key) is NotAllowed
    assert "fcall" in str(command)
    assert "the command GET" in str(key)
    assert "ACL SETUSER" in str(key)
