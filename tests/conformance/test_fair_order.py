"""Which lane starts next: newcomers before backlogs, shares by weight and cost, no credit, no debt."""

from __future__ import annotations

from collections import Counter

import pytest

from fairlane.model.job import Priority
from fairlane.model.maintenance import Retention
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from tests.sizes import sized

from .kit import Kit
from .runs import bulk, lanes_of, run

BACKLOG = sized(10_000, 100_000)
BLOCKED_STARTS = 6_000
SLOTS = 10
NEWCOMERS = tuple("BCDEFGHIJK")
ONE_TURN = 1 + len(NEWCOMERS)
"""One start of the lane with the backlog, and one of each newcomer."""


@pytest.mark.parametrize("weight", [1.0, 100.0])
async def test_a_newcomer_starts_within_one_turn_of_each_lane_behind_a_long_backlog(kit: Kit, weight: float) -> None:
    await kit.settings("default", LaneRule(pattern="A", weight=weight))
    await kit.enqueue_all(bulk(kit, "A", BACKLOG))
    worker = await kit.worker(slots=SLOTS)
    offered = await worker.claim(SLOTS)
    assert len(offered) == SLOTS, "the backlog uses every slot while it is alone"
    await kit.enqueue_all([kit.new(lane=lane) for lane in NEWCOMERS])
    await worker.complete(*offered)
    started = lanes_of(await run(worker, ONE_TURN + SLOTS))
    assert set(NEWCOMERS) <= set(started)


@pytest.mark.parametrize(("weight", "cost"), [(100.0, 1.0), (0.01, 1.0), (1.0, 100.0), (1.0, 0.01), (100.0, 0.01)])
async def test_neither_the_weight_nor_the_cost_of_a_backlog_delays_a_newcomer(
    kit: Kit, weight: float, cost: float
) -> None:
    await kit.settings("default", LaneRule(pattern="A", weight=weight))
    await kit.enqueue_all(bulk(kit, "A", 1_000, cost=cost))
    worker = await kit.worker(slots=SLOTS)
    await run(worker, 200, batch=SLOTS)
    offered = await worker.claim(SLOTS)
    await kit.enqueue_all([kit.new(lane=lane) for lane in NEWCOMERS])
    await worker.complete(*offered)
    started = lanes_of(await run(worker, ONE_TURN + SLOTS))
    assert set(NEWCOMERS) <= set(started)


async def test_what_is_left_of_a_cancelled_backlog_does_not_wait_behind_the_ghosts(kit: Kit) -> None:
    answers = await kit.enqueue_all(bulk(kit, "A", BACKLOG))
    worker = await kit.worker(slots=SLOTS)
    ran = {job.id for job in await run(worker, 100, batch=SLOTS)}
    *ghosts, left = [answer.id for answer in answers if answer.id not in ran]
    for lane in NEWCOMERS:
        await kit.enqueue_all(bulk(kit, lane, 10))
    for start in range(0, len(ghosts), 1_000):
        await kit.store.cancel(ghosts[start : start + 1_000])
    started = [job.id for job in await run(worker, ONE_TURN + SLOTS)]
    assert left in started


async def test_what_is_left_of_an_expired_backlog_does_not_wait_behind_the_ghosts(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "A", 500, expires=10))
    left = await kit.enqueue(lane="A")
    for lane in NEWCOMERS:
        await kit.enqueue_all(bulk(kit, lane, 10))
    kit.clock.advance(11)
    while (await kit.store.promote()).more:
        pass
    worker = await kit.worker(slots=SLOTS)
    started = [job.id for job in await run(worker, ONE_TURN + SLOTS)]
    assert left in started


async def test_ten_equal_lanes_share_equally_although_one_arrived_after_the_other(kit: Kit) -> None:
    lanes = [f"lane-{number}" for number in range(10)]
    for lane in lanes:
        await kit.enqueue_all(bulk(kit, lane, 100))
    worker = await kit.worker(slots=SLOTS)
    started = Counter(lanes_of(await run(worker, 500, batch=7)))
    shares = [started[lane] for lane in lanes]
    jain = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
    assert jain >= 0.99, shares


async def test_shares_follow_weights_within_five_percent(kit: Kit) -> None:
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    await kit.settings("default", *(LaneRule(pattern=lane, weight=weight) for lane, weight in weights.items()))
    for lane in weights:
        await kit.enqueue_all(bulk(kit, lane, 500))
    worker = await kit.worker(slots=SLOTS)
    started = Counter(lanes_of(await run(worker, 700, batch=SLOTS)))
    for lane, weight in weights.items():
        assert started[lane] == pytest.approx(100 * weight, rel=0.05), started


