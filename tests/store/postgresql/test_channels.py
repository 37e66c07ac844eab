"""NOTIFY: names of channels that the server accepts, and payloads that contain all topics."""

from __future__ import annotations

import pytest

from fairlane.store.postgresql.notifier import PAYLOAD_BYTES, Channels, payloads
from fairlane.store.shared.topics import EVERYTHING, MOST_WAITING, Waiting


def test_channels_have_names_that_the_server_takes_and_no_two_schemas_share() -> None:
    names = ["a", "a.b", "jobs.a", "topics.a", "y" * 40, "y" * 41, "y" * 63, "ü" * 31, "ü" * 30 + "o"]
    channels = [channel for name in names for channel in Channels.of(name)]
    assert len(set(channels)) == len(channels)
    assert max(len(channel.encode()) for channel in channels) <= 63
    assert Channels.of("a") == ("fairlane.jobs.a", "fairlane.topics.a")


@pytest.mark.parametrize("letter", ["x", "ü", "日", "🙂", "\ud800"])
def test_payloads_hold_all_topics_and_as_many_as_fit(letter: str) -> None:
    topics = [f"job:{number}{letter * (number % 190)}" for number in range(1_000)]
    packed = list(payloads(topics))
    sizes = [len(payload.encode()) for payload in packed]
    assert "\n".join(packed).split("\n") == [topic.encode(errors="replace").decode() for topic in topics]
    assert max(sizes) <= PAYLOAD_BYTES
    assert min(sizes[:-1]) > PAYLOAD_BYTES - 4 * 200


def test_a_payload_may_be_filled_to_the_last_byte() -> None:
    full = ["j" * (PAYLOAD_BYTES - 2), "k"]
    assert list(payloads(full)) == ["\n".join(full)]
    assert list(payloads([*full, "l"])) == ["\n".join(full), "l"]
    assert list(payloads([])) == []


@pytest.mark.parametrize("topic", ["j" * (PAYLOAD_BYTES + 1), "job:\0"])
def test_a_topic_that_cannot_travel_stands_for_all(topic: str) -> None:
    assert EVERYTHING in list(payloads(["queue:a", topic, "queue:b"]))


def test_what_waits_is_there_once_and_bounded() -> None:
    waiting = Waiting()
    waiting.add(["queue:a", "queue:b"])
    waiting.add(["queue:a"])
    assert list(waiting.take()) == ["queue:a", "queue:b"]
    assert len(waiting) == 0
    waiting.add(f"job:{number}" for number in range(MOST_WAITING))
    assert len(waiting) == MOST_WAITING
    waiting.add(["job:more"])
    waiting.add(["job:even more"])
    assert list(waiting.take()) == [EVERYTHING]
