"""A lane's line: its jobs in the order in which they start, page by page."""

from __future__ import annotations

import pytest

from fairlane.errors import InvalidInput, NotFound
from fairlane.model.job import JobKind, JobState, Priority
from fairlane.model.listings import WAITING_LINE, LaneJob
from fairlane.model.settings import LaneRule

from .kit import Kit
from .runs import bulk

RULES = {
    "no limit": LaneRule(pattern="user"),
    "ordered": LaneRule(pattern="user", limit=1),
    "unordered": LaneRule(pattern="user", limit=2, ordered=False),
}


async def _line(kit: Kit, lane: str | None = "user", *, limit: int = 50) -> list[LaneJob]:
    found: list[LaneJob] = []
    cursor = None
    while True:
        page = await kit.store.lane_line("default", lane, limit=limit, cursor=cursor)
        assert (page.queue, page.lane, page.exact) == ("default", lane, True)
        assert len(page.jobs) <= limit
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 50])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_the_line_is_the_order_in_which_jobs_start(kit: Kit, rule: LaneRule, limit: int) -> None:
    await kit.settings("default", rule)
    await kit.enqueue(lane="other")
    for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.LOW, Priority.HIGH, Priority.NORMAL):
        await kit.enqueue("paint", lane="user", priority=priority)
    line = await _line(kit, limit=limit)
    assert [job.place for job in line] == [1, 2, 3, 4, 5, 6]
    assert {(job.task, job.state, job.running, job.attempt) for job in line} == {("paint", JobState.PENDING, False, 0)}
    positions = await kit.store.positions([job.id for job in line])
    assert [position and position.place for position in positions] == [1, 2, 3, 4, 5, 6]
    await kit.store.cancel(["job-1"])
    worker = await kit.worker()
    started = []
    while jobs := await worker.claim(1):
        started.append(jobs[0].id)
        await worker.complete(*jobs)
    assert [job.id for job in line] == started


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_the_waiting_jobs_are_read_past_those_that_run(kit: Kit, rule: LaneRule) -> None:
    await kit.settings("default", rule)
    for priority in (Priority.HIGH, Priority.NORMAL, Priority.HIGH, Priority.LOW):
        await kit.enqueue(lane="user", priority=priority)
    worker = await kit.worker()
    [started] = await worker.claim(1)
    page = await kit.store.lane_line("default", "user", limit=2, cursor=WAITING_LINE)
    line = await _line(kit)
    assert (line[0].id, line[0].running) == (started.id, True)
    assert list(page.jobs) == line[1:3]
    assert [job.place for job in page.jobs] == [1, 2]


@pytest.mark.parametrize("limit", [1, 50])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_what_runs_comes_first_and_has_no_place(kit: Kit, rule: LaneRule, limit: int) -> None:
    await kit.settings("default", rule)
    ids = [await kit.enqueue(lane="user") for _ in range(5)]
    await kit.enqueue(lane="other")
    worker = await kit.worker()
    kit.clock.advance(3)
    [first] = await worker.claim(1)
    line = await _line(kit, limit=limit)
    assert [job.id for job in line] == ids
    assert [job.place for job in line] == [None, 1, 2, 3, 4]
    assert [job.running for job in line] == [True, False, False, False, False]
    assert (line[0].attempt, line[0].started_at) == (1, kit.clock.now())
    assert (line[1].attempt, line[1].started_at) == (0, None)
    assert line[1].enqueued_at == (await kit.job(ids[1])).enqueued_at
    await worker.complete(first)
    head = (await _line(kit, limit=limit))[0]
    assert (head.id, head.place) == (ids[1], 1)


