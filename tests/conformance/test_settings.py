"""Settings of queues: versions, overrides, closed sets, limits and pauses, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fairlane.errors import InvalidInput, QueueFull
from fairlane.model.job import JobKind, JobState, Priority
from fairlane.model.reading import Gate, QueueReading
from fairlane.model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Reserved
from fairlane.store.shared import stored_settings

from .kit import Kit
from .runs import bulk

HIGH, NORMAL, LOW = Priority


async def test_a_queue_is_read_with_what_is_declared_and_with_what_is_laid_over_it(kit: Kit) -> None:
    await kit.settings("images", LaneRule(pattern="user:*", limit=2), limit=8, version=1)
    override = QueueOverride(limit=3, lanes=(LaneRule(pattern="user:*", limit=1),))
    await kit.store.configure([SettingsChange(queue="images", override=override)])
    [queue] = await kit.store.queues()
    assert (queue.declared.limit, queue.settings.limit) == (8, 3)
    assert [rule.limit for rule in queue.declared.lanes] == [2]
    assert [rule.limit for rule in queue.settings.lanes] == [1]
    await kit.store.configure([SettingsChange(queue="images", override=None)])
    [queue] = await kit.store.queues()
    assert queue.declared == queue.settings


async def _reading(kit: Kit, queue: str = "default") -> QueueReading:
    [reading] = [each for each in await kit.store.queues() if each.name == queue]
    return reading


async def _override(kit: Kit, override: QueueOverride | None, queue: str = "default") -> None:
    await kit.store.configure([SettingsChange(queue=queue, override=override)])


async def test_a_declaration_is_kept_with_its_version(kit: Kit) -> None:
    declared = QueueSettings(limit=4, reserved=Reserved(high=1), lanes=(LaneRule(pattern="user:*", weight=2),))
    await kit.store.configure([SettingsChange(queue="images", declared=declared, version=3)])
    reading = await _reading(kit, "images")
    assert (reading.settings, reading.version, reading.override) == (declared, 3, None)


async def test_a_newer_version_replaces_and_an_older_one_is_ignored(kit: Kit) -> None:
    await kit.settings(limit=4, version=2)
    await kit.settings(limit=9, version=1)
    assert ((await _reading(kit)).settings.limit, (await _reading(kit)).version) == (4, 2)
    await kit.settings(limit=7, version=3)
    assert ((await _reading(kit)).settings.limit, (await _reading(kit)).version) == (7, 3)


async def test_a_declaration_of_the_same_version_replaces(kit: Kit) -> None:
    await kit.settings(limit=4, version=2)
    await kit.settings(limit=5, version=2)
    assert (await _reading(kit)).settings.limit == 5


async def test_two_declarations_of_one_version_are_logged_once(
    kit: Kit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_settings, "_logged", set())
    for _ in range(2):
        await kit.settings("images", limit=4)
        await kit.settings("images", limit=9)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2, "one for each process that replaces the declaration of the other"
    assert 'queue \'images\' as {"limit":9} replaces {"limit":4} of the same version 0' in warnings[0]
    assert 'queue \'images\' as {"limit":4} replaces {"limit":9} of the same version 0' in warnings[1]


async def test_the_first_declaration_and_a_newer_one_are_not_logged(
    kit: Kit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_settings, "_logged", set())
    await kit.enqueue(queue="images")
    await kit.settings("images", limit=4)
    await kit.settings("images", limit=4)
    await _override(kit, QueueOverride(limit=1), "images")
    await kit.settings("images", limit=9, version=1)
    await kit.settings("images", limit=4)
    assert not [record for record in caplog.records if record.name == "fairlane.store"]


async def test_a_newer_declaration_replaces_the_whole_older_one(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="a", limit=1), limit=4)
    await kit.settings("default", LaneRule(pattern="b", limit=2), version=1)
    assert (await _reading(kit)).settings == QueueSettings(lanes=(LaneRule(pattern="b", limit=2),))


async def test_an_override_wins_over_every_declaration_until_it_is_cleared(kit: Kit) -> None:
    await kit.settings(limit=4, max_pending=50)
    await _override(kit, QueueOverride(limit=1))
    await kit.settings(limit=8, max_pending=60, version=1)
    reading = await _reading(kit)
    assert (reading.settings.limit, reading.settings.max_pending) == (1, 60)
    assert reading.override == QueueOverride(limit=1)
    await _override(kit, None)
    reading = await _reading(kit)
    assert (reading.settings.limit, reading.override) == (8, None)


async def test_an_override_of_a_limit_takes_effect_in_the_claim(kit: Kit) -> None:
    await kit.settings(limit=4)
    await kit.enqueue_all(bulk(kit, None, 10))
    worker = await kit.worker()
    await _override(kit, QueueOverride(limit=1))
    assert len(await worker.claim(10)) == 1
    await _override(kit, QueueOverride(limit=None))
    assert len(await worker.claim(10)) == 9


async def test_an_override_of_a_lane_replaces_the_rule_of_that_pattern_alone(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="a", limit=3), LaneRule(pattern="b", limit=3))
    await kit.enqueue_all(bulk(kit, "a", 5))
    await kit.enqueue_all(bulk(kit, "b", 5))
    await _override(kit, QueueOverride(lanes=(LaneRule(pattern="a", limit=1),)))
    worker = await kit.worker(slots=20)
    assert sorted(job.lane or "" for job in await worker.claim(20)) == ["a", "b", "b", "b"]
    await _override(kit, None)
    assert sorted(job.lane or "" for job in await worker.claim(20)) == ["a", "a"]


async def test_a_change_without_an_override_leaves_the_override_alone(kit: Kit) -> None:
    await _override(kit, QueueOverride(paused=True))
    await kit.settings(limit=3)
    assert (await _reading(kit)).override == QueueOverride(paused=True)


async def test_a_closed_set_refuses_every_other_lane_and_stores_nothing_of_the_call(kit: Kit) -> None:
    await kit.settings(closed=("flux", "sdxl"))
    good, bad = kit.new(lane="flux"), kit.new(lane="typo")
    with pytest.raises(InvalidInput) as refused:
        await kit.store.enqueue([good, bad])
    assert refused.value.field == "lane"
    assert await kit.store.get([good.id, bad.id]) == [None, None]
    with pytest.raises(InvalidInput):
        await kit.enqueue(lane=None)
    [answer] = await kit.store.enqueue([good])
    assert answer.created
    assert (await _reading(kit)).counts.pending == 1


async def test_a_queue_limit_holds_over_all_workers_and_binds_high_too(kit: Kit) -> None:
    await kit.settings(limit=3)
    await kit.enqueue_all(bulk(kit, None, 6, priority=HIGH))
    one, two = await kit.worker(), await kit.worker()
    claimed = await one.claim(2)
    assert [len(claimed), len(await two.claim(10))] == [2, 1]
    assert await one.claim(10) == []
    await one.complete(claimed[0])
    assert len(await two.claim(10)) == 1


async def test_reservations_of_a_queue_protect_upwards(kit: Kit) -> None:
    await kit.settings(limit=4, reserved=Reserved(high=1, normal=1))
    for priority in Priority:
        await kit.enqueue_all(bulk(kit, None, 6, priority=priority))
    worker = await kit.worker()
    low = await worker.claim(10, Ask("default", LOW, 10))
    assert len(low) == 2, "low leaves what is reserved for high and for normal"
    normal = await worker.claim(10, Ask("default", NORMAL, 10))
    assert len(normal) == 1, "normal leaves what is reserved for high"
    high = await worker.claim(10, Ask("default", HIGH, 10))
    assert len(high) == 1
    await worker.complete(*low, *normal, *high)
    assert len(await worker.claim(10, Ask("default", HIGH, 10))) == 4, "high may use all"


async def test_normal_and_low_together_leave_what_is_reserved_for_high(kit: Kit) -> None:
    await kit.settings(limit=3, reserved=Reserved(high=1))
    await kit.enqueue_all(bulk(kit, None, 5, priority=LOW))
    await kit.enqueue_all(bulk(kit, None, 5, priority=NORMAL))
    worker = await kit.worker()
    assert [job.priority for job in await worker.claim(10)] == [NORMAL, NORMAL]
    assert await worker.claim(10) == []


async def test_lowering_a_queue_limit_stops_nothing_that_runs(kit: Kit) -> None:
    await kit.settings(limit=3)
    await kit.enqueue_all(bulk(kit, None, 6))
    worker = await kit.worker()
    claimed = await worker.claim(10)
    await kit.settings(limit=2, version=1)
    assert [await kit.state(job.id) for job in claimed] == [JobState.RUNNING] * 3
    await worker.complete(claimed[0])
    assert await worker.claim(10) == []
    await worker.complete(claimed[1])
    assert len(await worker.claim(10)) == 1


@pytest.mark.parametrize("overridden", [False, True])
async def test_a_paused_queue_starts_nothing_and_a_resumed_one_starts_at_once(kit: Kit, overridden: bool) -> None:
    if overridden:
        await _override(kit, QueueOverride(paused=True))
    else:
        await kit.settings(paused=True)
    id = await kit.enqueue()
    worker = await kit.worker("default", "other")
    await kit.enqueue(queue="other", id="elsewhere")
    assert await worker.claim_ids(10) == ["elsewhere"]
    position = await kit.positions(id)
    assert position is not None
    assert position.gate is Gate.QUEUE_PAUSED
    if overridden:
        await _override(kit, None)
    else:
        await kit.settings(version=1)
    assert await worker.claim_ids(10) == [id]


async def test_a_paused_queue_holds_its_bound_jobs_too(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.settings(paused=True)
    id = await kit.enqueue(sticky="plan")
    assert await worker.claim(10) == []
    await kit.settings(version=1)
    assert await worker.claim_ids(10) == [id]


async def test_a_queue_limit_holds_for_bound_jobs_too(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.settings(limit=1)
    await kit.enqueue_all(bulk(kit, None, 3, sticky="plan"))
    assert len(await worker.claim(10)) == 1
    assert await worker.claim(10) == []


async def test_a_full_queue_and_a_full_lane_refuse_the_whole_call(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", max_pending=2), max_pending=4)
    await kit.enqueue_all(bulk(kit, "user", 2))
    with pytest.raises(QueueFull):
        await kit.enqueue(lane="user")
    with pytest.raises(QueueFull):
        await kit.store.enqueue(bulk(kit, "other", 3))
    assert (await _reading(kit)).counts.pending == 2
    assert len(await kit.store.enqueue(bulk(kit, "other", 2))) == 2


async def test_settings_create_a_queue_and_queues_are_listed_by_name(kit: Kit) -> None:
    await kit.settings("zebra")
    await kit.settings("apple", limit=2)
    await kit.enqueue(queue="mango")
    readings = await kit.store.queues()
    assert [reading.name for reading in readings] == ["apple", "mango", "zebra"]
    assert readings[1].settings == QueueSettings()


async def test_one_call_changes_several_queues(kit: Kit) -> None:
    changes = [SettingsChange(queue=queue, declared=QueueSettings(limit=3)) for queue in ("one", "two")]
    await kit.store.configure(changes)
    assert [reading.settings.limit for reading in await kit.store.queues()] == [3, 3]


async def test_an_overriding_limit_leaves_a_place_for_low_work_beside_the_reservations(kit: Kit) -> None:
    await kit.settings(limit=6, reserved=Reserved(high=2, normal=2))
    await _override(kit, QueueOverride(limit=2))
    settings = (await _reading(kit)).settings
    assert (settings.limit, settings.reserved) == (2, Reserved(high=1))
    await kit.enqueue_all(bulk(kit, None, 5, priority=LOW))
    worker = await kit.worker()
    assert len(await worker.claim(10)) == 1
    await _override(kit, None)
    assert (await _reading(kit)).settings.reserved == Reserved(high=2, normal=2)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LaneRule(pattern="a", limit=0), "limit"),
        (lambda: LaneRule(pattern="a", limit=-1), "limit"),
        (lambda: LaneRule(pattern="a*b"), "lane pattern"),
        (lambda: LaneRule(pattern=""), "lane pattern"),
        (lambda: LaneRule(pattern="a", weight=0), "weight"),
        (lambda: LaneRule(pattern="a", weight=1_000), "weight"),
        (lambda: LaneRule(pattern="a", ordered=True), "ordered"),
        (lambda: LaneRule(pattern="a", max_pending=0), "max_pending"),
        (lambda: QueueSettings(limit=0), "limit"),
        (lambda: QueueSettings(limit=-1), "limit"),
        (lambda: QueueSettings(limit=2, reserved=Reserved(high=2)), "reserved"),
        (lambda: QueueSettings(limit=2, reserved=Reserved(high=-1)), "reserved.high"),
        (lambda: QueueSettings(reserved=Reserved(high=1)), "reserved"),
        (lambda: QueueSettings(max_pending=0), "max_pending"),
        (lambda: QueueSettings(closed=("",)), "closed"),
        (lambda: QueueSettings(lanes=(LaneRule(pattern="a"), LaneRule(pattern="a", limit=1))), "lanes"),
        (lambda: QueueOverride(limit=0), "limit"),
        (lambda: QueueOverride(limit=-1), "limit"),
        (lambda: QueueOverride(max_pending=0), "max_pending"),
        (lambda: QueueOverride(lanes=(LaneRule(pattern="a"), LaneRule(pattern="a"))), "lanes"),
        (lambda: SettingsChange(queue="no spaces", declared=QueueSettings()), "queue"),
        (lambda: SettingsChange(queue="images", declared=QueueSettings(), version=-1), "version"),
    ],
)
def test_settings_that_make_no_sense_are_refused_naming_the_field(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        make()
    assert refused.value.field == field


async def test_an_expired_job_survives_the_end_of_its_lane_s_limit_only_until_the_next_pass(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="a", limit=1))
    first = await kit.enqueue(lane="a")
    late = await kit.enqueue(lane="a", expires=10)
    kit.clock.advance(11)
    await kit.settings("default", version=1)
    assert (await kit.store.promote()).expired == 1
    assert (await kit.state(first), await kit.state(late)) == (JobState.PENDING, JobState.CANCELLED)
    assert (await kit.store.recount()).differences == ()


LANE = (Priority.NORMAL, Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.LOW)
"""What waits in a lane that has no limit yet."""


async def test_a_lane_that_gets_a_limit_lets_so_many_start_the_highest_class_first(kit: Kit) -> None:
    worker = await kit.worker(slots=50)
    ids = [await kit.enqueue(lane="x", priority=priority) for priority in LANE]
    await kit.settings("default", LaneRule(pattern="x", limit=2))
    assert (await kit.store.recount()).differences == ()
    claimed = await worker.claim(10)
    assert [job.id for job in claimed] == [ids[3], ids[0]]
    assert await worker.claim_ids(10) == []
    await worker.complete(*claimed)
    assert await worker.claim_ids(10) == [ids[2], ids[1]]
    assert (await kit.store.recount()).differences == ()


async def test_a_lane_that_is_paused_starts_nothing_of_what_waited_and_a_resumed_one_all_of_it(kit: Kit) -> None:
    worker = await kit.worker(slots=50)
    ids = [await kit.enqueue(lane="x", priority=priority) for priority in LANE]
    await kit.settings("default", LaneRule(pattern="x", paused=True))
    assert await worker.claim_ids(10) == []
    assert (await kit.store.recount()).differences == ()
    await kit.settings("default", version=1)
    assert await worker.claim_ids(10) == [ids[3], ids[0], ids[2], ids[1], ids[4]]
    assert (await kit.store.recount()).differences == ()


async def test_a_lane_with_many_jobs_of_all_kinds_is_paused_limited_and_freed(kit: Kit) -> None:
    """More jobs than a store changes in one step; some of them hold a place or wait behind a gate."""
    worker = await kit.worker(slots=2_000)
    kinds: list[dict[str, Any]] = [
        {},
        {"priority": Priority.LOW},
        {"delay": 5.0},
        {"cost": 2.0},
        {"expires": 50.0, "priority": Priority.HIGH},
        {"sticky": "key"},
        {"worker": worker.session.index},
        {"priority": Priority.HIGH},
    ]
    jobs = [kit.new(lane="x", **kinds[number % len(kinds)]) for number in range(1_200)]
    await kit.enqueue_all([*jobs, kit.new(unique="value", lane="x", id="unique"), kit.new(lane="y", id="other")])
    running = await worker.claim(260)

    await kit.settings("default", LaneRule(pattern="x", paused=True))
    assert await worker.claim_ids(10) == ["other"]
    assert (await kit.store.recount()).differences == ()
    await worker.complete(*running[:220])
    assert await worker.claim_ids(10) == []

    await kit.settings("default", LaneRule(pattern="x", limit=50), version=1)
    first = await worker.claim(2_000)
    assert len(first) == 10
    assert (await kit.store.recount()).differences == ()
    await worker.hand_back(*first[:2])
    kit.clock.advance(6.0)
    assert (await kit.store.promote()).promoted == 150
    assert len(await worker.claim(2_000)) == 2

    await kit.settings("default", version=2)
    assert (await kit.store.recount()).differences == ()
    rest = await worker.claim(2_000)
    assert len(rest) == 1_201 - 260 - 10
    assert (await kit.store.recount()).differences == ()
    # Jobs that arrived later start later, although their numbers are lower.
    late = {job.id for job in jobs[2::8]}
    plain = {job.id for job in jobs[0::8]}
    order = [job.id in late for job in rest if job.id in late | plain]
    assert order == sorted(order)
    await worker.complete(*running[220:], *first[2:], *rest)
    assert (await kit.store.recount()).differences == ()
    [again] = await kit.store.enqueue([kit.new(unique="value", lane="x")])
    assert again.created


async def test_a_job_costs_the_same_after_its_lane_was_paused(kit: Kit) -> None:
    worker = await kit.worker(slots=50)
    x = [await kit.enqueue(lane="x", cost=cost) for cost in (3.0, 1.0)]
    await kit.settings("default", LaneRule(pattern="x", paused=True))
    await kit.settings("default", version=1)
    y = [await kit.enqueue(lane="y") for _ in range(4)]
    assert await worker.claim_ids(10) == [x[0], *y[:3], x[1], y[3]]


async def test_who_came_to_a_paused_lane_first_is_its_head_when_it_is_freed(kit: Kit) -> None:
    worker = await kit.worker()
    late, early = await kit.enqueue(lane="x", delay=5.0), await kit.enqueue(lane="x")
    await kit.settings("default", LaneRule(pattern="x", paused=True))
    kit.clock.advance(6.0)
    await kit.store.promote()
    await kit.settings("default", version=1)
    assert (await kit.store.recount()).differences == ()
    assert await worker.claim_ids(10) == [early, late]


async def test_a_turn_that_has_expired_does_not_begin_when_its_lane_is_freed(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="x", limit=1))
    waiter = await kit.waiter()
    turns = [kit.new(kind=JobKind.TURN, lane="x", waiter=waiter.id, expires=5.0, id=f"turn {n}") for n in range(2)]
    await kit.store.enqueue(turns)
    kit.clock.advance(6.0)
    await kit.settings("default", version=1)
    assert [await kit.state(turn.id) for turn in turns] == [JobState.RUNNING, JobState.PENDING]
    await kit.store.promote()
    assert await kit.state("turn 1") is JobState.CANCELLED
    assert (await kit.store.recount()).differences == ()


async def test_a_lane_whose_order_changes_gives_its_places_by_the_new_order(kit: Kit) -> None:
    unordered, ordered = (LaneRule(pattern="x", limit=2, ordered=ordered) for ordered in (False, True))
    await kit.settings("default", unordered)
    worker = await kit.worker()
    low = [await kit.enqueue(lane="x", priority=Priority.LOW) for _ in range(3)]
    high = await kit.enqueue(lane="x", priority=Priority.HIGH)  # it takes the place of the second
    await kit.settings("default", ordered, version=1)
    assert (await kit.store.recount()).differences == ()
    assert await worker.claim_ids(10) == low[:2]
    for again in (unordered, ordered, unordered):
        await kit.settings("default", again, version=2)
    assert [await kit.state(id) for id in low] == [JobState.RUNNING, JobState.RUNNING, JobState.PENDING]
    await worker.leave()
    assert (await kit.store.recount()).differences == ()
    [first, _] = await (await kit.worker()).claim_ids(10)
    assert first == high
