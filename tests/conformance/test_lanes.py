"""Lanes with a limit: how many run, in which order, by which rule, and that a blocked one blocks no other."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from fairlane.model.job import Claimed, JobState, Priority, Reason
from fairlane.model.reading import COUNTED_WHOLE, Gate
from fairlane.model.settings import LaneRule
from fairlane.model.states import Transition, complete, fail, hand_back, retry, snooze, take_back
from tests.sizes import sized

from .kit import Kit, Worker
from .runs import bulk, drain, everything, running

LIMITS = {"one": 1, "two": 2, "three": 3}


def _some_end(rng: Random, job: Claimed) -> Transition:
    held = job.held
    return rng.choice(
        [
            complete(held),
            fail(held, Reason.ERROR, "boom"),
            retry(held, rng.choice([0.0, 5.0]), Reason.ERROR, "boom"),
            snooze(held, rng.choice([0.0, 5.0])),
            hand_back(held),
            take_back(held, rng.choice([0.0, 5.0])),
        ]
    )


async def _check_places(kit: Kit) -> None:
    """No lane runs more jobs than its limit, and after every worker has claimed none runs fewer without a reason."""
    jobs = [
        job for state in ("scheduled", "pending", "running") for job in await everything(kit, state=JobState(state))
    ]
    for lane, limit in LIMITS.items():
        counts = Counter(job.state for job in jobs if job.lane == lane)
        assert counts[JobState.RUNNING] <= limit, f"{lane} runs {counts}"
        # In an ordered lane a job that waits for its retry keeps its place.
        kept = [j for j in jobs if j.lane == lane and j.state is JobState.SCHEDULED and j.fence and lane != "two"]
        if counts[JobState.PENDING]:
            assert counts[JobState.RUNNING] + len(kept) >= limit, f"{lane} leaves a place empty: {counts}"


@pytest.mark.parametrize("seed", sized([1], [1, 2, 3]))
async def test_no_lane_runs_more_than_its_limit_and_none_leaves_a_place_empty(kit: Kit, seed: int) -> None:
    rng = Random(seed)
    await kit.settings(
        "default",
        LaneRule(pattern="one", limit=1),
        LaneRule(pattern="two", limit=2),
        LaneRule(pattern="three", limit=3, ordered=True),
    )
    workers: list[tuple[Worker, list[Claimed]]] = [(await kit.worker(slots=50, lease=10_000), []) for _ in range(2)]
    waiting: list[str] = []
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            priority = rng.choice(list(Priority))
            waiting.append(await kit.enqueue(lane=rng.choice(list(LIMITS)), priority=priority, retries=100))
        if waiting and rng.random() < 0.2:
            await kit.store.cancel([waiting.pop(rng.randrange(len(waiting)))])
        for worker, held in workers:
            held += await worker.claim(20)
        await _check_places(kit)
        for worker, held in workers:
            rng.shuffle(held)
            ending = [held.pop() for _ in range(rng.randrange(len(held) + 1))]
            await worker.finish(*(_some_end(rng, job) for job in ending))
        kit.clock.advance(2)
        await kit.store.promote()
        assert (await kit.store.admit()).repaired == 0
    for worker, held in workers:
        await worker.complete(*held)
    kit.clock.advance(5)
    await kit.store.promote()
    await drain(workers[0][0])
    left = await everything(kit)
    assert all(job.state.final for job in left)
    assert (await kit.store.recount()).differences == ()


async def test_a_lane_with_a_limit_of_one_runs_in_the_order_of_arrival(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    ids = [await kit.enqueue(lane="doc") for _ in range(5)]
    worker = await kit.worker()
    started = []
    while claimed := await worker.claim(10):
        [job] = claimed
        started.append(job.id)
        await worker.complete(job)
    assert started == ids


async def test_in_an_ordered_lane_arrival_beats_class(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    low = await kit.enqueue(lane="doc", priority=Priority.LOW)
    high = await kit.enqueue(lane="doc", priority=Priority.HIGH)
    worker = await kit.worker()
    [first] = await worker.claim(10)
    assert first.id == low
    await worker.complete(first)
    assert await worker.claim_ids(10) == [high]


async def test_the_first_of_an_ordered_lane_run_at_once_up_to_its_limit(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=2, ordered=True))
    ids = [await kit.enqueue(lane="doc", priority=p) for p in (Priority.LOW, Priority.NORMAL, Priority.HIGH)]
    worker = await kit.worker()
    claimed = {job.id: job for job in await worker.claim(10)}
    assert set(claimed) == set(ids[:2])
    await worker.complete(claimed[ids[1]])
    assert await worker.claim_ids(10) == [ids[2]]


@pytest.mark.parametrize("way", ["retry", "snooze"])
async def test_an_ordered_lane_is_closed_while_its_head_waits_to_run_again(kit: Kit, way: str) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    head, behind = [await kit.enqueue(lane="doc") for _ in range(2)]
    worker = await kit.worker()
    arrival = (await kit.job(head)).arrival
    [claimed] = await worker.claim()
    await worker.finish(retry(claimed.held, 30, Reason.ERROR, "boom") if way == "retry" else snooze(claimed.held, 30))
    due = kit.clock.now() + 30
    assert await worker.claim(10) == []
    position = await kit.positions(behind)
    assert position is not None
    assert (position.gate, position.until) == (Gate.LANE_RETRY, due)
    kit.clock.advance(30)
    await kit.store.promote()
    assert await worker.claim_ids(10) == [head]
    assert (await kit.job(head)).arrival == arrival


@pytest.mark.parametrize("way", ["retry", "snooze", "hand_back", "leave", "rescue"])
async def test_a_job_that_returns_to_an_ordered_lane_at_once_keeps_its_arrival(kit: Kit, way: str) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    head, behind = [await kit.enqueue(lane="doc") for _ in range(2)]
    arrival = (await kit.job(head)).arrival
    goes, stays = await kit.worker(), await kit.worker()
    [claimed] = await goes.claim()
    if way == "retry":
        await goes.retry(claimed)
    elif way == "snooze":
        await goes.finish(snooze(claimed.held, 0))
    elif way == "hand_back":
        await goes.hand_back(claimed)
    elif way == "leave":
        await goes.leave()
    else:
        kit.clock.advance(16)
        await stays.renew()
        await kit.store.rescue()
    await kit.store.promote()
    again = await stays.claim(10)
    assert [job.id for job in again] == [head]
    assert (await kit.job(head)).arrival == arrival
    await stays.complete(*again)
    assert await stays.claim_ids(10) == [behind]
    assert (await kit.store.admit()).repaired == 0


async def test_cancelling_a_head_that_waits_for_its_retry_opens_the_ordered_lane(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    head, behind = [await kit.enqueue(lane="doc") for _ in range(2)]
    worker = await kit.worker()
    [claimed] = await worker.claim()
    await worker.retry(claimed, delay=30)
    assert await kit.store.cancel([head]) == [JobState.CANCELLED]
    assert await worker.claim_ids(10) == [behind]


async def test_a_scheduled_job_blocks_no_ordered_lane_before_it_arrives(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    later = await kit.enqueue(lane="doc", delay=60)
    now = await kit.enqueue(lane="doc")
    worker = await kit.worker()
    [claimed] = await worker.claim(10)
    assert claimed.id == now
    await worker.complete(claimed)
    kit.clock.advance(60)
    await kit.store.promote()
    assert await worker.claim_ids(10) == [later]


async def test_a_retry_in_an_unordered_lane_arrives_anew(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", limit=1, ordered=False))
    flaky, other = [await kit.enqueue(lane="user") for _ in range(2)]
    worker = await kit.worker()
    arrival = (await kit.job(flaky)).arrival
    [claimed] = await worker.claim(10)
    await worker.retry(claimed)
    assert await worker.claim_ids(10) == [other]
    again = (await kit.job(flaky)).arrival
    assert arrival is not None
    assert again is not None
    assert again > arrival


@pytest.mark.parametrize(
    ("lane", "limit"),
    [("user:ann", 1), ("user:vip-1", 3), ("user:vip-7", 2), ("user:vip-77", 3), ("other", 4), ("user:", 1)],
)
async def test_the_rule_with_the_longest_prefix_holds_for_a_lane(kit: Kit, lane: str, limit: int) -> None:
    await kit.settings(
        "default",
        LaneRule(pattern="*", limit=4),
        LaneRule(pattern="user:vip-7", limit=2),
        LaneRule(pattern="user:vip*", limit=3),
        LaneRule(pattern="user:*", limit=1),
    )
    await kit.enqueue_all(bulk(kit, lane, 6))
    worker = await kit.worker()
    assert len(await worker.claim(10)) == limit


async def test_an_exact_key_beats_a_prefix_of_the_same_length(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user*", limit=1), LaneRule(pattern="user", limit=2))
    await kit.enqueue_all(bulk(kit, "user", 4))
    worker = await kit.worker()
    assert len(await worker.claim(10)) == 2


async def test_each_lane_of_one_rule_has_its_own_places(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user:*", limit=1))
    for user in "abc":
        await kit.enqueue_all(bulk(kit, f"user:{user}", 2))
    worker = await kit.worker()
    assert sorted(job.lane or "" for job in await worker.claim(10)) == ["user:a", "user:b", "user:c"]


async def test_a_rule_of_one_queue_says_nothing_about_another(kit: Kit) -> None:
    await kit.settings("one", LaneRule(pattern="user", limit=1))
    for queue in ("one", "two"):
        await kit.enqueue_all(bulk(kit, "user", 3, queue=queue))
    worker = await kit.worker("one", "two")
    assert Counter(job.queue for job in await worker.claim(10)) == {"one": 1, "two": 3}


async def test_blocked_lanes_do_not_stop_the_claim_of_others(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user:*", limit=1))
    worker = await kit.worker(slots=100)
    blocked = 40
    for number in range(blocked):
        await kit.enqueue_all(bulk(kit, f"user:{number}", 20))
    assert len(await worker.claim(100)) == blocked
    assert await worker.claim(10) == []
    free = await kit.enqueue(lane="user:new")
    assert await worker.claim_ids(1) == [free]


async def test_a_paused_lane_starts_nothing_until_it_is_resumed(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", paused=True, limit=1))
    ids = [await kit.enqueue(lane="user") for _ in range(2)]
    other = await kit.enqueue(lane="other")
    worker = await kit.worker()
    assert await worker.claim_ids(10) == [other]
    position = await kit.positions(ids[0])
    assert position is not None
    assert position.gate is Gate.LANE_PAUSED
    await kit.settings("default", LaneRule(pattern="user", limit=1), version=1)
    assert await worker.claim_ids(10) == ids[:1]


async def test_pausing_a_lane_lets_its_running_job_end_and_starts_no_other(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", limit=1))
    ids = [await kit.enqueue(lane="user") for _ in range(2)]
    worker = await kit.worker()
    [claimed] = await worker.claim(10)
    await kit.settings("default", LaneRule(pattern="user", limit=1, paused=True), version=1)
    await worker.complete(claimed)
    assert await kit.state(ids[0]) is JobState.COMPLETED
    assert await worker.claim(10) == []
    await kit.settings("default", LaneRule(pattern="user", limit=1), version=2)
    assert await worker.claim_ids(10) == ids[1:]
    assert (await kit.store.admit()).repaired == 0


async def test_a_paused_ordered_lane_does_not_start_its_head_when_the_retry_is_due(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    head, behind = [await kit.enqueue(lane="doc") for _ in range(2)]
    worker = await kit.worker(lease=1_000)
    await worker.retry(*await worker.claim(), delay=30)
    await kit.settings("default", LaneRule(pattern="doc", limit=1, paused=True), version=1)
    kit.clock.advance(30)
    await kit.store.promote()
    assert await worker.claim(10) == []
    await kit.settings("default", LaneRule(pattern="doc", limit=1), version=2)
    assert await drain(worker) == [head, behind]
    assert (await kit.store.admit()).repaired == 0


async def test_an_ordered_lane_paused_and_resumed_while_its_head_waits_for_a_retry_keeps_its_order(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    head, behind = [await kit.enqueue(lane="doc") for _ in range(2)]
    worker = await kit.worker(lease=1_000)
    await worker.retry(*await worker.claim(), delay=30)
    await kit.settings("default", LaneRule(pattern="doc", limit=1, paused=True), version=1)
    await kit.settings("default", LaneRule(pattern="doc", limit=1), version=2)
    assert await worker.claim(10) == [], "the head keeps the lane, as before the pause"
    kit.clock.advance(30)
    await kit.store.promote()
    assert await drain(worker) == [head, behind]


async def test_a_limit_holds_over_all_workers_together(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", limit=2))
    await kit.enqueue_all(bulk(kit, "user", 6))
    workers = [await kit.worker() for _ in range(3)]
    assert sum([len(await worker.claim(10)) for worker in workers]) == 2
    assert len(await running(kit, queue="default", lane="user")) == 2


async def test_lanes_are_read_with_terms_and_counts_the_longest_backlog_first(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="long", limit=2, weight=3))
    await kit.enqueue_all(bulk(kit, "short", 1))
    await kit.enqueue_all(bulk(kit, "long", 5))
    worker = await kit.worker()
    assert len(await worker.claim(10)) == 3
    await kit.enqueue_all(bulk(kit, "short", 2))
    long, short = await kit.store.lanes("default")
    assert (long.lane, long.pending, long.running) == ("long", 3, 2)
    assert (long.terms.limit, long.terms.weight, long.terms.ordered) == (2, 3.0, False)
    assert (short.lane, short.pending, short.running, short.terms.limit) == ("short", 2, 1, None)
    assert [lane.lane for lane in await kit.store.lanes("default", limit=1)] == ["long"]


async def test_of_very_many_lanes_the_first_are_read_and_what_has_no_lane_is_one_of_them(kit: Kit) -> None:
    names = [f"user:{number:04}" for number in range(1_200)]
    await kit.enqueue_all(bulk(kit, None, 3))
    await kit.enqueue_all([kit.new(lane=name) for name in names])
    await kit.enqueue_all(bulk(kit, "user:0700", 4))
    worker = await kit.worker()
    # The first without a lane, and the first of the first two lanes.
    started = await worker.claim(3)
    expected = [("user:0700", 5, 0), (None, 2, 1), *((name, 1, 0) for name in names if name != "user:0700")]
    expected = [each for each in expected if each[0] not in names[:2]] + [(name, 0, 1) for name in names[:2]]

    async def read(limit: int) -> list[tuple[str | None, int, int]]:
        return [(each.lane, each.pending, each.running) for each in await kit.store.lanes("default", limit=limit)]

    for limit in (1, 2, 7, 500):
        assert await read(limit) == expected[:limit]
    await worker.complete(*started)
    assert await read(3) == [("user:0700", 5, 0), (None, 2, 0), (names[2], 1, 0)]


async def test_of_a_long_backlog_the_longest_lanes_are_read_and_the_short_ones_are_exact(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="flood", limit=3), LaneRule(pattern="narrow", limit=1))
    long, middle, short = COUNTED_WHOLE + 1_000, 900, 7
    await kit.enqueue_all(bulk(kit, "flood", long))
    await kit.enqueue_all(bulk(kit, None, middle))
    await kit.enqueue_all(bulk(kit, "narrow", short, sticky="plan", pool="nobody"))
    await kit.enqueue_all([kit.new(lane=f"user:{number:02}") for number in range(20) for _ in range(short)])
    worker = await kit.worker()
    await worker.claim(10)
    for limit in (1, 2, 4, 100):
        lanes = await kit.store.lanes("default", limit=limit)
        assert len(lanes) == min(limit, 23)
        assert [lane.lane for lane in lanes[:2]] == ["flood", None][:limit]
        assert [lane.pending for lane in lanes] == sorted((lane.pending for lane in lanes), reverse=True)
        for lane in lanes:
            true = {"flood": long, None: middle}.get(lane.lane, short) - lane.running
            assert lane.pending == (true if lane.exact else pytest.approx(true, rel=0.3))
            assert lane.exact or true > short
        if limit == 100:
            assert sum(lane.running for lane in lanes) == 10
    assert (await kit.store.recount()).differences == ()


async def test_a_queue_beside_a_flood_is_still_counted_whole(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "flood", COUNTED_WHOLE + 500))
    await kit.enqueue_all(
        [kit.new(queue="calm", lane=f"user:{number}") for number in range(3) for _ in range(number + 1)]
    )
    lanes = await kit.store.lanes("calm")
    assert [(lane.lane, lane.pending, lane.exact) for lane in lanes] == [
        ("user:2", 3, True),
        ("user:1", 2, True),
        ("user:0", 1, True),
    ]
