"""Wake-ups by SUBSCRIBE and PUBLISH, as one process sees them. Two objects on one namespace stand for two processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from fairlane.backends.ears import MOST_HEARD, Ear
from fairlane.backends.redis import notifier
from fairlane.backends.redis.pair import Pair
from fairlane.backends.redis.store import RedisStore
from fairlane.backends.redis.wakeups import RedisWakeups
from fairlane.backends.topics import MOST_WAITING
from fairlane.errors import InvalidInput
from fairlane.job import NewJob
from tests.servers import valkey

from .notices import listened_to, threads, until
from .published import Open, Tap, opening, tapping

pytestmark = pytest.mark.anyio

NOTHING: frozenset[str] = frozenset()
MARKER = "session:marker"
MOST_IN_A_STEP = 1_000


@pytest.fixture
def port() -> int:
    return valkey.server().port


@pytest.fixture
def prefix() -> str:
    return valkey.server().fresh_prefix()


@pytest.fixture
def opened(port: int, prefix: str) -> Iterator[Open]:
    with opening(port, prefix) as open_one:
        yield open_one


@pytest.fixture
async def tap(port: int, prefix: str) -> AsyncIterator[Tap]:
    async with tapping(port, prefix) as tapped:
        yield tapped


@pytest.fixture
async def store(port: int, prefix: str, opened: Open) -> AsyncIterator[RedisStore]:
    made = await RedisStore.open(f"redis://127.0.0.1:{port}?namespace={prefix.strip('{}:')}")
    yield made
    await made.close()


# -- what is heard -------------------------------------------------------------------------------------------------


async def test_a_listener_hears_its_topics_and_no_others(opened: Open) -> None:
    ear = opened().subscribe(["queue:a", "session:s"])
    opened().publish(["queue:b", "queue:a", "job:1", "session:t"])
    assert await ear.wait(5) == {"queue:a"}


async def test_what_is_published_as_soon_as_subscribe_returns_is_heard_and_nothing_else(opened: Open) -> None:
    for number in range(10):
        publisher = opened(f"early_{number}:")
        publisher.publish(["leader"])  # connects, so that the message below goes at once
        ear = opened(f"early_{number}:").subscribe(["queue:a", "queue:b", "job:1", "job:2"])
        publisher.publish(["queue:a", "job:2"])
        assert await until(ear, "queue:a", "job:2") == {"queue:a", "job:2"}


async def test_what_is_listened_to_later_is_heard_from_then_on(opened: Open) -> None:
    publisher = opened()
    ear = opened().subscribe([])
    ear.listen(["queue:a"])
    publisher.publish(["queue:a"])
    assert await ear.wait(5) == {"queue:a"}
    ear.listen(["queue:a", "job:1", "place:q/lane"])
    publisher.publish(["job:1", "place:q/lane"])
    assert await until(ear, "job:1", "place:q/lane") == {"job:1", "place:q/lane"}


async def test_who_publishes_hears_it_once(opened: Open) -> None:
    wakeups, other = opened(), opened()
    ear, echo = wakeups.subscribe(["queue:a", MARKER]), other.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await ear.wait(0) == {"queue:a"}
    assert await echo.wait(5) == {"queue:a"}  # so the server has sent it to both
    other.publish([MARKER])
    assert await ear.wait(5) == {MARKER}


async def test_a_topic_with_a_star_hears_every_topic_that_begins_like_it_and_no_sign(opened: Open) -> None:
    ear, all_of_it = opened().subscribe(["job:*", "queue:img-*"]), opened().subscribe(["*"])
    published = {"job:1", "job:2", "place:q/ü", "queue:img-7", "queue:mail", "session:s"}
    opened().publish(published)
    assert await until(ear, "job:1", "queue:img-7") == {"job:1", "job:2", "queue:img-7"}
    assert await until(all_of_it, *published) == published


async def test_a_listener_that_does_not_keep_up_is_not_flooded(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    ear, end = wakeups.subscribe(["job:*", "queue:a"]), wakeups.subscribe(["job:end"])
    for start in range(0, MOST_HEARD + 1, 500):
        await tap.send("jobs", "\n".join(f"job:{number}" for number in range(start, start + 500)))
    await tap.send("jobs", "job:end")
    await until(end, "job:end")
    assert {"job:*", "queue:a"} <= await ear.wait(0)
    await tap.send("jobs", "job:1")
    assert await ear.wait(5) == {"job:1"}


async def test_listen_replaces_the_topics_and_keeps_what_was_heard_of_those_that_stay(opened: Open) -> None:
    wakeups = opened()
    ear = wakeups.subscribe(["queue:a", "queue:b"])
    wakeups.publish(["queue:a", "queue:b"])
    ear.listen(["queue:b", "job:1"])
    wakeups.publish(["queue:a", "job:1"])
    assert await ear.wait(5) == {"queue:b", "job:1"}


async def test_namespaces_do_not_hear_each_other(opened: Open) -> None:
    names = ["{one}:", "{One}:", "app:{one}:", "{ü}:"]
    ears = {name: opened(name).subscribe(["queue:*", "job:*"]) for name in names}
    for ear in ears.values():
        await listened_to(ear)
    for number, name in enumerate(names):
        opened(name).publish([f"queue:{number}", f"job:{number}"])
    for number, ear in enumerate(ears.values()):
        assert await until(ear, f"queue:{number}", f"job:{number}") == {f"queue:{number}", f"job:{number}"}


@pytest.mark.parametrize("topic", ["", "mail", notifier.SENDER])
async def test_what_is_no_topic_is_refused(opened: Open, topic: str) -> None:
    with pytest.raises(InvalidInput, match="topics"):
        opened().subscribe([topic])


# -- what travels --------------------------------------------------------------------------------------------------


async def test_a_bell_rings_though_whoever_waits_was_quicker(opened: Open) -> None:
    rung: list[bool] = []
    ear = opened().subscribe(["queue:a"], lambda: rung.append(True))
    thread = threading.Thread(target=ear.hear, args=(["queue:a"],))
    thread.start()
    thread.join()
    assert await ear.wait() == {"queue:a"}
    await asyncio.sleep(0)
    assert rung
    ear.close()


async def test_topics_about_jobs_have_a_channel_of_their_own(opened: Open, tap: Tap) -> None:
    opened().publish(["job:1", "queue:a", "place:q/lane", "leader"])
    await tap.until("jobs", "place:q/lane")
    await tap.until("topics", "leader")
    assert sorted((channel, lines[1:]) for channel, lines in tap.heard) == [
        ("jobs", ["job:1", "place:q/lane"]),
        ("topics", ["queue:a", "leader"]),
    ]


async def test_thousands_of_topics_at_once_are_all_heard(opened: Open) -> None:
    topics = {f"job:{number:036}" for number in range(MOST_WAITING - 100)}
    ear = opened().subscribe(topics)
    opened().publish(topics)
    assert await until(ear, *topics) == topics


async def test_too_many_topics_mean_everything_of_their_kind(opened: Open) -> None:
    ear = opened().subscribe(["job:1", "job:x*", "queue:a"])
    opened().publish([f"job:y{number}" for number in range(MOST_WAITING + 1)])
    assert await ear.wait(5) == {"job:1", "job:x*"}


async def test_publications_of_a_moment_travel_together(opened: Open, tap: Tap) -> None:
    wakeups = opened()
    wakeups.publish(["queue:first"])
    await tap.until("topics", "queue:first")
    for number in range(1_000):
        wakeups.publish([f"queue:{number % 100}"])
    wakeups.publish([MARKER])
    await tap.until("topics", MARKER)
    told = {line for _, lines in tap.heard for line in lines[1:]}
    assert told == {"queue:first", MARKER, *(f"queue:{number}" for number in range(100))}
    # Nobody waits for the one before, so what comes while it is under way goes with the next.
    assert len(tap.heard) < 500


# -- what the functions publish ------------------------------------------------------------------------------------


async def test_a_verb_tells_its_own_process_and_others_through_the_server(
    store: RedisStore, opened: Open, tap: Tap
) -> None:
    ears = [wakeups.subscribe(["queue:default", "job:1"]) for wakeups in (store.wakeups, opened())]
    await store.enqueue([NewJob(id="1", task="t")])
    for ear in ears:
        assert await ear.wait(5) == {"queue:default"}
    await store.cancel(["1"])
    for ear in ears:
        assert "job:1" in await until(ear, "job:1")
    # The functions alone have published: nothing bears the mark of a process.
    assert not [line for _, lines in tap.heard for line in lines if line.startswith(notifier.SENDER)]


async def test_a_step_with_too_many_topics_says_everything(store: RedisStore, opened: Open, tap: Tap) -> None:
    ids = [f"{number}" for number in range(MOST_IN_A_STEP + 1)]
    for part in (ids[:MOST_IN_A_STEP], ids[MOST_IN_A_STEP:]):
        await store.enqueue([NewJob(id=id, task="t") for id in part])
    ear = opened().subscribe(["job:other", "queue:other"])
    tap.heard.clear()
    await store.cancel(ids)
    assert await ear.wait(5) == {"job:other"}
    await tap.until("jobs", "*")
    assert ("jobs", ["*"]) in tap.heard


async def test_a_store_that_nobody_listens_to_has_no_thread(store: RedisStore) -> None:
    await store.enqueue([NewJob(id="1", task="t")])
    assert not threads()


# -- channels that nobody wants any more ---------------------------------------------------------------------------


async def test_channels_that_nobody_here_wants_any_more_are_left_after_a_while(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LOOK_SECONDS", 0.1)
    wakeups = opened()
    began = time.monotonic()
    ear = wakeups.subscribe(["queue:a"])
    for number in range(5):
        # Whoever waits for one job after the other goes on listening in between.
        each = wakeups.subscribe([f"job:{number}"])
        assert await each.wait(0.01) == NOTHING
        each.close()
        assert wakeups._notifier.listens(jobs=True, others=True)
    await _left(wakeups, jobs=True, others=False)
    # It looks once in 0.1 s, and leaves what was unused two times.
    assert time.monotonic() - began > 0.15
    assert wakeups._notifier.listens(jobs=False, others=True)
    await tap.send("topics", "queue:a")
    assert await ear.wait(5) == {"queue:a"}
    ear.close()
    # The last one too; and it can be heard again.
    await _left(wakeups, jobs=False, others=True)
    await asyncio.sleep(0.25)
    ear = wakeups.subscribe(["queue:b", "job:1"])
    await tap.send("topics", "queue:b")
    await tap.send("jobs", "job:1")
    assert await until(ear, "queue:b", "job:1") == {"queue:b", "job:1"}


async def _left(wakeups: RedisWakeups, *, jobs: bool, others: bool) -> None:
    async with asyncio.timeout(5):
        while wakeups._notifier.listens(jobs=jobs, others=others):
            await asyncio.sleep(0.01)


async def test_who_comes_just_when_a_channel_is_left_is_not_left_deaf(
    opened: Open, tap: Tap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "LOOK_SECONDS", 0.05)
    wakeups = opened()
    wakeups.subscribe(["queue:a"])
    wakeups.subscribe(["job:1"]).close()
    came: list[Ear] = []
    still: list[bool] = []
    leave = notifier.Notifier._stop_to_hear

    async def come_and_leave(self: notifier.Notifier, connection: Pair, channel: str) -> None:
        came.append(wakeups.subscribe(["job:2"]))
        await leave(self, connection, channel)
        still.append(self.listens(jobs=True, others=True))

    monkeypatch.setattr(notifier.Notifier, "_stop_to_hear", come_and_leave)
    async with asyncio.timeout(5):
        while not still:
            await asyncio.sleep(0.01)
    assert still == [True]
    await tap.send("jobs", "job:2")
    async with asyncio.timeout(5):
        while "job:2" not in came[0]._heard:
            await asyncio.sleep(0.01)
