"""Managers that all run the services without an election: terms save work, and nothing depends on them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from fairlane.model.job import JobState, Priority
from fairlane.model.maintenance import Retention
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.conformance.kit import Kit
from tests.sizes import sized

DUE = sized(120, 1_000)
HELD = 6
REPEATS = sized(1, 5)


class Passes:
    """One manager that makes all passes without a term, and counts what it did."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.did: Counter[str] = Counter()
        self.declared: list[str] = []

    async def until_nothing_is_left(self) -> None:
        while True:
            promoted = await self._store.promote(limit=20)
            rescued = await self._store.rescue(limit=2)
            admitted = await self._store.admit(limit=20)
            pruned = await self._store.prune(Retention())
            self.did.update(
                promoted=promoted.promoted, retried=rescued.retried, repaired=admitted.repaired, pruned=pruned.jobs
            )
            self.declared += rescued.declared
            left = sum(queue.counts.scheduled for queue in await self._store.queues())
            if not left and not rescued.more and not promoted.more:
                return


@pytest.mark.parametrize("managers", [2, 3])
async def test_managers_without_a_leader_promote_and_rescue_each_job_once(
    store_url: str, clock: ManualClock, kit: Kit, managers: int
) -> None:
    stores = [await open_store(store_url, clock=clock) for _ in range(managers)]
    worker = await kit.worker("default", "held", slots=DUE + HELD, lease=1_000_000.0)
    try:
        for _ in range(REPEATS):
            dead = await kit.worker("held", slots=HELD, lease=1.0)
            held = [await kit.enqueue(queue="held") for _ in range(HELD)]
            assert set(await dead.claim_ids(HELD)) == set(held)
            due = [kit.new(delay=1.0, lane=f"lane-{n % 3}", priority=Priority(n % 3)) for n in range(DUE)]
            await kit.enqueue_all(due)
            clock.advance(30.0)

            passes = [Passes(store) for store in stores]
            await asyncio.gather(*(one.until_nothing_is_left() for one in passes))

            did = sum((one.did for one in passes), Counter())
            assert (did["promoted"], did["retried"], did["repaired"], did["pruned"]) == (DUE, HELD, 0, 0)
            assert [id for one in passes for id in one.declared] == [dead.id]
            claimed = await worker.claim(DUE + HELD)
            assert Counter(job.id for job in claimed) == Counter([*held, *(job.id for job in due)])
            assert {job.id: job.attempt for job in claimed} == dict.fromkeys(held, 2) | {job.id: 1 for job in due}
            await worker.complete(*claimed)
        assert (await kit.store.recount()).differences == ()
        assert [await kit.state(id) for id in held] == [JobState.COMPLETED] * HELD
    finally:
        for store in stores:
            await store.close()


async def test_a_job_that_was_rescued_is_offered_once_whatever_the_order_of_the_passes(
    kit: Kit, clock: ManualClock
) -> None:
    """The rescuer only changes the state; one component makes a job visible."""
    worker = await kit.worker(lease=1_000_000.0)
    for promote_first in (True, False):
        dead = await kit.worker(lease=1.0)
        id = await kit.enqueue(delay=0.5)
        clock.advance(0.5)
        await kit.store.promote()
        assert await dead.claim_ids() == [id]
        clock.advance(2.0)
        for _ in range(2):
            if promote_first:
                await kit.store.promote()
            await kit.store.rescue()
            await kit.store.promote()
        [job] = await worker.claim(5)
        assert (job.id, job.attempt) == (id, 2)
        await worker.complete(job)
