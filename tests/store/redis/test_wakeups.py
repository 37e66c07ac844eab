"""Wake-ups by SUBSCRIBE and PUBLISH, specific to Redis: functions publish, and publishing has its own connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane.model.job import NewJob
from fairlane.store.redis.address import parse
from fairlane.store.redis.store import RedisStore
from tests.servers import valkey

from ..carriers import Carrier, Open, RedisCarrier, opening
from ..notices import Tap, threads, until
from ..wakeup_process import wakeups_at

pytestmark = pytest.mark.anyio

MOST_IN_A_STEP = 1_000


@pytest.fixture
def carrier() -> Carrier:
    return RedisCarrier(valkey.server())


@pytest.fixture
async def store(carrier: Carrier, opened: Open) -> AsyncIterator[RedisStore]:
    made = await RedisStore.open(carrier.url)
    yield made
    await made.close()


@pytest.fixture(scope="module")
def mine() -> Iterator[valkey.ValkeyServer]:
    """A server whose connections may be killed, and which may reject users."""
    with valkey.own_server() as made:
        yield made


# -- what the functions publish ------------------------------------------------------------------------------------


async def test_a_verb_notifies_its_own_process_and_others_through_the_server(
    store: RedisStore, opened: Open, tap: Tap
) -> None:
    other = opened()
    subscriptions = [wakeups.subscribe(["queue:default", "job:1"]) for wakeups in (store.wakeups, other)]
    await store.enqueue([NewJob(id="1", task="t")])
    for subscription in subscriptions:
        assert await subscription.wait(10) == {"queue:default"}
    await store.cancel(["1"])
    for subscription in subscriptions:
        assert "job:1" in await until(subscription, "job:1")
    # The functions alone have published: nothing bears the mark of a process.
    assert not tap.marks
    other.publish(["leader"])
    await tap.until("others", "leader")
    assert len(tap.marks) == 1


async def test_a_step_with_too_many_topics_publishes_one_for_everything(
    store: RedisStore, opened: Open, tap: Tap
) -> None:
    ids = [f"{number}" for number in range(MOST_IN_A_STEP + 1)]
    for part in (ids[:MOST_IN_A_STEP], ids[MOST_IN_A_STEP:]):
        await store.enqueue([NewJob(id=id, task="t") for id in part])
    subscription = opened().subscribe(["job:other", "queue:other"])
    tap.forget()
    await store.cancel(ids)
    assert await subscription.wait(10) == {"job:other"}
    await tap.until("jobs", "*")
    assert ("jobs", ["*"]) in tap.messages
    assert not tap.marks


async def test_a_store_without_listeners_has_no_thread(store: RedisStore) -> None:
    await store.enqueue([NewJob(id="1", task="t")])
    assert not threads()


async def test_a_store_that_was_forgotten_ends_its_wakeups(carrier: Carrier) -> None:
    store = RedisStore(parse(carrier.url), None)
    store.wakeups.publish(["queue:a"])
    assert threads()
    del store
    assert not threads()


# -- connections ---------------------------------------------------------------------------------------------------


async def test_a_lost_connection_for_publishing_is_made_anew(mine: valkey.ValkeyServer) -> None:
    carrier = RedisCarrier(mine)
    with opening(carrier) as opened:
        subscription, other = opened().subscribe(["queue:a"]), opened()
        other.publish(["queue:a"])
        assert await subscription.wait(10) == {"queue:a"}
        mine.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        async with asyncio.timeout(30):
            while not await subscription.wait(0.05):
                # The first finds out that the connection is gone, and is lost with it.
                other.publish(["queue:a"])
        assert carrier.connected() == 2


async def test_a_listener_that_the_server_refuses_polls_on(
    mine: valkey.ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    mine.ask("ACL", "SETUSER", "deaf", "on", "nopass", "+@all", "-subscribe", "&*")
    wakeups = wakeups_at(f"redis://deaf:x@127.0.0.1:{mine.port}", mine.fresh_prefix())
    subscription = wakeups.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await subscription.wait(0) == {"queue:a"}
    async with asyncio.timeout(30):
        while "permissions" not in caplog.text:
            await asyncio.sleep(0.01)
    wakeups.close()
    assert not threads()
    [record] = [record for record in caplog.records if record.name == "fairlane.store.wakeups"]
    assert record.levelno == logging.WARNING