async def test_a_retry_keeps_its_place_in_an_ordered_lane_and_loses_it_elsewhere(kit: Kit) -> None:
    await kit.settings("default", RULES["ordered"])
    ids = [await kit.enqueue(lane="user") for _ in range(3)]
    free = [await kit.enqueue(lane="free") for _ in range(2)]
    worker = await kit.worker()
    await worker.retry(*await worker.claim(3), delay=60)
    line = await _line(kit, limit=2)
    assert [(job.id, job.state, job.place) for job in line] == [
        (ids[0], JobState.SCHEDULED, 1),
        (ids[1], JobState.PENDING, 2),
        (ids[2], JobState.PENDING, 3),
    ]
    assert [job.attempt for job in line] == [1, 0, 0]
    assert await _line(kit, "free") == []
    kit.clock.advance(60)
    await kit.store.promote()
    assert [job.id for job in await _line(kit, "free")] == free


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_jobs_that_wait_for_a_worker_stand_in_the_line(kit: Kit, rule: LaneRule) -> None:
    await kit.settings("default", rule)
    unbound = await kit.enqueue(lane="user", sticky="plan")
    plain = await kit.enqueue(lane="user")
    direct = await kit.enqueue(lane="user", worker=7)
    assert [(job.id, job.place) for job in await _line(kit, limit=1)] == [(unbound, 1), (plain, 2), (direct, 3)]


async def test_jobs_without_a_lane_are_a_line_too(kit: Kit) -> None:
    await kit.worker()
    parent = await kit.enqueue(kind=JobKind.BROADCAST, ttl=60)
    await kit.enqueue(lane="user")
    ids = [await kit.enqueue() for _ in range(2)]
    first = (await _line(kit, None, limit=2))[0]
    assert (first.id, first.running) == (parent, True)
    waiting = [job.id for job in await _line(kit, None, limit=2) if not job.running]
    assert [id for id in waiting if id in ids] == ids


async def test_a_paused_lane_shows_its_line(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", paused=True))
    ids = [await kit.enqueue(lane="user") for _ in range(3)]
    assert [job.id for job in await _line(kit, limit=2)] == ids


async def test_a_turn_stands_in_the_line(kit: Kit) -> None:
    await kit.settings("default", RULES["ordered"])
    waiter = await kit.waiter()
    turns = [await kit.enqueue(lane="user", kind=JobKind.TURN, waiter=waiter.id) for _ in range(3)]
    line = await _line(kit)
    assert [(job.id, job.running, job.place) for job in line] == [
        (turns[0], True, None),
        (turns[1], False, 1),
        (turns[2], False, 2),
    ]


async def test_a_walk_through_a_long_line_meets_each_job_once_while_others_start(kit: Kit) -> None:
    answers = await kit.enqueue_all(bulk(kit, "user", 230))
    worker = await kit.worker()
    first = await kit.store.lane_line("default", "user", limit=100)
    await worker.complete(*await worker.claim(10))
    second = await kit.store.lane_line("default", "user", limit=100, cursor=first.cursor)
    third = await kit.store.lane_line("default", "user", limit=100, cursor=second.cursor)
    walked = [*first.jobs, *second.jobs, *third.jobs]
    assert [job.id for job in walked] == [answer.id for answer in answers]
    assert [job.place for job in walked] == list(range(1, 231))
    assert third.cursor is None


async def test_what_is_asked_for_is_checked(kit: Kit) -> None:
    with pytest.raises(NotFound, match="queue"):
        await kit.store.lane_line("default", "user")
    await kit.enqueue(lane="user")
    empty = await kit.store.lane_line("default", "nobody")
    assert (empty.jobs, empty.cursor, empty.ordered) == ((), None, False)
    for cursor in ("", "17", "x_1_1_1", "w_nan_1_1", "w_1_1_-1", "r_inf_0_0", "w_0_9999999999999999999999_1", "é"):
        with pytest.raises(InvalidInput, match="cursor"):
            await kit.store.lane_line("default", "user", cursor=cursor)
    for limit in (0, 501):
        with pytest.raises(InvalidInput, match="limit"):
            await kit.store.lane_line("default", "user", limit=limit)
    with pytest.raises(InvalidInput, match="lane"):
        await kit.store.lane_line("default", "a\0b")
    with pytest.raises(InvalidInput, match="queue"):
        await kit.store.lane_line("no queue", "user")
