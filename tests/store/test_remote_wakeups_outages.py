"""Wake-ups while the server is down, slow, or starting."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from fairlane.store.shared import notifier
from fairlane.store.shared.topics import MOST_WAITING
from tests.servers.postgresql import free_port

from .carriers import SERVERS, Carrier, MortalServer, Open, carried_by, own_server
from .notices import threads, until
from .wakeup_process import Wakeups, wakeups_at

pytestmark = pytest.mark.anyio

NOTHING: frozenset[str] = frozenset()
Both = tuple[Wakeups, Wakeups]


@pytest.fixture(scope="module", params=SERVERS)
def mortal(request: pytest.FixtureRequest) -> Iterator[MortalServer]:
    """A server that may be stopped and frozen, and is given back running."""
    with own_server(str(request.param)) as made:
        yield made


@pytest.fixture
def carrier(mortal: MortalServer) -> Iterator[Carrier]:
    with carried_by(mortal) as made:
        yield made


@pytest.fixture
def both(opened: Open) -> Both:
    return opened(), opened()


async def test_after_a_lost_connection_every_listener_gets_every_topic_once(
    both: Both, carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    wakeups, other = both
    subscription = wakeups.subscribe(["queue:a", "queue:b", "job:1"])
    carrier.cut()
    assert await subscription.wait(3) == {"queue:a", "queue:b", "job:1"}
    assert await subscription.wait(0.1) == NOTHING
    other.publish(["queue:b"])
    assert await subscription.wait(10) == {"queue:b"}
    assert [record.levelno for record in caplog.records if record.name == "fairlane.store.wakeups"] == [logging.WARNING]


async def test_a_server_that_is_restarted_is_listened_to_again(
    mortal: MortalServer, both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fairlane.store.wakeups")
    wakeups, other = both
    subscription, late = wakeups.subscribe(["queue:a", "job:1"]), other.subscribe([])
    other.publish(["leader"])
    await asyncio.to_thread(mortal.stop)
    spent = time.process_time()
    for _ in range(300):
        wakeups.publish(["queue:b", "job:2"])
        other.publish(["queue:b", "job:2"])
        await asyncio.sleep(0.01)
    spent = time.process_time() - spent
    before = time.monotonic()
    late.listen(["queue:a"])  # A server that is known to be away does not delay callers.
    assert time.monotonic() - before < 1
    assert await subscription.wait(0) == NOTHING
    await asyncio.to_thread(mortal.start)
    back = time.monotonic()
    assert await subscription.wait(10) == {"queue:a", "job:1"}
    assert await late.wait(10) == {"queue:a"}
    seconds = time.monotonic() - back
    sys.stdout.write(f"away for 3 s: {spent / 3 * 100:.1f} % of a processor for two; back after {seconds:.2f} s\n")
    assert seconds < 3
    assert spent < 0.4
    other.publish(["queue:a"])
    assert await subscription.wait(10) == {"queue:a"}
    lines = [record.levelname for record in caplog.records if record.name == "fairlane.store.wakeups"]
    assert sorted(lines) == ["INFO", "INFO", "WARNING", "WARNING"]


async def test_a_frozen_server_blocks_no_caller_and_nothing_grows(mortal: MortalServer, both: Both) -> None:
    wakeups, other = both
    subscription, star = other.subscribe(["queue:a", "queue:b", "job:1"]), wakeups.subscribe(["queue:0-1"])
    with mortal.frozen():
        before = time.monotonic()
        for number in range(200):
            wakeups.publish(f"queue:{number}-{each}" for each in range(100))
        assert time.monotonic() - before < 10
        assert await star.wait(0) == {"queue:0-1"}
        await asyncio.sleep(0.1)
        assert len(wakeups._notifier._others) <= MOST_WAITING
        before = time.monotonic()
        wakeups.subscribe(["job:1"])  # It is not known yet that the server does not answer.
        assert time.monotonic() - before < notifier.LISTEN_SECONDS + 0.5
    # There were too many, so every subscription gets all its topics; "job:1" too if the connection did not outlast it.
    assert await subscription.wait(10) >= {"queue:a", "queue:b"}
    wakeups.publish(["job:1"])
    assert "job:1" in await until(subscription, "job:1")


async def test_a_frozen_server_is_noticed_even_if_nothing_is_sent(
    mortal: MortalServer, carrier: Carrier, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert carrier.notice_seconds <= 15
    carrier.look_every(0.1, monkeypatch)
    carrier.give_up_after(0.5, monkeypatch, connecting=2.0)
    wakeups, other = both
    subscription = wakeups.subscribe(["queue:a"])
    # It is retried again and again, until it is found.
    assert await subscription.wait(0.5) == NOTHING
    with mortal.frozen():
        async with asyncio.timeout(30):
            while wakeups._notifier.listens(jobs=False, others=True):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # By now it tries to connect again.
        before = time.monotonic()
        wakeups.subscribe(["job:1"])
        assert time.monotonic() - before < 1
    assert await subscription.wait(10) == {"queue:a"}
    other.publish(["queue:a"])
    assert await subscription.wait(10) == {"queue:a"}


async def test_of_many_callers_only_the_first_waits_for_a_frozen_server(
    mortal: MortalServer, carrier: Carrier, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LISTEN_SECONDS", 2.0)
    carrier.give_up_after(60.0, monkeypatch, connecting=60.0)
    wakeups, other = opened(), opened()
    with mortal.frozen():
        before = time.monotonic()
        subscriptions = [wakeups.subscribe([f"job:{number}"]) for number in range(10)]
        assert time.monotonic() - before < 5 * notifier.LISTEN_SECONDS
    for number, subscription in enumerate(subscriptions):
        # They may have missed topics.
        assert await subscription.wait(60) == {f"job:{number}"}
    other.publish(["job:3"])
    assert await subscriptions[3].wait(60) == {"job:3"}


async def test_a_subscription_made_before_the_server_listens_gets_every_topic(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LISTEN_SECONDS", 0.0)
    wakeups = opened()
    early, subscription = wakeups.subscribe([]), wakeups.subscribe(["queue:a", "queue:b"])
    assert await subscription.wait(10) == {"queue:a", "queue:b"}
    assert await subscription.wait(0.1) == NOTHING
    in_time = wakeups.subscribe(["queue:a"])
    assert await in_time.wait(0.1) == NOTHING
    early.listen(["job:1"])
    assert await early.wait(10) == {"job:1"}
    assert await subscription.wait(0.1) == NOTHING


@pytest.mark.parametrize("scheme", ["postgresql", "redis"])
async def test_a_server_that_was_never_there_blocks_no_caller(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    wakeups = wakeups_at(f"{scheme}://nobody:secret@127.0.0.1:{free_port()}/0", "none")
    before = time.monotonic()
    subscription = wakeups.subscribe(["queue:a"])
    for _ in range(3):
        wakeups.publish(["queue:a", "queue:b"])
        assert await subscription.wait(0) == {"queue:a"}
        await asyncio.sleep(0.3)
    wakeups.close()
    assert time.monotonic() - before < 3
    assert not threads()
    [record] = [record for record in caplog.records if record.name == "fairlane.store.wakeups"]
    assert "secret" not in record.getMessage()


@pytest.mark.parametrize("scheme", ["postgresql", "redis"])
async def test_a_server_that_accepts_and_says_nothing_holds_up_the_end_for_a_moment_only(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wakeups = wakeups_at(f"{scheme}://nobody:secret@127.0.0.1:{silent.getsockname()[1]}/0", "none")
        wakeups.publish(["queue:a"])
        await asyncio.sleep(0.1)
        before = time.monotonic()
        wakeups.close()
        assert time.monotonic() - before < notifier.CLOSE_SECONDS + 0.8
        assert not threads()
