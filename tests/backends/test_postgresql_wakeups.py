"""Wake-ups by LISTEN and NOTIFY, as one process sees them. Two objects on one schema stand for two processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane.backends.ears import MOST_HEARD
from fairlane.backends.postgresql import notifier
from fairlane.backends.postgresql.channels import ANYBODY, HERE
from fairlane.backends.topics import MOST_WAITING
from fairlane.errors import InvalidInput
from tests.servers.postgresql import DatabaseServer, server

from .notices import Open, Tap, listened_to, new_schema, opening, tapping, until

pytestmark = pytest.mark.anyio

NOTHING: frozenset[str] = frozenset()
MARKER = "session:marker"


@pytest.fixture(scope="module", params=["wheel", "system"])
def postgresql(request: pytest.FixtureRequest) -> DatabaseServer:
    return server(str(request.param))


@pytest.fixture(scope="module")
def database(postgresql: DatabaseServer) -> Iterator[str]:
    url = postgresql.fresh_database(migrated=False)
    yield url
    postgresql.done(url)


@pytest.fixture
def schema() -> str:
    return new_schema()


@pytest.fixture
def opened(database: str, schema: str) -> Iterator[Open]:
    with opening(database, schema) as open_one:
        yield open_one


@pytest.fixture
async def tap(database: str, schema: str) -> AsyncIterator[Tap]:
    async with tapping(database, schema) as tapped:
        yield tapped


# -- what is heard -------------------------------------------------------------------------------------------------


async def test_a_listener_hears_its_topics_and_no_others(opened: Open) -> None:
    ear = opened().subscribe(["queue:a", "session:s"])
    opened().publish(["queue:b", "queue:a", "job:1", "session:t"])
    assert await ear.wait(5) == {"queue:a"}


async def test_what_is_published_as_soon_as_subscribe_returns_is_heard_and_nothing_else(opened: Open) -> None:
    for number in range(10):
        publisher = opened(f"early_{number}")
        publisher.publish(["leader"])  # connects, so that the message below goes at once
        ear = opened(f"early_{number}").subscribe(["queue:a", "queue:b", "job:1", "job:2"])
        publisher.publish(["queue:a", "job:2"])
        assert await until(ear, "queue:a", "job:2") == {"queue:a", "job:2"}


async def test_what_is_listened_to_later_is_heard_from_then_on(opened: Open) -> None:
    publisher = opened()
    ear = opened().subscribe([])
    ear.listen(["queue:a"])
    publisher.publish(["queue:a"])
    assert await ear.wait(5) == {"queue:a"}
    ear.listen(["queue:a", "job:1"])
    publisher.publish(["job:1"])
    assert await ear.wait(5) == {"job:1"}


async def test_who_publishes_hears_it_once(opened: Open) -> None:
    wakeups, other = opened(), opened()
    ear, echo = wakeups.subscribe(["queue:a", MARKER]), other.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await ear.wait(0) == {"queue:a"}
    assert await echo.wait(5) == {"queue:a"}  # so the server has sent it to both
    other.publish([MARKER])
    assert await ear.wait(5) == {MARKER}


async def test_what_was_published_since_the_last_wait_is_heard_once(opened: Open) -> None:
    wakeups = opened()
    ear = wakeups.subscribe(["queue:a", "queue:b"])
    for topic in ("queue:a", "queue:b", "queue:a"):
        wakeups.publish([topic])
    assert await ear.wait(0) == {"queue:a", "queue:b"}
    await asyncio.sleep(0.01)
    # Nothing of it is left that would end this wait before its time.
    before = time.monotonic()
    assert await ear.wait(0.05) == NOTHING
    assert time.monotonic() - before > 0.04


async def test_a_topic_with_a_star_hears_every_topic_that_begins_like_it(opened: Open) -> None:
    ear, all_of_it = opened().subscribe(["job:*", "queue:img-*"]), opened().subscribe(["*"])
    published = {"job:1", "job:2", "queue:img-7", "queue:mail", "session:s"}
    opened().publish(published)
    assert await until(ear, "job:1", "queue:img-7") == {"job:1", "job:2", "queue:img-7"}
    assert await until(all_of_it, *published) == published


async def test_a_listener_that_does_not_keep_up_is_not_flooded(opened: Open) -> None:
    wakeups = opened(listen=False)
    ear = wakeups.subscribe(["job:*", "queue:a"])
    for number in range(MOST_HEARD + 1):
        wakeups.publish([f"job:{number}"])
    assert await ear.wait(0) == {"job:*", "queue:a"}
    wakeups.publish(["job:1"])
    assert await ear.wait(0) == {"job:1"}


async def test_listen_replaces_the_topics_and_keeps_what_was_heard_of_those_that_stay(opened: Open) -> None:
    wakeups = opened()
    ear = wakeups.subscribe(["queue:a", "queue:b"])
    wakeups.publish(["queue:a", "queue:b"])
    ear.listen(["queue:b", "job:1"])
    wakeups.publish(["queue:a", "job:1"])
    assert await ear.wait(5) == {"queue:b", "job:1"}


async def test_a_wait_in_vain_returns_nothing_when_its_time_has_passed(opened: Open) -> None:
    ear = opened().subscribe(["queue:a"])
    before = time.monotonic()
    assert await ear.wait(0.05) == NOTHING
    assert 0.04 < time.monotonic() - before < 1


@pytest.mark.parametrize("steps", range(6))
async def test_a_wait_that_is_cancelled_at_any_moment_loses_nothing(opened: Open, steps: int) -> None:
    wakeups = opened(listen=False)
    ear = wakeups.subscribe(["queue:a"])
    waiting = asyncio.create_task(ear.wait())
    await asyncio.sleep(0)
    await asyncio.to_thread(wakeups.publish, ["queue:a"])
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    try:
        heard = await waiting
    except asyncio.CancelledError:
        heard = await ear.wait(0)
    assert heard == {"queue:a"}


async def test_schemas_do_not_hear_each_other(opened: Open) -> None:
    names = ["one", "One", "jobs.one", "ein 'Schema' – \"ü\"", "x" * 63, "x" * 62 + "y"]
    ears = {name: opened(name).subscribe(["queue:*", "job:*"]) for name in names}
    for ear in ears.values():
        await listened_to(ear)
    for number, name in enumerate(names):
        opened(name).publish([f"queue:{number}", f"job:{number}"])
    for number, ear in enumerate(ears.values()):
        assert await until(ear, f"queue:{number}", f"job:{number}") == {f"queue:{number}", f"job:{number}"}


@pytest.mark.parametrize("topic", ["", "mail", "/etc", HERE, ANYBODY])
async def test_what_is_no_topic_is_refused(opened: Open, topic: str) -> None:
    with pytest.raises(InvalidInput, match="topics"):
        opened().subscribe([topic])


# -- what travels --------------------------------------------------------------------------------------------------


async def test_thousands_of_topics_at_once_are_all_heard(opened: Open) -> None:
    topics = {f"job:{number:036}" for number in range(MOST_WAITING - 100)}
    ear = opened().subscribe(topics)
    opened().publish(topics)
    assert await until(ear, *topics) == topics


async def test_too_many_topics_mean_everything_of_their_kind(opened: Open) -> None:
    ear = opened().subscribe(["job:1", "job:x*", "queue:a"])
    opened().publish([f"job:y{number}" for number in range(MOST_WAITING + 1)])
    assert await ear.wait(5) == {"job:1", "job:x*"}


async def test_publications_within_milliseconds_travel_together(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    wakeups.publish(["queue:first"])
    await tap.until("others", "queue:first")
    await asyncio.sleep(0.05)
    for number in range(1_000):
        wakeups.publish([f"queue:{number % 100}"])
    wakeups.publish([MARKER])
    await tap.until("others", MARKER)
    topics = [topic for _, topic in tap.heard]
    assert set(topics) == {"queue:first", MARKER, *(f"queue:{number}" for number in range(100))}
    # A thousand calls take a few milliseconds, so they are a few messages with each topic once.
    assert tap.messages < 50


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
