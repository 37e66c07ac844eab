"""Wake-ups by LISTEN and NOTIFY, specific to PostgreSQL: topics are gathered, and LISTEN is not required."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

from fairlane.store.postgresql import notifier
from fairlane.store.postgresql.wakeups import NotifyWakeups

from ..carriers import POSTGRESQL, Carrier, Open
from ..notices import Tap

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("carrier", POSTGRESQL, indirect=True)]

NOTHING: frozenset[str] = frozenset()


async def test_what_is_published_after_a_silence_goes_at_once(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakeups = opened()
    wakeups.publish(["queue:first"])
    await tap.until("others", "queue:first")
    await asyncio.sleep(0.05)
    monkeypatch.setattr(notifier, "GATHER_SECONDS", 1.0)
    before = time.monotonic()
    wakeups.publish(["queue:a"])
    await tap.until("others", "queue:a")
    assert time.monotonic() - before < 0.5
    wakeups.publish(["queue:b"])
    await tap.until("others", "queue:b")
    assert time.monotonic() - before > 0.9


@pytest.mark.parametrize(
    ("channel", "topic"), [("fairlane.topics.fairlane", "queue:b"), ("fairlane.jobs.fairlane", "job:1")]
)
async def test_any_role_that_knows_the_channels_of_a_schema_can_wake_its_listeners(
    carrier: Carrier, opened: Open, channel: str, topic: str
) -> None:
    subscription = opened().subscribe(["queue:a", "queue:b", "job:1"])
    with psycopg.connect(carrier.url, autocommit=True) as anybody:
        anybody.execute("SELECT pg_notify(%s, %s)", [channel, topic])
    assert await subscription.wait(5) == {topic}


async def test_without_listening_nothing_leaves_the_process(carrier: Carrier, opened: Open) -> None:
    wakeups, other = NotifyWakeups(carrier.url, carrier.name, listen=False), opened()
    subscription, outside = wakeups.subscribe(["queue:a", "job:1"]), other.subscribe(["queue:a", "job:1"])
    wakeups.publish(["queue:a", "job:1"])
    assert await subscription.wait(0) == {"queue:a", "job:1"}
    other.publish(["queue:a"])
    assert await outside.wait(5) == {"queue:a"}
    assert await subscription.wait(0.2) == NOTHING
    assert carrier.connected() == 1
    wakeups.close()