async def test_a_costly_lane_starts_as_much_seldomer_as_its_jobs_cost_more(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "dear", 100, cost=3))
    await kit.enqueue_all(bulk(kit, "cheap", 200, cost=1))
    worker = await kit.worker(slots=SLOTS)
    started = Counter(lanes_of(await run(worker, 200, batch=SLOTS)))
    assert started["dear"] == pytest.approx(50, abs=2), started


async def test_a_lane_that_was_paused_for_long_gets_no_burst_afterwards(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="X", paused=True))
    await kit.enqueue_all(bulk(kit, "X", 50))
    for lane in "YZ":
        await kit.enqueue_all(bulk(kit, lane, BLOCKED_STARTS // 2 + 50))
    worker = await kit.worker(slots=100)
    meanwhile = lanes_of(await run(worker, BLOCKED_STARTS, batch=100))
    assert "X" not in meanwhile
    await kit.settings("default", LaneRule(pattern="X"), version=1)
    started = Counter(lanes_of(await run(worker, 30)))
    assert 9 <= started["X"] <= 11, started


async def test_a_lane_that_was_held_by_its_limit_gets_no_burst_afterwards(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="X", limit=1))
    await kit.enqueue_all(bulk(kit, "X", 50))
    worker = await kit.worker(slots=SLOTS)
    [blocking] = await worker.claim()
    for lane in "YZ":
        await kit.enqueue_all(bulk(kit, lane, 200))
    await run(worker, 300, batch=SLOTS - 1)
    await worker.complete(blocking)
    started = Counter(lanes_of(await run(worker, 30)))
    assert 9 <= started["X"] <= 11, started


async def test_an_idle_lane_saves_no_credit(kit: Kit) -> None:
    worker = await kit.worker(slots=SLOTS)
    await kit.enqueue(lane="X")
    await kit.enqueue_all(bulk(kit, "Y", 400))
    await run(worker, 300, batch=SLOTS)
    await kit.enqueue_all(bulk(kit, "X", 50))
    started = Counter(lanes_of(await run(worker, 20)))
    assert 9 <= started["X"] <= 11, started


async def test_a_lane_does_not_shed_its_debt_by_being_empty_for_a_moment(kit: Kit) -> None:
    await kit.enqueue(lane="A", cost=10)
    await kit.enqueue_all(bulk(kit, "B", 40))
    worker = await kit.worker(slots=SLOTS)
    assert lanes_of(await run(worker, 2)) == ["A", "B"]
    await kit.store.prune(Retention())
    again = await kit.enqueue(lane="A")
    started = [job.id for job in await run(worker, 20)]
    # A paid for ten starts of B, one of which B had before.
    assert started.index(again) in (9, 10)


@pytest.mark.parametrize("way", ["hand_back", "take_back", "leave", "rescue"])
async def test_an_interrupted_start_is_next_in_its_lane_and_does_not_pay_twice(kit: Kit, way: str) -> None:
    first = await kit.enqueue(lane="A", cost=10)
    [follower] = [answer.id for answer in await kit.enqueue_all(bulk(kit, "A", 1, cost=10))]
    await kit.enqueue_all(bulk(kit, "B", 60))
    stays = await kit.worker(slots=SLOTS)
    for _ in range(3):
        goes = await kit.worker(slots=SLOTS)
        [interrupted] = await goes.claim()
        assert interrupted.id == first, "a start that came to nothing is not paid for"
        if way == "hand_back":
            await goes.hand_back(interrupted)
        elif way == "take_back":
            assert (await goes.renew()).taken_back == (first,)
        elif way == "leave":
            await goes.leave()
        else:
            kit.clock.advance(16)
            await stays.renew()
            await kit.store.rescue()
            break  # a second crash would back off
    started = [job.id for job in await run(stays, 20)]
    assert started[0] == first
    # One start of it costs as much as ten of lane B: the lane's next job comes after ten, not after forty.
    assert started.index(follower) in (11, 12)


async def test_a_retry_after_an_error_pays_again(kit: Kit) -> None:
    flaky = await kit.enqueue(lane="A", cost=10)
    await kit.enqueue_all(bulk(kit, "B", 40))
    worker = await kit.worker(slots=SLOTS)
    [claimed] = await worker.claim()
    assert claimed.id == flaky
    await worker.retry(claimed)
    started = [job.id for job in await run(worker, 20)]
    assert started.index(flaky) in (10, 11)


async def test_a_high_job_of_a_lane_is_not_behind_the_low_ones_of_its_lane(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "A", 100, priority=Priority.LOW, cost=10))
    worker = await kit.worker(slots=SLOTS)
    await run(worker, 50, batch=SLOTS)
    for lane in "BCD":
        await kit.enqueue_all(bulk(kit, lane, 20, priority=Priority.HIGH))
    urgent = await kit.enqueue(lane="A", priority=Priority.HIGH)
    started = [job.id for job in await run(worker, 4)]
    assert urgent in started, "what the lane paid for low work is no debt among the high"


