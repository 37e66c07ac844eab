"""Wake-ups by datagram sockets, as one process sees them."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest

from fairlane.errors import InvalidInput
from fairlane.store.sqlite.wakeups import DATAGRAM_BYTES, DatagramWakeups, meeting_place

pytestmark = pytest.mark.anyio

NOTHING: frozenset[str] = frozenset()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, so that there is room for a socket's path behind it."""
    with TemporaryDirectory() as made:
        yield Path(made).resolve()


@pytest.fixture
def database(folder: Path) -> Path:
    """Where a database file would lie."""
    return folder / "a.db"


@pytest.fixture
def wakeups(database: Path) -> Iterator[DatagramWakeups]:
    opened = DatagramWakeups(database)
    yield opened
    opened.close()


def names(database: Path) -> list[str]:
    """The sockets that lie in the meeting place."""
    place = meeting_place(database)
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def abandoned(database: Path, name: str, *, age: float) -> Path:
    """A socket's name whose process is gone, left `age` seconds ago."""
    place = meeting_place(database)
    place.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(place / name))
    os.utime(place / name, (time.time() - age,) * 2)
    return place / name


async def test_a_listener_receives_its_topics_and_no_others(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["queue:a", "session:s"])
    wakeups.publish(["queue:b", "queue:a", "job:1", "session:t"])
    assert await subscription.wait(30) == {"queue:a"}


async def test_topics_published_since_the_last_wait_are_delivered_once(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["queue:a", "queue:b"])
    wakeups.publish(["queue:a"])
    wakeups.publish(["queue:b"])
    wakeups.publish(["queue:a"])
    assert await subscription.wait(30) == {"queue:a", "queue:b"}
    assert await subscription.wait(0) == NOTHING


async def test_every_listener_is_notified(wakeups: DatagramWakeups, database: Path) -> None:
    another = DatagramWakeups(database)
    subscriptions = [wakeups.subscribe(["leader"]), wakeups.subscribe(["leader"]), another.subscribe(["leader"])]
    wakeups.publish(["leader"])
    assert [await subscription.wait(30) for subscription in subscriptions] == [{"leader"}] * 3
    another.close()


