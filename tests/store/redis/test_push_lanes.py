"""A job with a lane is sent to a worker that waits like any other, as far as its lane lets it start."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fairlane.errors import QueueFull
from fairlane.model.job import JobState, Priority
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.states import complete
from fairlane.store.wakeups import job_topic, place_topic

from ..idle import Idle, idle_worker, sound

pytestmark = pytest.mark.anyio
RULES = (
    LaneRule(pattern="one:*", limit=1),
    LaneRule(pattern="two:*", limit=2),
    LaneRule(pattern="heavy:*", weight=4.0),
    LaneRule(pattern="paused:*", paused=True),
)


@pytest.fixture
async def idle() -> AsyncIterator[Idle]:
    async with idle_worker() as idle:
        await idle.kit.settings("default", *RULES)
        # The first job after a change of settings is looked at closely, and so goes the long way.
        first = await idle.kit.enqueue()
        await idle.worker.finish(*[complete(job.held) for job in await idle.claim(102)])
        assert await idle.kit.state(first) is JobState.COMPLETED
        assert await idle.claim(103) == []
        yield idle


async def lanes(idle: Idle) -> dict[str | None, tuple[int, int]]:
    return {each.lane: (each.pending, each.running) for each in await idle.kit.store.lanes("default")}


@pytest.mark.parametrize("lane", ["a", "one:1", "two:1"])
async def test_a_job_with_a_lane_is_pushed_to_an_idle_worker(
    idle: Idle, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = await idle.kit.enqueue(lane=lane, payload=b'["for you"]')
    assert await idle.kit.state(id) is JobState.RUNNING
    assert await lanes(idle) == {lane: (0, 1)}
    await sound(idle.kit)
    assert await idle.notified()

    monkeypatch.setattr(idle.store, "_call", None)  # the server is not asked
    [claimed] = await idle.claim(104)
    assert (claimed.id, claimed.lane, claimed.limited) == (id, lane, lane != "a")
    await idle.worker.finish(complete(claimed.held))
    assert await lanes(idle) == {}
    await sound(idle.kit)


async def test_a_place_that_was_taken_ahead_is_taken(idle: Idle) -> None:
    first, second = [await idle.kit.enqueue(lane="one:1") for _ in range(2)]
    other = await idle.kit.worker()
    assert await other.claim(10) == []
    assert [await idle.kit.state(id) for id in (first, second)] == [JobState.RUNNING, JobState.PENDING]
    position = await idle.kit.positions(second)
    assert position is not None
    assert position.place == 1
    [claimed] = await idle.claim(104)
    await idle.worker.finish(complete(claimed.held))
    assert [job.id for job in await other.claim(10)] == [second]
    await sound(idle.kit)


async def test_of_a_lane_with_two_places_both_are_used(idle: Idle) -> None:
    ids = [await idle.kit.enqueue(lane="two:1") for _ in range(3)]
    other = await idle.kit.worker()
    assert [job.id for job in await other.claim(10)] == ids[1:2]
    await idle.worker.finish(*[complete(job.held) for job in await idle.claim(104)])
    assert [job.id for job in await other.claim(10)] == ids[2:]
    await sound(idle.kit)


@pytest.mark.parametrize("lane", ["heavy:1", "paused:1"])
async def test_a_lane_of_another_weight_is_claimed_and_a_paused_one_waits(idle: Idle, lane: str) -> None:
    id = await idle.kit.enqueue(lane=lane)
    assert await idle.kit.state(id) is JobState.PENDING
    assert [job.id for job in await idle.claim(104)] == ([id] if lane == "heavy:1" else [])
    await sound(idle.kit)


async def test_a_start_ahead_is_paid_for_by_its_lane(idle: Idle) -> None:
    """It was served: of two lanes that get three jobs each after that, the other one comes first."""
    first = await idle.kit.enqueue(lane="a")
    assert await idle.kit.state(first) is JobState.RUNNING
    again = [await idle.kit.enqueue(lane="a") for _ in range(2)]
    other = [await idle.kit.enqueue(lane="b") for _ in range(3)]
    await idle.claim(104)
    assert [job.id for job in await idle.claim(105)] == [other[0], again[0], other[1], again[1], other[2]]


async def test_jobs_that_wait_in_the_lane_are_notified_of_a_pushed_start(idle: Idle) -> None:
    job = idle.kit.new(lane="one:1")
    topics = {job_topic(job.id), place_topic("default", "one:1")}
    subscription = idle.kit.store.wakeups.subscribe(topics)
    await idle.kit.store.enqueue([job])
    received: set[str] = set()
    while received != topics:
        received |= await subscription.wait(10)
    subscription.close()


async def test_a_job_of_a_higher_class_takes_the_place_of_one_that_waits(idle: Idle) -> None:
    """In an unordered lane: a single job takes the general way if it could take the place of another one."""
    await idle.kit.enqueue()  # the worker has something to do
    await idle.claim(104)
    low = [await idle.kit.enqueue(lane="two:1", priority=Priority.LOW) for _ in range(2)]
    high = await idle.kit.enqueue(lane="two:1")
    assert [job.id for job in await idle.claim(105)] == [high, low[0]]
    await sound(idle.kit)


async def test_a_lane_that_may_hold_no_more_refuses_a_job_that_is_sent_alone(idle: Idle) -> None:
    rules = (*RULES, LaneRule(pattern="full:*", max_pending=1, limit=1))
    await idle.kit.store.configure([SettingsChange(queue="default", declared=QueueSettings(lanes=rules), version=1)])
    id = await idle.kit.enqueue(lane="full:1")
    assert await idle.kit.state(id) is JobState.PENDING
    with pytest.raises(QueueFull, match="takes at most 1"):
        await idle.kit.enqueue(lane="full:1")
    await sound(idle.kit)


@pytest.mark.parametrize("how", ["dies", "leaves", "asks on"])
async def test_the_place_of_a_push_that_is_never_fetched_is_free_again(idle: Idle, how: str) -> None:
    first, second = [await idle.kit.enqueue(lane="one:1") for _ in range(2)]
    assert await idle.kit.state(first) is JobState.RUNNING
    if how == "dies":
        idle.kit.clock.advance(16.0)
        assert (await idle.kit.store.rescue()).declared == (idle.worker.id,)
    elif how == "leaves":
        await idle.store.leave(idle.worker.id, begun=[])
    else:
        assert await idle.claim(105) == []
        assert (await idle.store.renew(idle.worker.id, [], claim=105)).taken_back == (first,)
    await sound(idle.kit)
    other = await idle.kit.worker()
    [again] = await other.claim(10)
    assert again.id == first
    await other.complete(again)
    assert await other.claim_ids(10) == [second]
    await sound(idle.kit)


@pytest.mark.parametrize("rule", [LaneRule(pattern="a", limit=1), LaneRule(pattern="a", paused=True)])
async def test_a_lane_that_gets_a_limit_counts_the_job_that_is_on_its_way(idle: Idle, rule: LaneRule) -> None:
    first, second = [await idle.kit.enqueue(lane="a") for _ in range(2)]
    await idle.kit.settings("default", *RULES, rule, version=1)
    await sound(idle.kit)
    # It was sent when there was no limit; the store uses the current limit.
    [claimed] = await idle.claim(104)
    assert (claimed.id, claimed.limited) == (first, False)
    other = await idle.kit.worker()
    assert await other.claim(10) == []
    await idle.worker.complete(claimed)
    assert await other.claim_ids(10) == ([] if rule.paused else [second])
    await sound(idle.kit)


async def test_a_lane_that_loses_its_limit_frees_jobs_behind_a_pushed_one(idle: Idle) -> None:
    first, second = [await idle.kit.enqueue(lane="one:1") for _ in range(2)]
    await idle.kit.settings("default", *RULES[1:], version=1)
    other = await idle.kit.worker()
    [claimed] = await other.claim(10)
    assert claimed.id == second
    # The message was lost, and is repeated as the answer to the claim.
    [again] = await idle.claim(104, store=idle.kit.store)
    assert (again.id, again.limited) == (first, False)
    await idle.worker.complete(again)
    await other.complete(claimed)
    await sound(idle.kit)
    assert await lanes(idle) == {}