async def test_a_lane_of_the_same_name_in_another_queue_owes_nothing(kit: Kit) -> None:
    worker = await kit.worker("one", "two", slots=SLOTS)
    await kit.enqueue_all(bulk(kit, "A", 50, queue="one", cost=10))
    await run(worker, 50, batch=SLOTS)
    await kit.enqueue_all(bulk(kit, "B", 20, queue="two"))
    fresh = await kit.enqueue(lane="A", queue="two")
    started = [job.id for job in await run(worker, 2)]
    assert fresh in started


async def test_jobs_without_a_lane_share_one_lane(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, None, 100))
    for lane in "XY":
        await kit.enqueue_all(bulk(kit, lane, 100))
    worker = await kit.worker(slots=SLOTS)
    started = Counter(lanes_of(await run(worker, 60, batch=SLOTS)))
    assert started[""] == pytest.approx(20, abs=1), started


async def test_jobs_of_one_lane_and_class_start_in_the_order_of_their_arrival(kit: Kit) -> None:
    mine = [await kit.enqueue(lane="A") for _ in range(20)]
    await kit.enqueue_all(bulk(kit, "B", 20))
    worker = await kit.worker(slots=SLOTS)
    started = [job.id for job in await run(worker, 40, batch=3) if job.lane == "A"]
    assert started == mine


@pytest.mark.parametrize("lanes", [("A", None, "B"), (None, "B", "A"), ("B", "A", None)])
async def test_lanes_whose_turn_has_come_start_in_the_order_they_arrived_in(
    kit: Kit, lanes: tuple[str | None, ...]
) -> None:
    worker = await kit.worker(slots=SLOTS)
    # Known before, in another order than that in which they come now.
    for lane in ("A", "B", None):
        await kit.enqueue(lane=lane)
    await worker.complete(*await worker.claim(3))
    ids = [await kit.enqueue(lane=lane) for lane in lanes]
    assert await worker.claim_ids(len(lanes)) == ids


async def test_jobs_without_a_lane_come_after_everything_was_forgotten(kit: Kit) -> None:
    worker = await kit.worker(slots=SLOTS)
    for _ in range(3):
        id = await kit.enqueue()
        claimed = await worker.claim(1)
        assert [job.id for job in claimed] == [id]
        await worker.complete(*claimed)
        await kit.store.prune(Retention())
    assert (await kit.store.recount()).differences == ()


async def test_fair_order_holds_across_workers_that_claim_in_turn(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "A", 100))
    await kit.enqueue_all(bulk(kit, "B", 100))
    workers = [await kit.worker(slots=5) for _ in range(3)]
    started: Counter[str] = Counter()
    for step in range(60):
        started.update(lanes_of(await run(workers[step % 3], 1)))
    assert started["A"] == pytest.approx(30, abs=1), started


async def test_bound_jobs_share_the_inbox_of_their_worker_fairly(kit: Kit) -> None:
    worker = await kit.worker(slots=SLOTS)
    await kit.enqueue_all(bulk(kit, "A", 40, sticky="plan"))
    late = await kit.enqueue(lane="B", sticky="plan")
    asked = await worker.claim(2, Ask(None, Priority.NORMAL, 2))
    assert late in [job.id for job in asked]


async def test_pruning_forgets_no_lane_that_still_has_work(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="a", limit=1))
    worker = await kit.worker()
    for id in ("a1", "a2"):
        await kit.enqueue(id=id, lane="a")
    [first] = await worker.claim()
    await kit.store.prune(Retention())
    await kit.enqueue(id="b1", lane="b")
    await worker.complete(first)
    assert await worker.claim_ids(2) == ["b1", "a2"]
