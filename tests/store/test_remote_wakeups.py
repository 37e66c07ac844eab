"""Wake-ups through a server, as one process sees them. Two objects of one name stand for two processes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from fairlane.errors import InvalidInput
from fairlane.store.postgresql.notifier import ASK, HERE
from fairlane.store.redis.wakeups import SENDER
from fairlane.store.shared.notifier import ServerNotifier
from fairlane.store.shared.subscriptions import MOST_DELIVERED, TopicSubscription
from fairlane.store.shared.topics import MOST_WAITING

from .carriers import Carrier, Open
from .notices import Tap, listened_to, until
from .wakeup_process import Wakeups

pytestmark = pytest.mark.anyio

NOTHING: frozenset[str] = frozenset()
MARKER = "session:marker"


# -- what is received -------------------------------------------------------------------------------------------------


async def test_a_listener_receives_its_topics_and_no_others(opened: Open) -> None:
    subscription = opened().subscribe(["queue:a", "session:s"])
    opened().publish(["queue:b", "queue:a", "job:1", "session:t"])
    assert await subscription.wait(10) == {"queue:a"}


async def test_topics_published_once_subscribe_has_returned_are_delivered_and_no_others(opened: Open) -> None:
    for number in range(10):
        publisher = opened(f"early_{number}")
        publisher.publish(["leader"])  # connects, so that the message below goes at once
        subscription = opened(f"early_{number}").subscribe(["queue:a", "queue:b", "job:1", "job:2"])
        publisher.publish(["queue:a", "job:2"])
        assert await until(subscription, "queue:a", "job:2") == {"queue:a", "job:2"}


async def test_topics_subscribed_later_are_delivered_from_then_on(opened: Open) -> None:
    publisher = opened()
    subscription = opened().subscribe([])
    subscription.listen(["queue:a"])
    publisher.publish(["queue:a"])
    assert await subscription.wait(10) == {"queue:a"}
    subscription.listen(["queue:a", "job:1", "place:q/lane"])
    publisher.publish(["job:1", "place:q/lane"])
    assert await until(subscription, "job:1", "place:q/lane") == {"job:1", "place:q/lane"}


async def test_a_publisher_that_listens_is_notified_once(opened: Open) -> None:
    wakeups, other = opened(), opened()
    subscription, echo = wakeups.subscribe(["queue:a", MARKER]), other.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await subscription.wait(0) == {"queue:a"}
    assert await echo.wait(10) == {"queue:a"}  # so the server has sent it to both
    other.publish([MARKER])
    assert await subscription.wait(10) == {MARKER}


async def test_topics_published_since_the_last_wait_are_delivered_once(opened: Open) -> None:
    wakeups = opened()
    subscription = wakeups.subscribe(["queue:a", "queue:b"])
    for topic in ("queue:a", "queue:b", "queue:a"):
        wakeups.publish([topic])
    assert await subscription.wait(0) == {"queue:a", "queue:b"}
    await asyncio.sleep(0.01)
    # Nothing of it is left that would end this wait before its time.
    before = time.monotonic()
    assert await subscription.wait(0.05) == NOTHING
    assert time.monotonic() - before > 0.04


async def test_a_topic_with_a_star_matches_every_topic_with_its_prefix_and_no_sign(opened: Open) -> None:
    subscription, all_of_it = opened().subscribe(["job:*", "queue:img-*"]), opened().subscribe(["*"])
    published = {"job:1", "job:2", "place:q/ü", "queue:img-7", "queue:mail", "session:s"}
    opened().publish(published)
    assert await until(subscription, "job:1", "queue:img-7") == {"job:1", "job:2", "queue:img-7"}
    assert await until(all_of_it, *published) == published


async def test_a_listener_that_does_not_keep_up_is_not_flooded(opened: Open) -> None:
    wakeups = opened()
    subscription = wakeups.subscribe(["job:*", "queue:a"])
    # A server that begins to listen late delivers all topics once.
    async with asyncio.timeout(30):
        while not subscription.receives:
            await asyncio.sleep(0.01)
    await subscription.wait(0.1)
    for number in range(MOST_DELIVERED + 1):
        wakeups.publish([f"job:{number}"])
    assert await subscription.wait(0) == {"job:*", "queue:a"}
    wakeups.publish(["job:1"])
    assert await subscription.wait(0) == {"job:1"}


async def test_a_listener_that_does_not_keep_up_with_the_server_is_not_flooded(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    subscription, end = wakeups.subscribe(["job:*", "queue:a"]), wakeups.subscribe(["job:end"])
    for start in range(0, MOST_DELIVERED + 1, 500):
        await tap.send("jobs", "\n".join(f"job:{number}" for number in range(start, start + 500)))
    await tap.send("jobs", "job:end")
    await until(end, "job:end")
    assert {"job:*", "queue:a"} <= await subscription.wait(0)
    await tap.send("jobs", "job:1")
    assert await subscription.wait(10) == {"job:1"}


async def test_listen_replaces_the_topics_and_keeps_pending_notifications_of_those_that_stay(opened: Open) -> None:
    wakeups = opened()
    subscription = wakeups.subscribe(["queue:a", "queue:b"])
    wakeups.publish(["queue:a", "queue:b"])
    subscription.listen(["queue:b", "job:1"])
    wakeups.publish(["queue:a", "job:1"])
    assert await subscription.wait(10) == {"queue:b", "job:1"}


async def test_a_wait_in_vain_returns_nothing_when_its_time_has_passed(opened: Open) -> None:
    subscription = opened().subscribe(["queue:a"])
    before = time.monotonic()
    assert await subscription.wait(0.05) == NOTHING
    assert 0.04 < time.monotonic() - before < 10


async def test_schemas_and_namespaces_do_not_notify_each_other(carrier: Carrier, opened: Open) -> None:
    names = carrier.lookalikes
    subscriptions = {name: opened(name).subscribe(["queue:*", "job:*"]) for name in names}
    for subscription in subscriptions.values():
        await listened_to(subscription)
    for number, name in enumerate(names):
        opened(name).publish([f"queue:{number}", f"job:{number}"])
    for number, subscription in enumerate(subscriptions.values()):
        assert await until(subscription, f"queue:{number}", f"job:{number}") == {f"queue:{number}", f"job:{number}"}


@pytest.mark.parametrize("topic", ["", "mail", "/etc", HERE, ASK, SENDER])
async def test_what_is_no_topic_is_refused(opened: Open, topic: str) -> None:
    with pytest.raises(InvalidInput, match="topics"):
        opened().subscribe([topic])


async def test_the_callback_runs_although_the_wait_returned_first(opened: Open) -> None:
    woken: list[bool] = []
    subscription = opened().subscribe(["queue:a"], lambda: woken.append(True))
    thread = threading.Thread(target=subscription.deliver, args=(["queue:a"],))
    thread.start()
    thread.join()
    assert await subscription.wait() == {"queue:a"}
    await asyncio.sleep(0)
    assert woken
    subscription.close()


# -- what travels --------------------------------------------------------------------------------------------------


async def test_topics_about_jobs_have_a_channel_of_their_own(opened: Open, tap: Tap) -> None:
    opened().publish(["job:1", "queue:a", "place:q/lane", "leader"])
    await tap.until("jobs", "place:q/lane")
    await tap.until("others", "leader")
    assert sorted(tap.messages) == [("jobs", ["job:1", "place:q/lane"]), ("others", ["queue:a", "leader"])]


async def test_thousands_of_topics_at_once_are_all_delivered(opened: Open) -> None:
    topics = {f"job:{number:036}" for number in range(MOST_WAITING - 100)}
    subscription = opened().subscribe(topics)
    opened().publish(topics)
    assert await until(subscription, *topics) == topics


async def test_too_many_topics_mean_everything_of_their_kind(opened: Open) -> None:
    subscription = opened().subscribe(["job:1", "job:x*", "queue:a"])
    opened().publish([f"job:y{number}" for number in range(MOST_WAITING + 1)])
    assert await subscription.wait(10) == {"job:1", "job:x*"}


async def test_publications_within_milliseconds_travel_together(carrier: Carrier, opened: Open, tap: Tap) -> None:
    wakeups = opened()
    wakeups.publish(["queue:first"])
    await tap.until("others", "queue:first")
    await asyncio.sleep(0.05)
    for number in range(1_000):
        wakeups.publish([f"queue:{number % 100}"])
    wakeups.publish([MARKER])
    await tap.until("others", MARKER)
    assert {topic for _, topic in tap.received} == {
        "queue:first",
        MARKER,
        *(f"queue:{number}" for number in range(100)),
    }
    # A thousand calls take a few milliseconds, so they are a few messages with each topic once.
    assert len(tap.messages) < carrier.too_many_messages


# -- channels without subscriptions ---------------------------------------------------------------------------


async def test_channels_without_a_subscription_are_left_after_a_while(
    carrier: Carrier, opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier.look_every(0.2, monkeypatch)
    wakeups = opened()
    began = time.monotonic()
    subscription = wakeups.subscribe(["queue:a"])
    for number in range(5):
        # A process that waits for one job after the other keeps listening in between.
        each = wakeups.subscribe([f"job:{number}"])
        assert await each.wait(0.01) == NOTHING
        each.close()
        assert wakeups._notifier.listens(jobs=True, others=True)
    await _left(wakeups, jobs=True, others=False)
    # It looks once in 0.2 s, and leaves what was unused two times.
    assert time.monotonic() - began > 0.35
    assert wakeups._notifier.listens(jobs=False, others=True)
    await tap.send("others", "queue:a")
    assert await subscription.wait(10) == {"queue:a"}
    subscription.close()
    # The last one too; and it can be received again.
    await _left(wakeups, jobs=False, others=True)
    await asyncio.sleep(0.5)
    subscription = wakeups.subscribe(["queue:b", "job:1"])
    await tap.send("others", "queue:b")
    await tap.send("jobs", "job:1")
    assert await until(subscription, "queue:b", "job:1") == {"queue:b", "job:1"}


async def _left(wakeups: Wakeups, *, jobs: bool, others: bool) -> None:
    async with asyncio.timeout(30):
        while wakeups._notifier.listens(jobs=jobs, others=others):
            await asyncio.sleep(0.01)


async def test_a_subscription_made_while_its_channel_is_left_still_receives(
    carrier: Carrier, opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier.look_every(0.1, monkeypatch)
    wakeups = opened()
    wakeups.subscribe(["queue:a"])
    wakeups.subscribe(["job:1"]).close()
    came: list[TopicSubscription] = []
    still: list[bool] = []
    leave = ServerNotifier._leave_channel

    async def come_and_leave(self: ServerNotifier[object], connection: object, channel: str) -> None:
        came.append(wakeups.subscribe(["job:2"]))
        await leave(self, connection, channel)
        still.append(self.listens(jobs=True, others=True))

    monkeypatch.setattr(ServerNotifier, "_leave_channel", come_and_leave)
    async with asyncio.timeout(30):
        while not still:
            await asyncio.sleep(0.01)
    assert still == [True]
    await tap.send("jobs", "job:2")
    async with asyncio.timeout(30):
        while "job:2" not in came[0]._delivered:
            await asyncio.sleep(0.01)
