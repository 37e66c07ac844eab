"""Many scheduled jobs: they do not slow the pass that promotes, and an urgent one does not wait behind them."""

from __future__ import annotations

import time
from statistics import median

import pytest

from fairlane.model.job import JobState, Priority
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.sizes import sized

from .conftest import Opener
from .kit import Kit

PASS = 1_000
BACKLOG = sized(2_500, 10_000)
FEW, MANY = sized((200, 5_000), (1_000, 1_000_000))
HOUR = 3_600.0
ROUNDS = 5
"""Measurements before the test fails. A cost that depends on the number of jobs exceeds the bound in all of them."""


async def test_a_high_job_due_now_is_promoted_before_a_backlog_of_low_ones_due_long_ago(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    worker = await kit.worker(slots=5)
    await kit.enqueue_all([kit.new(id=f"low-{n}", priority=Priority.LOW, delay=1.0) for n in range(BACKLOG)])
    await kit.enqueue(id="high", priority=Priority.HIGH, delay=HOUR)
    clock.advance(HOUR)

    seen = await store.promote(limit=PASS)

    assert (seen.promoted, seen.more, seen.next_due) == (PASS, True, 0.0)
    assert await kit.state("high") is JobState.PENDING
    assert (await worker.claim_ids(5))[0] == "high"
    passes = 1
    while seen.more:
        seen = await store.promote(limit=PASS)
        passes += 1
    assert passes <= BACKLOG // PASS + 2, "a full pass is followed by the next one, without a rest"
    assert seen.next_due is None


async def test_a_high_job_that_becomes_due_amid_a_backlog_is_in_the_next_pass(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    await kit.enqueue_all([kit.new(priority=Priority.LOW, delay=1.0) for _ in range(1_500)])
    await kit.enqueue(id="high", priority=Priority.HIGH, delay=10.0)
    clock.advance(5.0)
    assert (await store.promote(limit=500)).more
    assert await kit.state("high") is JobState.SCHEDULED
    clock.advance(5.0)
    await store.promote(limit=500)
    assert await kit.state("high") is JobState.PENDING


async def test_a_pass_says_how_late_the_longest_overdue_job_was(kit: Kit, store: Store, clock: ManualClock) -> None:
    assert (await store.promote()).late is None
    for delay, priority in ((10.0, Priority.LOW), (12.0, Priority.HIGH), (60.0, Priority.NORMAL)):
        await kit.enqueue(delay=delay, priority=priority)
    clock.advance(9.0)
    assert (await store.promote()).late is None
    clock.advance(6.5)
    assert (await store.promote()).late == pytest.approx(5.5)
    assert (await store.promote()).late is None
    clock.advance(44.5)
    assert (await store.promote()).late == pytest.approx(0.0, abs=1e-3)


@pytest.mark.alone
async def test_scheduled_jobs_do_not_slow_the_pass_that_promotes_others(opener: Opener) -> None:
    kits = []
    for count in (FEW, MANY):
        clock = ManualClock()
        kit = Kit(await opener(clock), clock)
        for start in range(0, count, 1_000):
            amount = min(1_000, count - start)
            await kit.store.enqueue([kit.new(delay=HOUR + start + n, lane=f"l{n % 50}") for n in range(amount)])
        kits.append(kit)
    try:
        for _ in range(ROUNDS):
            few: list[float] = []
            many: list[float] = []
            for _ in range(20):
                for kit, took in zip(kits, (few, many), strict=True):
                    took.append(await _pass(kit))
            if median(many) <= 3 * median(few) + 0.002:
                break
        else:
            pytest.fail(f"{median(few) * 1e3:.2f} ms beside {FEW} jobs, {median(many) * 1e3:.2f} ms beside {MANY}")
    finally:
        for kit in kits:
            await kit.store.close()


async def _pass(kit: Kit) -> float:
    """The seconds of a pass that has ten jobs to promote."""
    await kit.store.enqueue([kit.new(delay=0.5) for _ in range(10)])
    kit.clock.advance(0.5)
    began = time.perf_counter()
    seen = await kit.store.promote()
    took = time.perf_counter() - began
    assert seen.promoted == 10
    return took