async def test_a_wait_in_vain_returns_nothing_when_its_time_has_passed(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    before = time.monotonic()
    assert await subscription.wait(0.05) == NOTHING
    assert 0.04 < time.monotonic() - before < 10


async def test_topics_sent_before_a_wait_with_timeout_zero_are_delivered(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await subscription.wait(0) == {"queue:a"}


async def test_a_topic_with_a_star_matches_every_topic_with_its_prefix(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["job:*", "queue:img-*"])
    wakeups.publish(["job:1", "job:2", "queue:img-7", "queue:mail", "session:s"])
    assert await subscription.wait(30) == {"job:1", "job:2", "queue:img-7"}


async def test_a_star_alone_matches_every_topic(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["*"])
    published = {"job:1", "queue:a", "session:s", "worker:p/0", "leader"}
    wakeups.publish(published)
    assert await subscription.wait(30) == published


async def test_the_name_of_a_socket_contains_the_kinds_of_its_topics(wakeups: DatagramWakeups, database: Path) -> None:
    wakeups.subscribe(["queue:a", "queue:b", "worker:p/0", "session:s"])
    [name] = names(database)
    assert name.partition("-")[0] == "qsw"


async def test_a_listener_is_not_woken_for_a_kind_it_does_not_subscribe_to(
    wakeups: DatagramWakeups, database: Path
) -> None:
    wakeups.subscribe(["queue:a"])
    [name] = names(database)
    # No process reads from this socket, so a message would stay in it.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        stranger.bind(str(meeting_place(database) / f"s{name[1:]}"))
        wakeups.publish(["queue:a", "job:1"])
        with pytest.raises(BlockingIOError):
            stranger.recv(100)
        wakeups.publish(["queue:a", "session:x"])
        assert stranger.recv(100) == b"session:x"


async def test_listen_replaces_the_topics(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["queue:a", "queue:b"])
    wakeups.publish(["queue:a", "queue:b"])
    for _ in range(5):
        await asyncio.sleep(0)  # Until the loop has read the message.
    subscription.listen(["queue:b", "job:1"])
    wakeups.publish(["queue:a", "job:1"])
    assert await subscription.wait(30) == {"queue:b", "job:1"}


async def test_what_waits_in_the_socket_survives_a_change_of_kinds(wakeups: DatagramWakeups, database: Path) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    subscription.listen(["queue:a", "leader"])
    assert await subscription.wait(30) == {"queue:a"}
    [name] = names(database)
    assert name.startswith("lq-")


async def test_a_listener_that_is_renamed_while_a_message_is_sent_receives_it(
    wakeups: DatagramWakeups, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    changes = [["queue:a", "job:1"], ["queue:a", "leader"]]
    listed = os.listdir

    def list_and_change(path: str) -> list[str]:
        found = listed(path)
        if changes:
            subscription.listen(changes.pop())
        return found

    monkeypatch.setattr(os, "listdir", list_and_change)
    wakeups.publish(["queue:a"])
    assert await subscription.wait(30) == {"queue:a"}
    assert not changes


async def test_a_message_that_is_too_long_means_everything(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["job:1", "queue:a", "session:*"])
    wakeups.publish(f"job:{number:040}" for number in range(DATAGRAM_BYTES // 40))
    assert await subscription.wait(30) == {"job:1", "queue:a", "session:*"}


async def test_a_full_listener_never_blocks_and_then_gets_every_topic(
    wakeups: DatagramWakeups,
) -> None:
    subscription = wakeups.subscribe(["queue:a", "queue:b"])
    before = time.monotonic()
    for _ in range(1_000):
        wakeups.publish(["queue:a"])
    wakeups.publish(["queue:b"])  # Surely dropped: a system keeps far fewer messages for a socket.
    assert time.monotonic() - before < 20
    assert await subscription.wait(30) == {"queue:a", "queue:b"}
    wakeups.publish(["queue:a"])
    assert await subscription.wait(30) == {"queue:a"}


async def test_listeners_that_hang_do_not_silence_the_sender_towards_others(
    wakeups: DatagramWakeups, database: Path
) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    hanging = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(20)]
    for number, each in enumerate(hanging):
        each.bind(str(meeting_place(database) / f"jq-hanging{number}"))
    # Together they are larger than the send buffer of a socket.
    for _ in range(20):
        wakeups.publish(["queue:a", *(f"job:{number:040}" for number in range(DATAGRAM_BYTES // 60))])
        assert await subscription.wait(30) == {"queue:a"}
    for each in hanging:
        each.close()


async def test_the_name_of_a_dead_listener_is_removed(wakeups: DatagramWakeups, database: Path) -> None:
    left = abandoned(database, "q-dead", age=60)
    wakeups.publish(["queue:a"])
    assert not left.exists()


async def test_a_name_that_is_just_being_made_is_left_alone(wakeups: DatagramWakeups, database: Path) -> None:
    young = abandoned(database, "q-young", age=0)
    wakeups.publish(["queue:a"])
    assert young.exists()


async def test_a_file_that_is_no_socket_is_left_alone(wakeups: DatagramWakeups, database: Path) -> None:
    notes = meeting_place(database) / "q-notes"
    notes.parent.mkdir(mode=0o700)
    notes.write_text("mine")
    os.utime(notes, (0, 0))
    wakeups.publish(["queue:a"])
    assert notes.read_text() == "mine"


async def test_a_lost_name_comes_back_after_a_wait_in_vain(wakeups: DatagramWakeups, database: Path) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    [name] = names(database)
    (meeting_place(database) / name).unlink()
    meeting_place(database).rmdir()
    assert await subscription.wait(0) == NOTHING
    wakeups.publish(["queue:a"])
    assert await subscription.wait(30) == {"queue:a"}


async def test_without_a_socket_nothing_fails_and_nothing_is_delivered(
    wakeups: DatagramWakeups, database: Path
) -> None:
    obstacle = meeting_place(database)
    obstacle.write_text("in the way")
    subscription = wakeups.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await subscription.wait(0) == NOTHING
    obstacle.unlink()
    assert await subscription.wait(0) == NOTHING
    wakeups.publish(["queue:a"])
    assert await subscription.wait(30) == {"queue:a"}


async def test_the_directory_of_another_user_is_not_used(
    wakeups: DatagramWakeups, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    own = names(database)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    wakeups.subscribe(["queue:a"])
    assert names(database) == own
    wakeups.publish(["queue:a"])
    assert await subscription.wait(0) == NOTHING


async def test_only_its_user_may_enter_the_directory(wakeups: DatagramWakeups, database: Path) -> None:
    wakeups.subscribe(["queue:a"])
    assert stat.S_IMODE(meeting_place(database).stat().st_mode) == 0o700


def test_the_sockets_lie_beside_the_file_a_link_leads_to(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "a.db").touch()
    (folder / "link.db").symlink_to(folder / "data" / "a.db")
    assert meeting_place(folder / "link.db") == folder / "data" / "a.db-wake"


async def test_a_path_too_long_for_a_socket_gets_a_short_one(tmp_path: Path) -> None:
    database = tmp_path / ("d" * 90) / "a.db"
    database.parent.mkdir()
    place = meeting_place(database)
    assert len(os.fsencode(place)) < 60
    assert place != meeting_place(database.with_name("b.db"))
    wakeups = DatagramWakeups(database)
    subscription = wakeups.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await subscription.wait(30) == {"queue:a"}
    wakeups.close()
    assert not place.exists()


async def test_any_thread_may_publish(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["job:*"])
    start = threading.Barrier(4)

    def publish(thread: int) -> None:
        start.wait(30)
        for number in range(200):
            wakeups.publish([f"job:{thread}-{number}"])

    received: set[str] = set()
    with ThreadPoolExecutor(4) as pool:
        publishing = [pool.submit(publish, thread) for thread in range(4)]
        while not all(each.done() for each in publishing):
            received |= await subscription.wait(0.01)
    received |= await subscription.wait(0)
    assert [each.exception() for each in publishing] == [None] * 4
    threads = {topic[4] for topic in received}
    assert "*" in threads or threads == {"0", "1", "2", "3"}


async def test_closing_a_subscription_takes_its_name_away(wakeups: DatagramWakeups, database: Path) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    other = wakeups.subscribe(["leader"])
    subscription.close()
    subscription.close()
    [name] = names(database)
    assert name.startswith("l-")
    wakeups.publish(["queue:a", "leader"])
    assert await subscription.wait() == NOTHING
    assert await other.wait(30) == {"leader"}


async def test_a_closed_subscription_does_not_make_its_caller_spin(wakeups: DatagramWakeups) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    subscription.close()
    before = time.monotonic()
    assert await subscription.wait(0.05) == NOTHING
    assert time.monotonic() - before > 0.04


async def test_closing_ends_every_wait_and_leaves_nothing_behind(database: Path) -> None:
    wakeups = DatagramWakeups(database)
    waiting = [asyncio.create_task(wakeups.subscribe([topic]).wait()) for topic in ("queue:a", "leader")]
    await asyncio.sleep(0)
    wakeups.close()
    wakeups.close()
    assert await asyncio.gather(*waiting) == [NOTHING, NOTHING]
    assert not meeting_place(database).exists()


async def test_another_thread_may_close(database: Path) -> None:
    wakeups = DatagramWakeups(database)
    waiting = asyncio.create_task(wakeups.subscribe(["queue:a"]).wait())
    await asyncio.sleep(0)
    await asyncio.to_thread(wakeups.close)
    assert await waiting == NOTHING


async def test_after_closing_publishing_is_silent_and_listening_refused(database: Path) -> None:
    wakeups = DatagramWakeups(database)
    other = DatagramWakeups(database)
    subscription = other.subscribe(["queue:a"])
    wakeups.close()
    wakeups.publish(["queue:a"])
    assert await subscription.wait(0) == NOTHING
    with pytest.raises(RuntimeError, match="closed"):
        wakeups.subscribe(["queue:a"])
    other.close()


@pytest.mark.parametrize("topic", ["", "mail", "/etc"])
async def test_what_is_no_topic_is_refused(wakeups: DatagramWakeups, topic: str) -> None:
    with pytest.raises(InvalidInput, match="topics"):
        wakeups.subscribe([topic])


async def test_publishing_is_cheap(wakeups: DatagramWakeups, database: Path) -> None:
    def cost() -> float:
        spans = []
        for _ in range(500):
            before = time.perf_counter()
            wakeups.publish(["queue:a", "job:1"])
            spans.append(time.perf_counter() - before)
        return median(spans) * 1e6

    unheard = cost()
    subscription = wakeups.subscribe(["queue:a"])
    spans = []
    for _ in range(500):
        before = time.perf_counter()
        wakeups.publish(["queue:a", "job:1"])
        spans.append(time.perf_counter() - before)
        assert await subscription.wait(30)
    sys.stdout.write(f"publish: {unheard:.1f} µs unheard, {median(spans) * 1e6:.1f} µs received by one\n")
    assert unheard < 50
    assert median(spans) * 1e6 < 200
