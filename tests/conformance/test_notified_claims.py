"""An idle worker that was notified of a job: its claim may be quicker, and finds what any other claim finds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fairlane.model.job import JobState, Priority
from fairlane.model.settings import LaneRule
from fairlane.store.port import Store

from .kit import Kit

TOLD_OF = {
    "one": [{}],
    "two": [{}, {}],
    "one in a lane": [{"lane": "A"}],
    "two lanes": [{"lane": "A"}, {"lane": "B"}],
    "one in a limited lane": [{"lane": "strict:A"}],
    "two in a limited lane": [{"lane": "strict:A"}, {"lane": "strict:A"}],
    "one in a lane that counts more": [{"lane": "heavy:A", "cost": 2.0}],
    "two classes": [{}, {"priority": Priority.HIGH}],
    "a dear one": [{"cost": 3.0}],
    "one that has expired": [{"expires": 1.0}],
    "one that will": [{"expires": 100.0}],
    "one for any worker, one for this worker": [{}, {"worker": 0}],
    "one for this worker": [{"worker": 0}],
    "one that is sticky": [{"sticky": "k"}],
}


@pytest.mark.parametrize("jobs", TOLD_OF.values(), ids=TOLD_OF)
@pytest.mark.parametrize("slots", [1, 3])
async def test_a_notified_worker_claims_the_same_jobs_as_one_that_polls(
    kit: Kit, store: Store, jobs: list[dict[str, Any]], slots: int
) -> None:
    await kit.settings("default", LaneRule(pattern="strict:*", limit=1), LaneRule(pattern="heavy:*", weight=4.0))
    found = []
    for notified in (False, True):
        worker = await kit.worker(slots=slots, index=0)
        assert await worker.claim(slots) == []
        # Each time in new lanes: a lane that was served more starts later.
        ids = [
            await kit.enqueue(**job | ({"lane": f"{job['lane']} {notified}"} if "lane" in job else {})) for job in jobs
        ]
        kit.clock.advance(2.0)
        claim = msgspec.structs.replace(worker.everything(slots), notified=notified)
        claimed = await store.claim(worker.id, claim)
        assert {job.id for job in await store.claim(worker.id, claim)} == {job.id for job in claimed}
        found.append([(ids.index(job.id), job.fence, job.attempt, job.limited) for job in claimed])
        await worker.complete(*claimed)
        left = [id for id in ids if (await kit.job(id)).state is JobState.PENDING]
        await store.cancel(left)
        assert (await store.recount()).differences == ()
        await store.leave(worker.id)
    assert found[0] == found[1]


@pytest.mark.parametrize("fields", [{"paused": True}, {"limit": 1}], ids=["paused", "limited"])
async def test_a_notified_worker_obeys_the_settings_of_the_queue(
    kit: Kit, store: Store, fields: dict[str, Any]
) -> None:
    worker = await kit.worker(slots=3)
    if "limit" in fields:
        await kit.enqueue()
        assert len(await worker.claim(1)) == 1
    await kit.settings("default", **fields)
    await kit.enqueue()
    assert await store.claim(worker.id, msgspec.structs.replace(worker.everything(3), notified=True)) == []
