"""Celery's beat publishes through fair mode."""

import pytest

from fairlane.model.job import Job, JobState
from tests.integrations.celery.kit import eventually

from .site import Site


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_a_beat_sends_jobs(site: Site) -> None:
    def ticks() -> list[Job]:
        return list(site.shop.fairlane.blocking.find(queue="celery", lane="beat", state=JobState.COMPLETED).jobs)

    beat = site.beat()
    try:
        eventually(lambda: len(ticks()) >= 3)
    finally:
        beat.stop()
        beat.close()
    jobs = ticks()
    assert {(job.task, job.attempt) for job in jobs} == {("shop.note", 1)}
    assert len(site.shop.lines("end tick")) >= len(jobs)
    assert site.shop.server.llen(f"{site.prefix}celery") == 0, "it went through the broker"
    assert "Traceback" not in beat.log()
