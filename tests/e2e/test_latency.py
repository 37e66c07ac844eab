"""How long a job waits after its due time."""

from __future__ import annotations

from fairlane.model.intervals import Intervals
from tests.sizes import sized, strict

from . import figures, tasks
from .world import Stage

JOBS = 40
SPREAD = 1.0
"""Seconds over which the jobs become due."""
PASS = sized(20.0, 0.5)
"""Seconds that a pass of the promoter and a claim may take together; less in a full run, where nothing else runs."""


@strict
async def test_a_job_starts_at_most_an_interval_and_a_pass_after_it_is_due(stage: Stage) -> None:
    """Both instants are the store's. The promoter comes when something is due that it knows of: then it is soon."""
    async with stage.world(intervals=Intervals()) as world:
        await world.ready(world.fleet.worker("-c", str(JOBS)))
        delays = [SPREAD * (number + 1) / JOBS for number in range(JOBS)]
        await world.until(world.client.leader, "a manager leads")
        # The last one first: others come due while the promoter waits for one that is further away.
        sent = [(await world.send(tasks.noop.options(delay=delay).call())).id for delay in reversed(delays)]
        late = []
        for job, delay in zip(await world.final(*sent), reversed(delays), strict=True):
            assert job.started_at is not None
            late.append(job.started_at - (job.enqueued_at + delay))
        figures.record(
            "from due to started",
            median_ms=round(1_000 * figures.median(late), 1),
            p95_ms=round(1_000 * figures.percentile(late, 0.95), 1),
            most_ms=round(1_000 * max(late), 1),
        )
        assert min(late) >= 0.0
        assert max(late) <= world.intervals.promote + PASS
