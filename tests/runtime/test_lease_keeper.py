"""The keeper of a session, with a store whose answers take as long as a test wants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairlane.model.intervals import Intervals
from fairlane.model.session import Renewal
from fairlane.runtime.lease_keeper import Holdings, LeaseKeeper

from ..worker.apart import until

pytestmark = pytest.mark.anyio
LEASE, MARGIN = 2.0, 0.2


class TopicSubscription:
    """Ignores events."""

    def listen(self, topics: object) -> None:
        """Do nothing."""

    async def wait(self, timeout: float) -> frozenset[str]:
        await asyncio.sleep(timeout)
        return frozenset()

    def close(self) -> None:
        """Do nothing."""


class Answering:
    """A store that answers renewals after these times, and then at once."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)
        self.asked = 0
        self.wakeups = self

    def subscribe(self, topics: object) -> TopicSubscription:
        return TopicSubscription()

    async def renew(self, *_: object, **__: object) -> Renewal:
        self.asked += 1
        await asyncio.sleep(self._seconds.pop(0) if self._seconds else 0.0)
        return Renewal(lost=(), cancel=(), taken_back=(), now=0.0)

    async def close(self) -> None:
        """Do nothing."""


class Told:
    """The calls of the keeper to the owner of a session."""

    def __init__(self, store: Answering) -> None:
        self._store = store
        self.news: list[str] = []

    def holdings(self) -> Holdings:
        return Holdings("session", [], 0, False)

    def renewed(self, renewal: Renewal) -> None:
        self.news.append(f"renewed by {self._store.asked}")

    def session_lost(self, session: str) -> None:
        self.news.append("session lost")

    def contact_lost(self) -> None:
        self.news.append("contact lost")


async def told_of(*seconds: float) -> list[str]:
    """The calls until the first renewal is reported, and for a moment longer."""
    answering: Any = Answering(*seconds)
    told = Told(answering)

    async def opened() -> Any:
        return answering

    keeper = LeaseKeeper(opened, Intervals(lease=LEASE, heartbeat=0.6, trust_margin=MARGIN), told)
    await keeper.start()
    try:
        await until(lambda: any(news.startswith("renewed") for news in told.news))
        await asyncio.sleep(0.3)
        return list(told.news)
    finally:
        await keeper.stop()


async def test_an_answer_of_long_ago_is_no_contact() -> None:
    late = LEASE - MARGIN - 0.2
    assert await told_of(late) == ["renewed by 2"]


async def test_an_answer_after_the_trust_has_ended_is_asked_for_again() -> None:
    news = await told_of(LEASE)
    assert news[0] == "contact lost"
    assert news[-1] == "renewed by 2"


async def test_an_answer_in_time_counts() -> None:
    assert (await told_of(0.3))[0] == "renewed by 1"
