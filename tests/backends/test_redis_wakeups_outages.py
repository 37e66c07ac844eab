"""Wake-ups by SUBSCRIBE and PUBLISH while the server is away, slow, or only just coming."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as driver

from fairlane.backends import notifier
from fairlane.backends.redis import notifier as redis_notifier
from fairlane.backends.redis import pair
from fairlane.backends.redis.address import parse
from fairlane.backends.redis.pair import dialling
from fairlane.backends.redis.wakeups import RedisWakeups
from fairlane.backends.topics import MOST_WAITING
from tests.servers import valkey
from tests.servers.postgresql import free_port

from .notices import threads, until
from .published import connected, opening

pytestmark = pytest.mark.anyio

NOTHING: frozenset[str] = frozenset()
Both = tuple[RedisWakeups, RedisWakeups]


@pytest.fixture(scope="module")
def mortal() -> Iterator[valkey.ValkeyServer]:
    """A server that may be stopped and frozen, and is given back running."""
    made = valkey.own_server()
    yield made
    made.close()


@pytest.fixture
def both(mortal: valkey.ValkeyServer) -> Iterator[Both]:
    with opening(mortal.port, mortal.fresh_prefix()) as opened:
        yield opened(), opened()


@pytest.fixture
async def admin(mortal: valkey.ValkeyServer) -> AsyncIterator[driver.Redis]:
    async with driver.Redis(host="127.0.0.1", port=mortal.port, protocol=2) as client:
        yield client


async def test_after_a_lost_connection_everybody_looks_at_everything_once(
    both: Both, admin: driver.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    wakeups, other = both
    ear = wakeups.subscribe(["queue:a", "queue:b", "job:1"])
    await admin.client_kill_filter(_type="pubsub")
    assert await ear.wait(3) == {"queue:a", "queue:b", "job:1"}
    assert await ear.wait(0.1) == NOTHING
    other.publish(["queue:b"])
    assert await ear.wait(5) == {"queue:b"}
    assert [record.levelno for record in caplog.records if record.name == "fairlane.wakeups"] == [logging.WARNING]


async def test_a_lost_connection_for_publishing_is_made_anew(both: Both, admin: driver.Redis) -> None:
    wakeups, other = both
    ear = wakeups.subscribe(["queue:a"])
    other.publish(["queue:a"])
    assert await ear.wait(5) == {"queue:a"}
    await admin.client_kill_filter(_type="normal", skipme=True)
    async with asyncio.timeout(5):
        while not await ear.wait(0.05):
            # The first finds out that the connection is gone, and is lost with it.
            other.publish(["queue:a"])
    assert await connected(admin) == 2


async def test_a_server_that_is_restarted_is_listened_to_again(
    mortal: valkey.ValkeyServer, both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fairlane.wakeups")
    wakeups, other = both
    ear, late = wakeups.subscribe(["queue:a", "job:1"]), other.subscribe([])
    other.publish(["leader"])
    await asyncio.to_thread(mortal.stop)
    spent = time.process_time()
    for _ in range(100):
        wakeups.publish(["queue:b", "job:2"])
        other.publish(["queue:b", "job:2"])
        await asyncio.sleep(0.01)
    spent = time.process_time() - spent
    before = time.monotonic()
    late.listen(["queue:a"])  # Nobody is held up by a server that is known to be away.
    assert time.monotonic() - before < 0.1
    assert await ear.wait(0) == NOTHING
    await asyncio.to_thread(mortal.start)
    back = time.monotonic()
    assert await ear.wait(5) == {"queue:a", "job:1"}
    assert await late.wait(5) == {"queue:a"}
    seconds = time.monotonic() - back
    sys.stdout.write(f"away for 1 s: {spent * 100:.1f} % of a processor for two; back after {seconds:.2f} s\n")
    assert seconds < 3
    assert spent < 0.4
    other.publish(["queue:a"])
    assert await ear.wait(5) == {"queue:a"}
    said = [record.levelname for record in caplog.records if record.name == "fairlane.wakeups"]
    assert sorted(said) == ["INFO", "INFO", "WARNING", "WARNING"]


async def test_a_frozen_server_blocks_nobody_and_nothing_grows(mortal: valkey.ValkeyServer, both: Both) -> None:
    wakeups, other = both
    ear, star = other.subscribe(["queue:a", "queue:b", "job:1"]), wakeups.subscribe(["queue:0-1"])
    with mortal.frozen():
        before = time.monotonic()
        for number in range(200):
            wakeups.publish(f"queue:{number}-{each}" for each in range(100))
        assert time.monotonic() - before < 2
        assert await star.wait(0) == {"queue:0-1"}
        await asyncio.sleep(0.1)
        assert len(wakeups._notifier._others) <= MOST_WAITING
        before = time.monotonic()
        wakeups.subscribe(["job:1"])  # It is not known yet that the server does not answer.
        assert time.monotonic() - before < notifier.LISTEN_SECONDS + 0.5
    # There were too many, so everybody is to look at everything.
    assert await ear.wait(5) == {"queue:a", "queue:b"}
    wakeups.publish(["job:1"])
    assert "job:1" in await until(ear, "job:1")


async def test_a_frozen_server_is_noticed_even_if_nothing_is_sent(
    mortal: valkey.ValkeyServer, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert redis_notifier.LOOK_SECONDS + notifier.COMMAND_SECONDS <= 15
    monkeypatch.setattr(redis_notifier, "LOOK_SECONDS", 0.1)
    wakeups, other = both
    ear = wakeups.subscribe(["queue:a"])
    # It is looked for again and again, and found.
    assert await ear.wait(0.5) == NOTHING
    monkeypatch.setattr(pair, "COMMAND_SECONDS", 0.2)
    monkeypatch.setattr(pair, "CONNECT_SECONDS", 2.0)
    with mortal.frozen():
        async with asyncio.timeout(2):
            while wakeups._notifier.listens(jobs=False, others=True):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # By now it tries to connect again.
        before = time.monotonic()
        wakeups.subscribe(["job:1"])
        assert time.monotonic() - before < 0.2
    assert await ear.wait(5) == {"queue:a"}
    other.publish(["queue:a"])
    assert await ear.wait(5) == {"queue:a"}


async def test_who_began_to_listen_before_the_server_did_looks_at_everything(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LISTEN_SECONDS", 0.0)
    wakeups, _ = both
    early, ear = wakeups.subscribe([]), wakeups.subscribe(["queue:a", "queue:b"])
    assert await ear.wait(5) == {"queue:a", "queue:b"}
    assert await ear.wait(0.1) == NOTHING
    in_time = wakeups.subscribe(["queue:a"])
    assert await in_time.wait(0.1) == NOTHING
    early.listen(["job:1"])
    assert await early.wait(5) == {"job:1"}
    assert await ear.wait(0.1) == NOTHING


async def test_a_listener_that_the_server_refuses_polls_on(
    mortal: valkey.ValkeyServer, admin: driver.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await admin.acl_setuser("deaf", enabled=True, nopass=True, commands=["+@all", "-subscribe"], channels=["*"])

    wakeups = RedisWakeups(dialling(parse(f"redis://deaf:x@127.0.0.1:{mortal.port}")), mortal.fresh_prefix())
    ear = wakeups.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await ear.wait(0) == {"queue:a"}
    async with asyncio.timeout(5):
        while "permissions" not in caplog.text:
            await asyncio.sleep(0.01)
    wakeups.close()
    assert not threads()
    [record] = [record for record in caplog.records if record.name == "fairlane.wakeups"]
    assert record.levelno == logging.WARNING


async def test_a_server_that_was_never_there_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    wakeups = RedisWakeups(dialling(parse(f"redis://127.0.0.1:{free_port()}")), "none:")
    before = time.monotonic()
    ear = wakeups.subscribe(["queue:a"])
    for _ in range(3):
        wakeups.publish(["queue:a", "queue:b"])
        assert await ear.wait(0) == {"queue:a"}
        await asyncio.sleep(0.3)
    wakeups.close()
    assert time.monotonic() - before < 3
    assert not threads()
    assert len([record for record in caplog.records if record.name == "fairlane.wakeups"]) == 1


async def test_a_server_that_accepts_and_says_nothing_holds_up_the_end_for_a_moment_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wakeups = RedisWakeups(dialling(parse(f"redis://127.0.0.1:{silent.getsockname()[1]}")), "none:")
        wakeups.publish(["queue:a"])
        await asyncio.sleep(0.1)
        before = time.monotonic()
        wakeups.close()
        assert time.monotonic() - before < notifier.CLOSE_SECONDS + 0.8
        assert not threads()
