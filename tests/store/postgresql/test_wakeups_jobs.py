"""Topics about jobs, which are many: they are sent only while a process listens, and then none is missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fairlane.store.postgresql import notifier
from fairlane.store.postgresql.notifier import ASK, HERE
from fairlane.store.shared.subscriptions import TopicSubscription

from ..carriers import POSTGRESQL, Open
from ..notices import Tap, until
from ..wakeup_process import Wakeups

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("carrier", POSTGRESQL, indirect=True)]

NOTHING: frozenset[str] = frozenset()
MARKER = "session:marker"


@asynccontextmanager
async def quiet_about_jobs(wakeups: Wakeups) -> AsyncIterator[TopicSubscription]:
    """A subscription to other topics, whose process has found out that no process listens to jobs."""
    subscription = wakeups.subscribe(["queue:any", MARKER])
    await asyncio.sleep(notifier.GRACE_SECONDS + 0.05)
    yield subscription
    subscription.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits for announcements and answers."""
    monkeypatch.setattr(notifier, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(notifier, "ANSWER_SECONDS", 0.05)


@pytest.mark.usefixtures("soon")
async def test_job_topics_are_not_sent_when_no_process_listens_to_any(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    async with quiet_about_jobs(wakeups):
        wakeups.publish(["job:1", "queue:a"])
        wakeups.publish(["job:2"])
        wakeups.publish([MARKER])
        await tap.until("others", MARKER)
    assert "job:" not in str(tap.received)
    assert ("others", "queue:a") in tap.received


async def test_a_process_that_cannot_know_of_listeners_sends_every_job_topic(opened: Open, tap: Tap) -> None:
    opened().publish(["job:1"])
    await tap.until("jobs", "job:1")


async def test_until_the_answers_are_there_every_job_is_sent(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    wakeups.subscribe(["queue:a"])
    wakeups.publish(["job:1"])
    await tap.until("jobs", "job:1")
    assert ("jobs", ASK) in tap.received


@pytest.mark.usefixtures("soon")
async def test_the_first_listener_is_served_from_the_moment_it_listens(opened: Open) -> None:
    publisher = opened()
    async with quiet_about_jobs(publisher):
        spans = []
        for number in range(20):
            with_ears = opened()
            subscription = with_ears.subscribe([f"job:{number}"])
            # Nothing is waited for here: the announcement may or may not have come before this.
            before = time.monotonic()
            publisher.publish([f"job:{number}"])
            assert await subscription.wait(5) == {f"job:{number}"}
            spans.append(time.monotonic() - before)
            with_ears.close()
            publisher._notifier._jobs_heard_until = 0.0  # as half a minute later
        assert sorted(spans)[10] < 0.1


@pytest.mark.usefixtures("soon")
async def test_a_job_topic_held_back_just_before_a_listener_announces_itself_is_sent(opened: Open, tap: Tap) -> None:
    publisher = opened()
    async with quiet_about_jobs(publisher) as subscription:
        publisher.publish(["job:old"])
        await asyncio.sleep(notifier.KEEP_SECONDS + 0.05)
        await tap.send("others", HERE)
        await tap.send("others", MARKER)
        await until(subscription, MARKER)
        publisher._notifier._jobs_heard_until = 0.0  # as half a minute later
        publisher.publish(["job:new"])
        publisher.publish(["queue:after"])
        await tap.until("others", "queue:after")
        assert "job:" not in str(tap.received)
        await tap.send("others", HERE)
        await tap.until("jobs", "job:new")
        publisher.publish(["job:next"])
        await tap.until("jobs", "job:next")
    assert "job:old" not in str(tap.received)


@pytest.mark.usefixtures("soon")
async def test_the_number_of_job_topics_held_back_is_bounded(opened: Open) -> None:
    publisher = opened()
    async with quiet_about_jobs(publisher):
        for number in range(200):
            publisher.publish([f"job:{number}-{each}" for each in range(100)])
        assert sum(len(jobs) for _, jobs in publisher._notifier._kept) <= notifier.MOST_KEPT


@pytest.mark.usefixtures("soon")
async def test_a_listener_that_stops_announcing_itself_is_forgotten(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "TRUST_SECONDS", 0.3)
    publisher = opened()
    async with quiet_about_jobs(publisher) as subscription:
        await tap.send("others", HERE)
        await tap.send("others", MARKER)
        await until(subscription, MARKER)
        publisher.publish(["job:1"])
        await tap.until("jobs", "job:1")
        await asyncio.sleep(0.35)
        publisher.publish(["job:2"])
        publisher.publish([MARKER + "2"])
        await tap.until("others", MARKER + "2")
    assert "job:2" not in str(tap.received)


async def test_a_listener_announces_itself_and_answers_a_query(opened: Open, tap: Tap) -> None:
    opened().subscribe(["job:1"])
    await tap.until("others", HERE)
    tap.forget()
    await tap.send("jobs", ASK)
    await tap.until("others", HERE, timeout=notifier.ANSWER_SECONDS + 0.5)


async def test_a_process_without_job_listeners_does_not_answer(opened: Open, tap: Tap, soon: None) -> None:
    async with quiet_about_jobs(opened()) as subscription:
        await tap.send("jobs", ASK)
        assert await subscription.wait(0.3) == NOTHING
    assert ("others", HERE) not in tap.received


async def test_of_many_listeners_a_few_answer(opened: Open, tap: Tap) -> None:
    # They receive each other's answers, because they listen to other topics too.
    for _ in range(12):
        opened().subscribe(["job:1", "queue:a"])
    await asyncio.sleep(notifier.ANSWER_SECONDS + 0.2)
    tap.forget()
    await tap.send("jobs", ASK)
    await asyncio.sleep(notifier.ANSWER_SECONDS + 0.2)
    answers = tap.received.count(("others", HERE))
    assert 2 <= answers < 10


@pytest.mark.usefixtures("soon")
async def test_listeners_announce_themselves_again_and_again(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "ANNOUNCE_SECONDS", 0.1)
    opened().subscribe(["job:1"])
    for _ in range(4):
        tap.forget()
        await tap.until("others", HERE)


async def test_two_listeners_that_publish_detect_each_other(
    opened: Open, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    monkeypatch.setattr(notifier, "ANNOUNCE_SECONDS", 0.1)
    monkeypatch.setattr(notifier, "TRUST_SECONDS", 0.4)
    everybody = [opened() for _ in range(4)]
    subscriptions = [each.subscribe(["job:*", "queue:a"]) for each in everybody]
    # Long after the first announcements have expired.
    await asyncio.sleep(1.0)
    for number, publisher in enumerate(everybody):
        publisher.publish([f"job:{number}"])
    for subscription in subscriptions:
        await until(subscription, *(f"job:{number}" for number in range(4)))


async def test_the_last_job_listener_leaves_the_channel_and_stops_answering(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "ANNOUNCE_SECONDS", 0.2)
    wakeups = opened()
    subscription = wakeups.subscribe(["queue:a"])
    wakeups.subscribe(["job:1"]).close()
    async with asyncio.timeout(5):
        while wakeups._notifier.listens(jobs=True, others=False):
            await asyncio.sleep(0.01)
    wakeups.publish([MARKER])
    await tap.until("others", MARKER)  # and with it all that was said before
    tap.forget()
    await tap.send("jobs", ASK)
    await tap.send("others", "queue:a")
    assert await subscription.wait(5) == {"queue:a"}
    await asyncio.sleep(0.3)
    assert ("others", HERE) not in tap.received
