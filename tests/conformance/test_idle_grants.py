"""A place whose holder cannot start: in an unordered lane it moves on after two seconds, in an ordered one it stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from fairlane.model.job import Claimed
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Reserved

from .kit import Kit, Worker


async def _bound_behind_a_full_worker(kit: Kit, *, ordered: bool) -> tuple[Worker, Worker, Claimed, str, str]:
    """A lane of one place, held by a job whose worker is full, and a job that could run elsewhere."""
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=ordered))
    full = await kit.worker("other", slots=1, index=0)
    await kit.enqueue(queue="other")
    [filler] = await full.claim()
    free = await kit.worker(index=1)
    bound = await kit.enqueue(lane="lane", sticky="plan")
    assert (await kit.job(bound)).worker == full.name
    loose = await kit.enqueue(lane="lane")
    return full, free, filler, bound, loose


async def test_an_unordered_place_held_for_two_seconds_by_a_job_whose_worker_is_full_moves_on(
    kit: Kit,
) -> None:
    full, free, filler, bound, loose = await _bound_behind_a_full_worker(kit, ordered=False)
    kit.clock.advance(1.9)
    assert (await kit.store.admit()).moved == 0
    assert await free.claim(10) == []
    kit.clock.advance(0.2)
    admitted = await kit.store.admit()
    assert (admitted.moved, admitted.repaired) == (1, 0)
    [claimed] = await free.claim(10)
    assert claimed.id == loose
    await full.complete(filler)
    assert await full.claim(1) == [], "the place is taken, wherever its job runs"
    await free.complete(claimed)
    assert await full.claim_ids(1) == [bound]


async def test_a_place_does_not_move_to_a_job_that_waits_for_a_worker_to_be_bound_to(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=False))
    full = await kit.worker("other", "default", slots=1, lease=1_000)
    await kit.enqueue(queue="other", sticky="plan")
    await full.claim()
    await kit.enqueue(lane="lane", sticky="plan")
    await kit.enqueue(lane="lane", sticky="plan", pool="nobody-yet")
    free = await kit.worker(lease=1_000)
    loose = await kit.enqueue(lane="lane")

    kit.clock.advance(3)

    assert (await kit.store.admit()).moved == 1
    assert await free.claim_ids(10) == [loose]


async def test_a_place_moves_on_however_many_others_are_held_too(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1, ordered=False))
    full, free = await kit.worker("other", slots=1, index=0, lease=1e6), await kit.worker(index=1, lease=1e6)
    await kit.enqueue(queue="other")
    await full.claim()
    # More than one pass looks at: in lanes in which nobody else waits, or only jobs that cannot start either.
    await kit.enqueue_all([kit.new(lane=f"other-{n % 40}", worker=0) for n in range(60)])
    kit.clock.advance(0.1)
    await kit.enqueue(lane="lane", worker=0)
    loose = await kit.enqueue(lane="lane")
    kit.clock.advance(3)
    moved = 0
    for _ in range(100):
        moved += (await kit.store.admit(limit=10)).moved
        if moved:
            break
        kit.clock.advance(1)
    assert moved == 1
    assert await free.claim_ids(10) == [loose]


async def test_a_place_moves_on_past_any_number_of_jobs_of_the_same_worker(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=False))
    full, free = await kit.worker("other", slots=1, index=0, lease=1e6), await kit.worker(index=1, lease=1e6)
    await kit.enqueue(queue="other")
    await full.claim()
    await kit.enqueue_all([kit.new(lane="lane", worker=0) for _ in range(2_100)])
    loose = await kit.enqueue(lane="lane")
    moved = 0
    for _ in range(100):
        kit.clock.advance(3)
        moved += (await kit.store.admit()).moved
        if moved:
            break
    assert moved == 1
    assert await free.claim_ids(10) == [loose]


async def test_an_ordered_place_stays_with_the_head_whatever_its_worker_does(kit: Kit) -> None:
    full, free, filler, bound, _ = await _bound_behind_a_full_worker(kit, ordered=True)
    kit.clock.advance(10)
    assert (await kit.store.admit()).moved == 0
    assert await free.claim(10) == []
    await full.complete(filler)
    assert await full.claim_ids(1) == [bound]


async def test_a_place_does_not_move_while_the_bound_worker_could_take_its_job(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=False))
    owner, other = await kit.worker(index=0), await kit.worker(index=1)
    bound = await kit.enqueue(lane="lane", sticky="plan")
    await kit.enqueue(lane="lane")
    kit.clock.advance(10)
    assert (await kit.store.admit()).moved == 0
    assert await other.claim(10) == []
    assert await owner.claim_ids(1) == [bound]


async def test_a_place_does_not_move_when_no_other_job_could_use_it(kit: Kit) -> None:
    full, _, filler, bound, loose = await _bound_behind_a_full_worker(kit, ordered=False)
    await kit.store.cancel([loose])
    kit.clock.advance(10)
    assert (await kit.store.admit()).moved == 0
    await full.complete(filler)
    assert await full.claim_ids(1) == [bound]


async def _for_a_full_worker(kit: Kit) -> str:
    full = await kit.worker("other", slots=1, index=0)
    await kit.enqueue(queue="other")
    await full.claim()
    return await kit.enqueue(lane="lane", sticky="plan")


async def _for_a_worker_with_nothing_but_a_reserved_slot(kit: Kit) -> str:
    nearly_full = await kit.worker("other", slots=2, reserved=Reserved(high=1), index=0)
    await kit.enqueue(queue="other")
    await nearly_full.claim()
    return await kit.enqueue(lane="lane", sticky="plan")


async def _for_a_stopping_worker(kit: Kit) -> str:
    stopping = await kit.worker("other", index=0)
    id = await kit.enqueue(lane="lane", sticky="plan")
    await stopping.renew(stopping=True)
    return id


async def _for_a_worker_that_left_and_may_come_back(kit: Kit) -> str:
    named = await kit.worker("other", index=0)
    id = await kit.enqueue(lane="lane", sticky="plan")
    await named.leave()
    return id


async def _for_a_worker_that_is_not_there(kit: Kit) -> str:
    return await kit.enqueue(lane="lane", worker=7)


async def _for_a_pool_without_workers(kit: Kit) -> str:
    return await kit.enqueue(lane="lane", sticky="plan", pool="nobody")


@pytest.mark.parametrize(
    "stuck",
    [
        _for_a_full_worker,
        _for_a_worker_with_nothing_but_a_reserved_slot,
        _for_a_stopping_worker,
        _for_a_worker_that_left_and_may_come_back,
        _for_a_worker_that_is_not_there,
        _for_a_pool_without_workers,
    ],
)
async def test_whatever_keeps_a_placed_job_from_starting_does_not_keep_its_unordered_lane(
    kit: Kit, stuck: Callable[[Kit], Awaitable[str]]
) -> None:
    await kit.settings("default", LaneRule(pattern="lane", limit=1, ordered=False))
    await stuck(kit)
    free = await kit.worker(index=1)
    loose = await kit.enqueue(lane="lane")
    kit.clock.advance(2.1)
    await kit.store.admit()
    assert await free.claim_ids(10) == [loose]
    assert (await kit.store.recount()).differences == ()
