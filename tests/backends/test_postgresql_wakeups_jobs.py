"""Wake-ups about jobs, which are many: they travel only when somebody listens, and then none is missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from fairlane.backends.ears import Ear
from fairlane.backends.postgresql import notifier
from fairlane.backends.postgresql.channels import ANYBODY, HERE
from fairlane.backends.postgresql.wakeups import NotifyWakeups
from tests.servers.postgresql import DatabaseServer, server

from .notices import Open, Tap, new_schema, opening, tapping, until

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


@asynccontextmanager
async def quiet_about_jobs(wakeups: NotifyWakeups) -> AsyncIterator[Ear]:
    """A subscription to other topics, whose process has found out that nobody listens to jobs."""
    ear = wakeups.subscribe(["queue:any", MARKER])
    await asyncio.sleep(notifier.GRACE_SECONDS + 0.05)
    yield ear
    ear.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody makes up his mind quickly."""
    monkeypatch.setattr(notifier, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(notifier, "ANSWER_SECONDS", 0.05)


@pytest.mark.usefixtures("soon")
async def test_jobs_are_not_sent_when_nobody_listens_to_any(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    async with quiet_about_jobs(wakeups):
        wakeups.publish(["job:1", "queue:a"])
        wakeups.publish(["job:2"])
        wakeups.publish([MARKER])
        await tap.until("others", MARKER)
    assert "job:" not in str(tap.heard)
    assert ("others", "queue:a") in tap.heard


async def test_who_does_not_hear_whether_anybody_listens_sends_every_job(opened: Open, tap: Tap) -> None:
    opened().publish(["job:1"])
    await tap.until("jobs", "job:1")


async def test_until_the_answers_are_there_every_job_is_sent(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    wakeups.subscribe(["queue:a"])
    wakeups.publish(["job:1"])
    await tap.until("jobs", "job:1")
    assert ("jobs", ANYBODY) in tap.heard


@pytest.mark.usefixtures("soon")
async def test_the_first_listener_is_served_from_the_moment_it_listens(opened: Open) -> None:
    publisher = opened()
    async with quiet_about_jobs(publisher):
        spans = []
        for number in range(20):
            with_ears = opened()
            ear = with_ears.subscribe([f"job:{number}"])
            # Nothing is waited for here: the announcement may or may not have come before this.
            before = time.monotonic()
            publisher.publish([f"job:{number}"])
            assert await ear.wait(5) == {f"job:{number}"}
            spans.append(time.monotonic() - before)
            with_ears.close()
            publisher._notifier._jobs_heard_until = 0.0  # as half a minute later
        assert sorted(spans)[10] < 0.1


@pytest.mark.usefixtures("soon")
async def test_a_job_kept_back_just_before_a_listener_is_heard_of_is_sent_after_all(opened: Open, tap: Tap) -> None:
    publisher = opened()
    async with quiet_about_jobs(publisher) as ear:
        publisher.publish(["job:old"])
        await asyncio.sleep(notifier.KEEP_SECONDS + 0.05)
        await tap.send(tap.channels.others, HERE)
        await tap.send(tap.channels.others, MARKER)
        await until(ear, MARKER)
        publisher._notifier._jobs_heard_until = 0.0  # as half a minute later
        publisher.publish(["job:new"])
        publisher.publish(["queue:after"])
        await tap.until("others", "queue:after")
        assert "job:" not in str(tap.heard)
        await tap.send(tap.channels.others, HERE)
        await tap.until("jobs", "job:new")
        publisher.publish(["job:next"])
        await tap.until("jobs", "job:next")
    assert "job:old" not in str(tap.heard)


@pytest.mark.usefixtures("soon")
async def test_what_is_remembered_of_jobs_that_nobody_wants_is_bounded(opened: Open) -> None:
    publisher = opened()
    async with quiet_about_jobs(publisher):
        for number in range(200):
            publisher.publish([f"job:{number}-{each}" for each in range(100)])
        assert sum(len(jobs) for _, jobs in publisher._notifier._kept) <= notifier.MOST_KEPT


@pytest.mark.usefixtures("soon")
async def test_a_listener_that_is_not_heard_of_again_is_forgotten(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "TRUST_SECONDS", 0.3)
    publisher = opened()
    async with quiet_about_jobs(publisher) as ear:
        await tap.send(tap.channels.others, HERE)
        await tap.send(tap.channels.others, MARKER)
        await until(ear, MARKER)
        publisher.publish(["job:1"])
        await tap.until("jobs", "job:1")
        await asyncio.sleep(0.35)
        publisher.publish(["job:2"])
        publisher.publish([MARKER + "2"])
        await tap.until("others", MARKER + "2")
    assert "job:2" not in str(tap.heard)


async def test_a_listener_announces_itself_and_answers_who_asks(opened: Open, tap: Tap) -> None:
    opened().subscribe(["job:1"])
    await tap.until("others", HERE)
    tap.heard.clear()
    await tap.send(tap.channels.jobs, ANYBODY)
    await tap.until("others", HERE, timeout=notifier.ANSWER_SECONDS + 0.5)


async def test_who_listens_to_no_job_does_not_answer(opened: Open, tap: Tap, soon: None) -> None:
    async with quiet_about_jobs(opened()) as ear:
        await tap.send(tap.channels.jobs, ANYBODY)
        assert await ear.wait(0.3) == NOTHING
    assert ("others", HERE) not in tap.heard


async def test_of_many_listeners_a_few_answer(opened: Open, tap: Tap) -> None:
    # They hear each other's answers, because they listen to other topics too.
    for _ in range(12):
        opened().subscribe(["job:1", "queue:a"])
    await asyncio.sleep(notifier.ANSWER_SECONDS + 0.2)
    tap.heard.clear()
    await tap.send(tap.channels.jobs, ANYBODY)
    await asyncio.sleep(notifier.ANSWER_SECONDS + 0.2)
    answers = tap.heard.count(("others", HERE))
    assert 2 <= answers < 10


@pytest.mark.usefixtures("soon")
async def test_listeners_announce_themselves_again_and_again(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "ANNOUNCE_SECONDS", 0.1)
    opened().subscribe(["job:1"])
    for _ in range(4):
        tap.heard.clear()
        await tap.until("others", HERE, timeout=2)


async def test_two_listeners_that_publish_hear_of_each_other(
    opened: Open, monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    monkeypatch.setattr(notifier, "ANNOUNCE_SECONDS", 0.1)
    monkeypatch.setattr(notifier, "TRUST_SECONDS", 0.4)
    everybody = [opened() for _ in range(4)]
    ears = [each.subscribe(["job:*", "queue:a"]) for each in everybody]
    # Long after all that was said at the beginning has lost its worth.
    await asyncio.sleep(1.0)
    for number, publisher in enumerate(everybody):
        publisher.publish([f"job:{number}"])
    for ear in ears:
        await until(ear, *(f"job:{number}" for number in range(4)))


async def test_channels_that_nobody_here_wants_any_more_are_left_after_a_while(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "ANNOUNCE_SECONDS", 0.2)
    wakeups = opened()
    began = time.monotonic()
    ear = wakeups.subscribe(["queue:a"])
    for number in range(5):
        # Whoever waits for one job after the other goes on listening in between.
        each = wakeups.subscribe([f"job:{number}"])
        assert await each.wait(0.01) == NOTHING
        each.close()
        assert wakeups._notifier.listens(jobs=True, others=True)
    async with asyncio.timeout(5):
        while wakeups._notifier.listens(jobs=True, others=False):
            await asyncio.sleep(0.01)
    # It looks once in 0.2 s, and leaves what was unused two times.
    assert time.monotonic() - began > 0.35
    assert wakeups._notifier.listens(jobs=False, others=True)
    wakeups.publish([MARKER])
    await tap.until("others", MARKER)  # and with it all that was said before
    tap.heard.clear()
    await tap.send(tap.channels.jobs, ANYBODY)
    await tap.send(tap.channels.others, "queue:a")
    assert await ear.wait(5) == {"queue:a"}
    await asyncio.sleep(0.3)
    assert ("others", HERE) not in tap.heard


async def test_who_comes_just_when_a_channel_is_left_is_not_left_deaf(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "ANNOUNCE_SECONDS", 0.1)
    wakeups = opened()
    wakeups.subscribe(["queue:a"])
    wakeups.subscribe(["job:1"]).close()
    came: list[Ear] = []
    still: list[bool] = []
    leave = notifier.Notifier._stop_to_hear

    async def come_and_leave(self: notifier.Notifier, connection: object, channel: str) -> None:
        came.append(wakeups.subscribe(["job:2"]))
        await leave(self, connection, channel)
        still.append(self.listens(jobs=True, others=True))

    monkeypatch.setattr(notifier.Notifier, "_stop_to_hear", come_and_leave)
    async with asyncio.timeout(5):
        while not still:
            await asyncio.sleep(0.01)
    assert still == [True]
    await tap.send(tap.channels.jobs, "job:2")
    async with asyncio.timeout(5):
        while "job:2" not in came[0]._heard:
            await asyncio.sleep(0.01)
