"""The lanes of a queue, page by page, each with how long its oldest job has waited."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fairlane.errors import InvalidInput
from fairlane.model.job import Priority
from fairlane.model.reading import COUNTED_WHOLE, LaneReading
from fairlane.model.settings import LaneRule

from .kit import Kit
from .runs import bulk


async def _walk(kit: Kit, limit: int) -> list[LaneReading]:
    found: list[LaneReading] = []
    cursor = None
    while True:
        page = await kit.store.lanes("default", limit=limit, cursor=cursor)
        assert len(page) <= limit
        found += page
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_pages_lead_through_all_lanes_once(kit: Kit, limit: int) -> None:
    await kit.settings("default", LaneRule(pattern="c", limit=1, weight=2))
    for lane, count in (("a", 2), ("b", 2), ("c", 5), (None, 3), ("d", 1), ("é", 2)):
        await kit.enqueue_all([kit.new(lane=lane) for _ in range(count)])
    worker = await kit.worker()
    await worker.claim(1)
    whole = await kit.store.lanes("default")
    assert (whole.cursor, whole.exact, len(whole)) == (None, True, 6)
    paged = await _walk(kit, limit)
    assert [msgspec.structs.replace(lane, share=None) for lane in paged] == [
        msgspec.structs.replace(lane, share=None) for lane in whole
    ]
    assert limit == 100 or all(lane.share is None for lane in paged)
    assert [lane.pending for lane in whole] == sorted((lane.pending for lane in whole), reverse=True)


async def test_a_lane_that_ends_between_pages_hides_no_other(kit: Kit) -> None:
    ids = {lane: await kit.enqueue(lane=lane) for lane in "abcdef"}
    first = await kit.store.lanes("default", limit=3)
    await kit.store.cancel([ids["c"], ids["a"]])
    second = await kit.store.lanes("default", limit=3, cursor=first.cursor)
    assert [lane.lane for lane in (*first, *second)] == list("abcdef")
    assert second.cursor is None


@pytest.mark.parametrize(
    "fields",
    [
        {"lane": "a"},
        {},
        {"lane": "one"},
        {"lane": "two"},
        {"lane": "paused"},
        {"lane": "a", "sticky": "plan"},
        {"sticky": "plan"},
        {"lane": "one", "sticky": "plan"},
        {"lane": "a", "worker": 7},
    ],
)
async def test_the_oldest_wait_of_a_lane(kit: Kit, fields: dict[str, Any]) -> None:
    rules = (LaneRule(pattern="one", limit=1), LaneRule(pattern="two", limit=2, ordered=False))
    await kit.settings("default", *rules, LaneRule(pattern="paused", paused=True))
    await kit.enqueue(lane="other")
    kit.clock.advance(5)
    await kit.enqueue(**fields, priority=Priority.LOW)
    kit.clock.advance(7)
    await kit.enqueue(**fields, priority=Priority.HIGH)
    kit.clock.advance(3)
    waits = {lane.lane: lane.oldest_wait for lane in await kit.store.lanes("default")}
    assert waits == {"other": pytest.approx(15), fields.get("lane"): pytest.approx(10)}


async def test_a_lane_in_which_nothing_waits_has_no_oldest_wait(kit: Kit) -> None:
    await kit.enqueue(lane="a")
    worker = await kit.worker()
    await worker.claim(1)
    [lane] = await kit.store.lanes("default")
    assert (lane.running, lane.oldest_wait) == (1, None)


async def test_the_share_of_a_lane_is_its_weight_among_the_lanes_that_wait(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="heavy", weight=3), LaneRule(pattern="paused", paused=True))
    running = await kit.enqueue(lane="busy")
    worker = await kit.worker()
    assert [job.id for job in await worker.claim(1)] == [running]
    for lane in ("heavy", None, "a", "paused"):
        await kit.enqueue(lane=lane)
    shares = {lane.lane: lane.share for lane in await kit.store.lanes("default")}
    assert shares == {
        "heavy": pytest.approx(0.6),
        None: pytest.approx(0.2),
        "a": pytest.approx(0.2),
        "busy": 0,
        "paused": 0,
    }
    first = await kit.store.lanes("default", limit=2)
    second = await kit.store.lanes("default", limit=100, cursor=first.cursor)
    assert [lane.share for lane in (*first, *second)] == [None] * 5


async def test_pages_of_a_long_queue_end_and_say_whether_they_are_exact(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "long", COUNTED_WHOLE + 500))
    for number in range(5):
        await kit.enqueue(lane=f"short-{number}")
    first = await kit.store.lanes("default", limit=1)
    assert [lane.lane for lane in first] == ["long"]
    assert first[0].oldest_wait is not None
    assert await _walk(kit, 2)


async def test_a_bad_cursor_is_refused(kit: Kit) -> None:
    await kit.enqueue(lane="a")
    for cursor in ("", "x", "é", "W10=", "WzEsMl0="):
        with pytest.raises(InvalidInput, match="cursor"):
            await kit.store.lanes("default", cursor=cursor)
