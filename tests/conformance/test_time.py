"""Time passes by `promote`: due jobs arrive, never early and in order, and what has expired is cancelled."""

from __future__ import annotations

import pytest

from fairlane.errors import TermLost
from fairlane.model.job import JobState, Priority, Reason
from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import LONG, survivor
from .kit import Kit

PENDING, SCHEDULED = JobState.PENDING, JobState.SCHEDULED
HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


async def arrivals(kit: Kit, ids: list[str]) -> list[str]:
    """The ids in the order in which their jobs arrived; all must have arrived."""
    numbers = {id: (await kit.job(id)).arrival for id in ids}
    assert None not in numbers.values()
    return sorted(ids, key=lambda id: numbers[id] or 0)


async def test_a_job_never_arrives_early(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await survivor(kit)
    await kit.enqueue(id="job", delay=30)

    clock.advance(29.75)
    early = await store.promote()
    assert (early.promoted, early.more) == (0, False)
    assert await kit.state("job") is SCHEDULED
    assert await worker.claim() == []

    clock.advance(0.25)
    assert (await store.promote()).promoted == 1
    assert await worker.claim_ids() == ["job"]


async def test_a_job_arrives_once(kit: Kit, store: Store, clock: ManualClock) -> None:
    await kit.enqueue(id="job", delay=5)
    clock.advance(5)
    await store.promote()
    before = await kit.job("job")

    assert (await store.promote()).promoted == 0

    assert await kit.job("job") == before


async def test_due_jobs_arrive_by_class_then_due_time_then_id(kit: Kit, store: Store, clock: ManualClock) -> None:
    order = [
        ("z-high-early", HIGH, 10.0),
        ("y-high-late", HIGH, 20.0),
        ("x-normal-early", NORMAL, 5.0),
        ("a-normal-late", NORMAL, 15.0),
        ("b-normal-late", NORMAL, 15.0),
        ("c-normal-late", NORMAL, 15.0),
        ("w-low", LOW, 1.0),
    ]
    shuffled = [order[n] for n in (4, 6, 1, 5, 2, 0, 3)]
    for id, priority, delay in shuffled:
        await kit.enqueue(id=id, priority=priority, delay=delay)
    await kit.enqueue(id="already there")
    clock.advance(30)

    assert (await store.promote()).promoted == len(order)

    ids = [id for id, _, _ in order]
    assert await arrivals(kit, ["already there", *ids]) == ["already there", *ids]


async def test_a_short_pass_takes_the_first_in_order_and_asks_to_come_back(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    await kit.store.enqueue([kit.new(id=f"low-{n}", priority=LOW, delay=1) for n in range(3)])
    await kit.store.enqueue([kit.new(id=f"high-{n}", priority=HIGH, delay=2) for n in range(2)])
    clock.advance(5)

    first = await store.promote(limit=2)
    assert (first.promoted, first.more) == (2, True)
    assert [await kit.state(f"high-{n}") for n in range(2)] == [PENDING, PENDING]

    rest = 0
    for _ in range(10):
        promoted = await store.promote(limit=2)
        rest += promoted.promoted
        if not promoted.more:
            break
    assert rest == 3
    assert await arrivals(kit, ["low-2", "low-1", "low-0", "high-1", "high-0"]) == [
        "high-0",
        "high-1",
        "low-0",
        "low-1",
        "low-2",
    ]


async def test_a_pass_returns_when_the_next_job_is_due(kit: Kit, store: Store, clock: ManualClock) -> None:
    assert (await store.promote()).next_due is None
    await kit.enqueue(delay=60, priority=HIGH)
    await kit.enqueue(id="sooner", delay=20, priority=LOW)

    assert (await store.promote()).next_due == pytest.approx(20)
    clock.advance(15)
    assert (await store.promote()).next_due == pytest.approx(5)
    await store.cancel(["sooner"])
    assert (await store.promote()).next_due == pytest.approx(45)


async def test_a_pass_returns_when_the_next_job_expires(kit: Kit, store: Store) -> None:
    await kit.enqueue(delay=60)
    await kit.enqueue(expires=7)

    assert (await store.promote()).next_due == pytest.approx(7)


async def test_due_times_go_by_the_wall_clock(kit: Kit, store: Store, clock: ManualClock) -> None:
    await kit.enqueue(id="job", run_at=clock.now() + 3_600)

    clock.step_wall(3_600)

    assert (await store.promote()).promoted == 1
    assert await kit.state("job") is PENDING


async def test_a_retry_that_has_come_due_arrives_again(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await survivor(kit)
    await kit.enqueue(id="job")
    await worker.retry(*await worker.claim(), delay=10)
    clock.advance(10)

    assert (await store.promote()).promoted == 1

    [job] = await worker.claim()
    assert (job.id, job.attempt) == ("job", 2)


async def test_a_scheduled_job_blocks_no_lane(kit: Kit, store: Store, clock: ManualClock) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1, ordered=True))
    worker = await survivor(kit)
    await kit.enqueue(id="later", lane="ann", delay=60)
    await kit.enqueue(id="now", lane="ann")

    [now] = await worker.claim(5)
    assert now.id == "now"

    # Order is the order of arrival: what came due behind a running job waits for it.
    clock.advance(60)
    await store.promote()
    assert await worker.claim(5) == []
    await worker.complete(now)
    assert await worker.claim_ids(5) == ["later"]


async def test_a_scheduled_job_takes_no_slot_and_no_place_in_its_queue(kit: Kit) -> None:
    await kit.settings(limit=1)
    worker = await kit.worker(slots=1)
    await kit.enqueue(delay=60, priority=HIGH)
    await kit.enqueue(id="now")

    assert await worker.claim_ids(5) == ["now"]


async def test_a_pass_under_a_lost_term_promotes_nothing(kit: Kit, store: Store, clock: ManualClock) -> None:
    term = await store.lead("manager", lease=LONG)
    assert term is not None
    await kit.enqueue(id="job", delay=5)
    clock.advance(5)

    with pytest.raises(TermLost):
        await store.promote(term=term.number + 1)
    assert await kit.state("job") is SCHEDULED

    assert (await store.promote(term=term.number)).promoted == 1


# -- expiry ----------------------------------------------------------------------------------------


async def test_the_sweep_cancels_what_has_expired(kit: Kit, store: Store, clock: ManualClock) -> None:
    await kit.store.enqueue(
        [
            kit.new(id="pending", expires=10),
            kit.new(id="scheduled", expires=10, delay=60),
            kit.new(id="longer", expires=60),
            kit.new(id="for ever"),
        ]
    )
    clock.advance(9)
    assert (await store.promote()).expired == 0
    clock.advance(2)

    swept = await store.promote()

    assert (swept.expired, swept.promoted) == (2, 0)
    for id in ("pending", "scheduled"):
        job = await kit.job(id)
        assert (job.state, job.reason, job.finished_at) == (JobState.CANCELLED, Reason.EXPIRED, clock.now())
    assert await kit.state("longer") is await kit.state("for ever") is PENDING
    assert (await store.promote()).expired == 0


async def test_a_job_that_expired_before_it_was_due_never_arrives(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await survivor(kit)
    await kit.enqueue(id="job", delay=5, expires=10)
    clock.advance(30)

    swept = await store.promote()

    assert (swept.promoted, swept.expired) == (0, 1)
    assert await kit.state("job") is JobState.CANCELLED
    assert await worker.claim() == []


async def test_the_sweep_leaves_running_jobs_alone(kit: Kit, store: Store, clock: ManualClock) -> None:
    worker = await survivor(kit)
    await kit.enqueue(id="job", expires=10)
    [job] = await worker.claim()
    clock.advance(60)

    assert (await store.promote()).expired == 0

    assert (await worker.complete(job)).verdicts[0].state is JobState.COMPLETED


async def test_the_sweep_hands_the_place_of_an_expired_job_on(kit: Kit, store: Store, clock: ManualClock) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    worker = await survivor(kit)
    await kit.enqueue(id="head", lane="ann", expires=5)
    await kit.enqueue(id="next", lane="ann")
    clock.advance(6)

    await store.promote()

    assert await worker.claim_ids(5) == ["next"]
    assert (await store.admit()).repaired == 0


async def test_many_expired_jobs_are_swept_over_short_passes(kit: Kit, store: Store, clock: ManualClock) -> None:
    ids = [await kit.enqueue(expires=5) for _ in range(7)]
    clock.advance(6)

    expired = 0
    for _ in range(20):
        swept = await store.promote(limit=2)
        assert swept.expired <= 2
        expired += swept.expired
        if not swept.more:
            break

    assert expired == 7
    assert {await kit.state(id) for id in ids} == {JobState.CANCELLED}
