"""How long a job waited for its first start, as its claim says."""

from __future__ import annotations

import pytest

from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock

from .kit import Kit


async def test_a_claim_says_how_long_the_job_waited_once_it_was_due(kit: Kit, clock: ManualClock) -> None:
    term = await kit.store.lead("leader", lease=1_000)
    assert term is not None
    await kit.enqueue(id="now")
    await kit.enqueue(id="later", delay=10.0)
    await kit.enqueue(id="then", run_at=clock.now() + 12.0)
    worker = await kit.worker()
    clock.advance(5.0)
    assert {job.id: job.waited for job in await worker.claim(5)} == {"now": pytest.approx(5.0)}
    clock.advance(9.0)
    await kit.store.promote(limit=10, term=term.number)
    claimed = {job.id: job.waited for job in await worker.claim(5)}
    assert claimed == {"later": pytest.approx(4.0), "then": pytest.approx(2.0)}


async def test_a_job_of_any_kind_of_line_says_it(kit: Kit, clock: ManualClock) -> None:
    await kit.settings("default", LaneRule(pattern="model:*", limit=1))
    worker = await kit.worker(slots=10)
    for id, fields in {"laned": {"lane": "ann"}, "limited": {"lane": "model:x"}, "bound": {"sticky": "key"}}.items():
        await kit.enqueue(id=id, **fields)
    clock.advance(3.0)
    claimed = {job.id: job.waited for job in await worker.claim(10)}
    assert claimed == dict.fromkeys(("laned", "limited", "bound"), pytest.approx(3.0))


async def test_only_the_first_start_has_a_wait_and_a_repeated_claim_says_the_same(kit: Kit, clock: ManualClock) -> None:
    await kit.enqueue(id="job")
    worker = await kit.worker()
    clock.advance(5.0)
    claim = worker.everything(1)
    [first] = await kit.store.claim(worker.id, claim)
    clock.advance(5.0)
    assert await kit.store.claim(worker.id, claim) == [first]
    assert first.waited == pytest.approx(5.0)
    await worker.retry(first)
    [second] = await worker.claim()
    assert (second.fence, second.waited) == (2, None)
