"""Where a waiting job stands: its place, what holds it, until when, and how long it may take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fairlane.model.job import JobKind, JobState, Priority
from fairlane.model.reading import EXACT_PLACES, Gate, JobPosition
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Reserved

from .kit import Kit
from .runs import bulk


async def _position_of(kit: Kit, id: str) -> JobPosition:
    position = await kit.positions(id)
    assert position is not None, f"{id} does not wait"
    return position


async def test_places_count_from_one_in_the_order_of_the_lane(kit: Kit) -> None:
    ids = [await kit.enqueue(lane="user") for _ in range(5)]
    await kit.enqueue_all(bulk(kit, "other", 3))
    positions = [await _position_of(kit, id) for id in ids]
    assert [(s.place, s.ahead, s.of, s.exact) for s in positions] == [(n, n - 1, 5, True) for n in range(1, 6)]
    assert {(s.lane, s.queue, s.state) for s in positions} == {("user", "default", JobState.PENDING)}


async def test_places_move_up_when_those_before_start_or_are_cancelled(kit: Kit) -> None:
    ids = [await kit.enqueue(lane="user") for _ in range(4)]
    worker = await kit.worker()
    await worker.claim(1)
    await kit.store.cancel([ids[1]])
    positions = [await _position_of(kit, id) for id in ids[2:]]
    assert [(s.place, s.of) for s in positions] == [(1, 2), (2, 2)]


async def test_in_a_lane_without_order_the_higher_class_is_placed_first(kit: Kit) -> None:
    low = await kit.enqueue(lane="user", priority=Priority.LOW)
    high = await kit.enqueue(lane="user", priority=Priority.HIGH)
    assert [(await _position_of(kit, id)).place for id in (high, low)] == [1, 2]


async def test_in_an_ordered_lane_arrival_alone_gives_the_place(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    low = await kit.enqueue(lane="doc", priority=Priority.LOW)
    high = await kit.enqueue(lane="doc", priority=Priority.HIGH)
    assert [(await _position_of(kit, id)).place for id in (low, high)] == [1, 2]


async def test_a_job_that_waits_for_a_retry_is_counted_in_a_lane_that_was_paused_meanwhile(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="doc", limit=1))
    first = await kit.enqueue(lane="doc")
    worker = await kit.worker()
    await worker.retry(*await worker.claim(), delay=60)
    second = await kit.enqueue(lane="doc")
    for version, paused in enumerate((False, True, False), start=1):
        await kit.settings("default", LaneRule(pattern="doc", limit=1, paused=paused), version=version)
        positions = [await _position_of(kit, id) for id in (first, second)]
        assert [(s.place, s.of) for s in positions] == [(1, 2), (2, 2)]


BEYOND = 4_300
"""Waiting jobs beyond those whose places every store counts."""
RULES = {
    "no limit": LaneRule(pattern="user"),
    "ordered": LaneRule(pattern="user", limit=1),
    "unordered": LaneRule(pattern="user", limit=2),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_places_beyond_a_thousand_are_exact_or_a_lower_bound_that_says_so(kit: Kit, rule: LaneRule) -> None:
    await kit.settings("default", rule)
    await kit.worker()
    count = EXACT_PLACES + BEYOND
    answers = await kit.enqueue_all(bulk(kit, "user", count))
    places = (
        1,
        2,
        EXACT_PLACES - 1,
        EXACT_PLACES,
        EXACT_PLACES + 1,
        EXACT_PLACES + 2,
        EXACT_PLACES + 3,
        count - 1,
        count,
    )
    positions = await kit.store.positions([answers[place - 1].id for place in places])
    for true, position in zip(places, positions, strict=True):
        assert position is not None
        assert position.place is not None
        assert position.place <= position.of <= count
        assert position.of == count if position.of_exact else position.of > EXACT_PLACES
        if true <= EXACT_PLACES or position.exact:
            assert (position.place, position.exact) == (true, True)
            assert true <= 2 or position.why() == f"{true - 1} ahead in lane user"
        else:
            assert EXACT_PLACES < position.place <= true
            assert position.why() == f"more than {position.place - 2:,} ahead in lane user"


@pytest.mark.parametrize("priority", [Priority.HIGH, Priority.LOW])
async def test_of_a_lane_with_several_classes_the_places_beyond_a_thousand_hold_too(
    kit: Kit, priority: Priority
) -> None:
    for each in Priority:
        answers = await kit.enqueue_all(bulk(kit, "user", 700, priority=each))
        if each is priority:
            last = answers[-1].id
    position = await _position_of(kit, last)
    true = 700 if priority is Priority.HIGH else 2_100
    assert position.place is not None
    assert position.place <= position.of <= 2_100
    assert position.place == true if position.exact else EXACT_PLACES < position.place <= true
    assert position.exact or priority is Priority.LOW


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_the_estimate_holds_beyond_a_thousand_places(kit: Kit, rule: LaneRule) -> None:
    await kit.settings("default", rule)
    worker = await kit.worker(slots=1, lease=1_000_000.0)
    for _ in range(3):
        await kit.enqueue(lane="user")
        claimed = await worker.claim()
        kit.clock.advance(2.0)
        await worker.complete(*claimed)
    answers = await kit.enqueue_all(bulk(kit, "user", 5_400))
    await worker.claim()
    for place in (1_500, 5_400):
        told = (await _position_of(kit, answers[place - 1].id)).eta()
        assert told is not None
        assert told == pytest.approx(2.0 * place, rel=0.3), f"{told:.0f} s told where {2 * place} s are true"


@pytest.mark.parametrize("limit", [None, 1, 2])
async def test_the_waiting_jobs_of_a_lane_have_all_places_once_whatever_holds_them(kit: Kit, limit: int | None) -> None:
    await kit.settings("default", LaneRule(pattern="user", limit=limit))
    worker = await kit.worker()
    await kit.enqueue(lane="user")
    await worker.claim()
    places: list[dict[str, Any]] = [{}, {"sticky": "plan"}, {"sticky": "plan", "pool": "nobody"}, {"worker": 7}]
    ids = [await kit.enqueue(lane="user", priority=priority, **place) for place in places for priority in Priority]
    positions = [await _position_of(kit, id) for id in ids]
    assert sorted(position.place or 0 for position in positions) == list(range(1, len(ids) + 1))
    assert {position.of for position in positions} == {len(ids)}


async def test_whatever_does_not_wait_stands_nowhere(kit: Kit) -> None:
    worker = await kit.worker()
    ids = [await kit.enqueue() for _ in range(4)]
    done, failed, runs, cancelled = ids
    claimed = await worker.claim(3)
    await worker.complete(claimed[0])
    await worker.fail(claimed[1])
    await kit.store.cancel([cancelled])
    assert await kit.store.positions([done, failed, runs, cancelled, "unknown"]) == [None] * 5


async def test_answers_come_in_the_order_of_the_ids(kit: Kit) -> None:
    ids = [await kit.enqueue() for _ in range(3)]
    positions = await kit.store.positions([ids[2], "unknown", ids[0]])
    assert [position and position.id for position in positions] == [ids[2], None, ids[0]]


async def _due(kit: Kit) -> str:
    return await kit.enqueue(delay=60)


async def _due_and_not_promoted(kit: Kit) -> str:
    id = await kit.enqueue(delay=60)
    kit.clock.advance(61)
    return id


async def _queue_paused(kit: Kit) -> str:
    await kit.settings(paused=True)
    await kit.worker()
    return await kit.enqueue()


async def _lane_paused(kit: Kit) -> str:
    await kit.settings("default", LaneRule(pattern="user", paused=True))
    await kit.worker()
    return await kit.enqueue(lane="user")


async def _lane(kit: Kit) -> str:
    await kit.settings("default", LaneRule(pattern="user", limit=1))
    await kit.worker()
    await kit.enqueue(lane="user")
    return await kit.enqueue(lane="user")


async def _lane_retry(kit: Kit) -> str:
    await kit.settings("default", LaneRule(pattern="user", limit=1))
    worker = await kit.worker()
    await kit.enqueue(lane="user")
    behind = await kit.enqueue(lane="user")
    await worker.retry(*await worker.claim(), delay=60)
    return behind


async def _unbound(kit: Kit) -> str:
    return await kit.enqueue(sticky="plan")


async def _worker_gone(kit: Kit) -> str:
    await kit.worker(index=0)
    return await kit.enqueue(worker=7)


async def _cleanup_waits(kit: Kit) -> str:
    worker = await kit.worker()
    await kit.enqueue(sticky="plan")
    await worker.claim()
    cleanup = kit.new("tidy", kind=JobKind.CLEANUP)
    await kit.store.release("default", "plan", cleanup)
    return cleanup.id


async def _cleanup_runs(kit: Kit) -> str:
    worker = await kit.worker()
    await kit.enqueue(sticky="plan")
    await worker.complete(*await worker.claim())
    await kit.store.release("default", "plan", kit.new("tidy", kind=JobKind.CLEANUP))
    await worker.claim()
    return await kit.enqueue(sticky="plan")


async def _queue_limit(kit: Kit) -> str:
    await kit.settings(limit=1)
    worker = await kit.worker()
    await kit.enqueue()
    await worker.claim()
    return await kit.enqueue()


async def _no_worker(kit: Kit) -> str:
    await kit.worker("other")
    return await kit.enqueue()


async def _slots(kit: Kit) -> str:
    worker = await kit.worker(slots=1)
    await kit.enqueue()
    await worker.claim()
    return await kit.enqueue()


async def _reserved_slots(kit: Kit) -> str:
    worker = await kit.worker(slots=2, reserved=Reserved(high=1))
    await kit.enqueue()
    await worker.claim()
    return await kit.enqueue()


async def _ahead(kit: Kit) -> str:
    worker = await kit.worker(slots=1)
    await kit.enqueue(lane="user")
    await worker.claim()
    await kit.enqueue(lane="user")
    return await kit.enqueue(lane="user")


async def _nothing(kit: Kit) -> str:
    await kit.worker()
    return await kit.enqueue()


@pytest.mark.parametrize(
    ("arrange", "gate"),
    [
        (_due, Gate.DUE),
        (_due_and_not_promoted, Gate.DUE),
        (_queue_paused, Gate.QUEUE_PAUSED),
        (_lane_paused, Gate.LANE_PAUSED),
        (_lane, Gate.LANE),
        (_lane_retry, Gate.LANE_RETRY),
        (_unbound, Gate.UNBOUND),
        (_worker_gone, Gate.WORKER_GONE),
        (_cleanup_waits, Gate.CLEANUP),
        (_cleanup_runs, Gate.CLEANUP),
        (_queue_limit, Gate.QUEUE_LIMIT),
        (_no_worker, Gate.NO_WORKER),
        (_slots, Gate.SLOTS),
        (_reserved_slots, Gate.SLOTS),
        (_ahead, Gate.AHEAD),
        (_nothing, Gate.NONE),
    ],
)
async def test_the_gate_names_what_holds_a_job(kit: Kit, arrange: Callable[[Kit], Awaitable[str]], gate: Gate) -> None:
    position = await _position_of(kit, await arrange(kit))
    assert position.gate is gate
    assert position.why()


async def test_gates_that_open_at_a_known_time_say_when(kit: Kit) -> None:
    due = kit.clock.now() + 60
    for arrange in (_due, _lane_retry):
        assert (await _position_of(kit, await arrange(kit))).until == due


async def test_a_job_that_has_not_arrived_has_no_place(kit: Kit) -> None:
    await kit.enqueue(lane="user")
    position = await _position_of(kit, await kit.enqueue(lane="user", delay=60))
    assert (position.state, position.place, position.ahead) == (JobState.SCHEDULED, None, None)


async def test_the_position_of_a_bound_job_names_its_worker(kit: Kit) -> None:
    worker = await kit.worker(index=3)
    position = await _position_of(kit, await kit.enqueue(sticky="plan"))
    assert position.worker == worker.name


async def test_the_dead_worker_of_a_bound_job_is_reported_as_gone(kit: Kit) -> None:
    worker = await kit.worker(index=0)
    id = await kit.enqueue(worker=0)
    assert (await _position_of(kit, id)).gate is Gate.NONE
    await worker.leave()
    assert (await _position_of(kit, id)).gate is Gate.WORKER_GONE


async def test_servers_are_the_slots_of_live_workers_within_the_limit_of_the_queue(kit: Kit) -> None:
    await kit.worker(slots=3)
    await kit.worker(slots=3)
    await kit.worker("other", slots=50)
    id = await kit.enqueue()
    assert (await _position_of(kit, id)).servers == 6
    await kit.settings(limit=4)
    assert (await _position_of(kit, id)).servers == 4


async def test_a_position_includes_the_lane_limit(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", limit=2))
    assert (await _position_of(kit, await kit.enqueue(lane="user"))).lane_limit == 2
    assert (await _position_of(kit, await kit.enqueue(lane="other"))).lane_limit is None


async def test_the_service_time_is_the_median_of_what_has_run(kit: Kit) -> None:
    worker = await kit.worker(slots=1, lease=1_000)
    for seconds in (2, 4, 100):
        await kit.enqueue()
        claimed = await worker.claim()
        kit.clock.advance(seconds)
        await worker.complete(*claimed)
    position = await _position_of(kit, await kit.enqueue())
    assert position.service_seconds == pytest.approx(4.0, rel=0.25)


async def test_the_time_left_is_unknown_before_any_job_has_run(kit: Kit) -> None:
    position = await _position_of(kit, await _ahead(kit))
    assert position.service_seconds is None
    assert position.eta() is None


async def test_the_time_left_is_unknown_without_a_worker_and_in_a_pause(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue()
    claimed = await worker.claim()
    kit.clock.advance(3)
    await worker.complete(*claimed)
    id = await kit.enqueue()
    assert (await _position_of(kit, id)).eta() == 0.0
    await kit.settings(paused=True)
    assert (await _position_of(kit, id)).eta() is None
    await kit.settings(version=1)
    await worker.leave()
    assert (await _position_of(kit, id)).eta() is None


async def test_the_time_left_of_a_scheduled_job_is_the_time_until_it_is_due(kit: Kit) -> None:
    id = await _due(kit)
    kit.clock.advance(20)
    assert (await _position_of(kit, id)).eta() == pytest.approx(40.0)


async def test_the_time_left_grows_with_the_place(kit: Kit) -> None:
    worker = await kit.worker(slots=1, lease=1_000)
    await kit.enqueue(lane="user")
    claimed = await worker.claim()
    kit.clock.advance(10)
    await worker.complete(*claimed)
    await kit.enqueue(lane="user")
    await worker.claim()
    ids = [await kit.enqueue(lane="user") for _ in range(5)]
    etas = [(await _position_of(kit, id)).eta() for id in ids]
    known = [eta for eta in etas if eta is not None]
    assert len(known) == 5
    assert known == sorted(known)
    assert known[-1] > known[0] > 0


async def test_jobs_of_other_lanes_count_ahead_in_the_queue_and_not_in_the_lane(kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "other", 5))
    position = await _position_of(kit, await kit.enqueue(lane="user"))
    assert position.ahead == 0
    assert 0 <= position.queue_ahead <= 5
