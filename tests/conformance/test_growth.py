"""Verbs that take many jobs at once: their cost grows in proportion to the number of jobs, and no faster."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from fairlane.model.job import JobKind, JobState
from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock

from .conftest import Opener
from .kit import Kit
from .runs import bulk

FEW = 600
TIMES = 4
SLACK = 0.3
"""Seconds that a busy machine may add."""
ROUNDS = 4
"""Measurements before the test fails. A cost that grows too fast exceeds the bound in all of them."""

Action = Callable[[], Awaitable[Any]]


async def _cancel_in_a_lane(kit: Kit, count: int, **fields: Any) -> Action:
    answers = await kit.enqueue_all(bulk(kit, "model", count, **fields))

    async def act() -> None:
        assert set(await kit.store.cancel([answer.id for answer in answers])) == {JobState.CANCELLED}

    return act


async def _cancel_in_a_narrow_lane(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=1))
    return await _cancel_in_a_lane(kit, count)


async def _cancel_in_a_wide_lane(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=200))
    return await _cancel_in_a_lane(kit, count)


async def _cancel_sticky(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=1))
    await kit.worker()
    return await _cancel_in_a_lane(kit, count, sticky="plan")


async def _cancel_unique(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=1))
    jobs = [kit.new(lane="model", unique=f"value-{number}") for number in range(count)]
    answers = await kit.enqueue_all(jobs)
    return lambda: kit.store.cancel([answer.id for answer in answers])


async def _cancel_backwards(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=1))
    answers = await kit.enqueue_all(bulk(kit, "model", count))
    return lambda: kit.store.cancel([answer.id for answer in reversed(answers)])


async def _expire(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=2))
    await kit.enqueue_all(bulk(kit, "model", count, expires=5.0))
    kit.clock.advance(6)

    async def act() -> None:
        expired = 0
        while expired < count:
            expired += (await kit.store.promote()).expired

    return act


async def _lower_a_limit(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=count), version=1)
    await kit.enqueue_all(bulk(kit, "model", count))
    return lambda: kit.settings("default", LaneRule(pattern="model", limit=1), version=2)


async def _raise_a_limit(kit: Kit, count: int) -> Action:
    await kit.settings("default", LaneRule(pattern="model", limit=1), version=1)
    await kit.enqueue_all(bulk(kit, "model", count))
    return lambda: kit.settings("default", LaneRule(pattern="model", limit=count), version=2)


async def _release(kit: Kit, count: int) -> Action:
    await kit.worker()
    answers = await kit.enqueue_all(bulk(kit, "model", count, sticky="plan"))

    async def act() -> None:
        await kit.store.release("default", "plan", kit.new(kind=JobKind.CLEANUP))
        await kit.store.cancel([answer.id for answer in answers])

    return act


@pytest.mark.alone
@pytest.mark.parametrize(
    "prepared",
    [
        _cancel_in_a_narrow_lane, _cancel_in_a_wide_lane, _cancel_sticky, _cancel_unique, _cancel_backwards, _expire,
        _lower_a_limit, _raise_a_limit, _release,
    ],
    ids=lambda prepared: prepared.__name__.strip("_"),
)  # fmt: skip
async def test_four_times_the_jobs_cost_no_more_than_twice_that(
    opener: Opener, prepared: Callable[[Kit, int], Awaitable[Action]]
) -> None:
    for number in range(ROUNDS):
        # Others may have had the processors while it was many jobs' turn. As many jobs in parts take as long then.
        parts = 1 if number == 0 else TIMES
        few = sum([await _measured_once(opener, prepared, FEW) for _ in range(parts)]) / parts
        many = await _measured_once(opener, prepared, TIMES * FEW)
        if many <= 2 * TIMES * few + SLACK:
            break
    else:
        pytest.fail(f"{FEW} took {few:.2f} s, {TIMES} times as many {many:.2f} s")


async def _measured_once(opener: Opener, prepared: Callable[[Kit, int], Awaitable[Action]], jobs: int) -> float:
    """The seconds that the action takes for this many jobs in a new store."""
    clock = ManualClock()
    kit = Kit(await opener(clock), clock)
    try:
        took = await _seconds(await prepared(kit, jobs))
        assert (await kit.store.recount()).differences == ()
    finally:
        await kit.store.close()
    return took


async def _seconds(action: Action) -> float:
    began = time.perf_counter()
    await action()
    return time.perf_counter() - began


async def test_cancelling_a_broadcast_costs_as_much_as_its_copies(kit: Kit) -> None:
    for index in range(150):
        await kit.worker(index=index, lease=1_000.0)
    took = []
    for _ in range(ROUNDS):
        parent = await kit.enqueue(kind=JobKind.BROADCAST)
        took.append(await _seconds(partial(kit.store.cancel, [parent])))
        [job] = await kit.store.get([parent])
        assert job is not None
        assert job.state is JobState.CANCELLED
        if took[-1] < 1.0:
            break
    assert min(took) < 1.0, f"{took} s"
