"""The feed of ended jobs: it polls, survives outages, and returns each end once while the store repeats itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import cast

import pytest

from fairlane.errors import InvalidInput, StoreUnavailable
from fairlane.model.ended import EndedJob, EndedPage
from fairlane.model.job import JobKind, JobState, Reason
from fairlane.runtime import ended_feed
from fairlane.runtime.ended_feed import EndedFeed
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.conformance.kit import Kit

pytestmark = pytest.mark.anyio
POLL = 0.01


def ended(id: str, at: float = 1.0) -> EndedJob:
    """A job that failed."""
    return EndedJob(
        id=id,
        task="task",
        queue="default",
        kind=JobKind.JOB,
        state=JobState.FAILED,
        reason=Reason.ERROR,
        error="boom",
        finished_at=at,
    )


class Scripted:
    """A store that returns these pages in order, or raises; after them, empty pages."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[str | None] = []

    async def ended(self, after: str | None, *, limit: int = 1_000) -> EndedPage:
        self.asked.append(after)
        answer = self._answers.pop(0) if self._answers else ()
        if isinstance(answer, Exception):
            raise answer
        jobs = tuple(ended(id) for id in answer)
        return EndedPage(jobs=jobs, cursor=f"cursor-{len(self.asked)}", more=False)


def feed_of(store: Scripted, cursor: str | None = "begin") -> EndedFeed:
    """A feed on a scripted store."""
    return EndedFeed(cast(Store, store), cursor=cursor, poll=POLL)


async def ids_of(feed: EndedFeed) -> list[str]:
    """The ids of the next page."""
    async with asyncio.timeout(30):
        return [job.id for job in (await feed.next()).jobs]


async def test_pages_follow_each_other_by_their_cursors() -> None:
    store = Scripted(["a"], [], ["b"])
    feed = feed_of(store)

    assert [await ids_of(feed), await ids_of(feed)] == [["a"], ["b"]]
    assert store.asked == ["begin", "cursor-1", "cursor-2"]
    assert feed.cursor == "cursor-3"


async def test_without_a_cursor_it_begins_at_the_present() -> None:
    store = Scripted([], ["a"])
    feed = feed_of(store, cursor=None)
    await feed.begin()
    await feed.begin()

    assert store.asked == [None]
    assert await ids_of(feed) == ["a"]
    assert store.asked == [None, "cursor-1"]


async def test_an_end_that_the_store_returns_again_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_feed, "MOST_REMEMBERED", 2)
    feed = feed_of(Scripted(["a"], ["a"], ["a", "b"], ["c"], ["b", "a"]))

    # The last is one more than it remembers.
    assert [await ids_of(feed) for _ in range(4)] == [["a"], ["b"], ["c"], ["a"]]


async def test_the_same_id_may_end_again_as_another_job() -> None:
    store = Scripted()
    feed = feed_of(store)
    jobs = [ended("a", 1.0), ended("a", 2.0)]

    async def read(after: str | None, *, limit: int = 1_000) -> EndedPage:
        return EndedPage(jobs=(jobs.pop(0),), cursor="next", more=True)

    store.ended = read  # type: ignore[method-assign]  # a store that fails
    assert [await ids_of(feed), await ids_of(feed)] == [["a"], ["a"]]


async def test_an_outage_is_logged_once_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ended_feed.logger.name)
    down = StoreUnavailable("away")
    store = Scripted(down, down, ["a"], down, ["b"])
    feed = feed_of(store)

    assert [await ids_of(feed), await ids_of(feed)] == [["a"], ["b"]]
    assert store.asked == ["begin"] * 3 + ["cursor-3"] * 2
    levels = [record.levelname for record in caplog.records if record.name == ended_feed.logger.name]
    assert levels == ["WARNING", "INFO"] * 2


async def test_a_cursor_of_another_store_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        await ids_of(feed_of(Scripted(InvalidInput("cursor", "is not a cursor that a page returned"))))


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    """A store in a file."""
    clock = ManualClock()
    store = await open_store(f"sqlite:///{tmp_path}/jobs.db", clock=clock)
    yield Kit(store, clock)
    await store.close()


async def test_it_follows_a_store(kit: Kit) -> None:
    feed = EndedFeed(kit.store, poll=POLL)
    await feed.begin()
    expected = [await kit.enqueue() for _ in range(ended_feed.PAGE + 3)]
    found: list[str] = []

    async def follow() -> None:
        async with aclosing(feed.__aiter__()) as pages:
            async for page in pages:
                found.extend(job.id for job in page.jobs)
                if len(found) >= len(expected):
                    return

    following = asyncio.create_task(follow())
    await kit.store.cancel(expected)
    async with asyncio.timeout(30):
        await following

    assert found == expected
    # Another process goes on from the cursor.
    other = EndedFeed(kit.store, cursor=feed.cursor, poll=POLL)
    late = await kit.enqueue()
    await kit.store.cancel([late])
    assert await ids_of(other) == [late]
