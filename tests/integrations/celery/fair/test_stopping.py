"""Tasks that are revoked or cancelled, while they wait and while they run."""

import pytest
from celery import states

from fairlane.model.job import JobState, Reason
from tests.integrations.celery.kit import eventually

from .site import Site


def test_revoke_cancels_a_job_that_waits(site: Site) -> None:
    result = site.task("note").apply_async(("never",), queue="quiet")
    result.revoke()
    job = site.ended(result.id)
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.BY_USER)


def test_revoke_cancels_a_replacement_whose_task_is_forgotten(site: Site) -> None:
    """The first job of an id may be gone, or have gone to the broker."""
    options = {"queue": "quiet", "replaced_task_nesting": 1}
    result = site.task("note").apply_async(("never",), **options)
    with pytest.raises(LookupError):
        site.job(result.id)
    result.revoke()
    assert site.ended(f"{result.id}.1").state is JobState.CANCELLED


def test_revoke_of_an_unknown_id_is_harmless(site: Site) -> None:
    site.shop.app.control.revoke("no-such-task")


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_revoke_with_terminate_stops_a_running_task(site: Site) -> None:
    result = site.task("note").delay("revoked", 60)
    eventually(lambda: site.shop.lines("begin revoked"))
    result.revoke(terminate=True)
    assert site.ended(result.id).state is JobState.CANCELLED
    eventually(lambda: result.state == states.REVOKED)


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_cancelling_the_job_terminates_its_task(site: Site) -> None:
    result = site.task("note").delay("cancelled", 60)
    eventually(lambda: site.shop.lines("begin cancelled"))
    site.shop.fairlane.blocking.cancel([result.id])
    assert site.ended(result.id).state is JobState.CANCELLED
    eventually(lambda: result.state == states.REVOKED)
    # The process that was killed is replaced, and the next death there is not taken for a stop.
    assert site.task("add").delay(1, 2).get(timeout=30) == 3


@pytest.mark.parametrize("pool", ["threads"], indirect=True)
@pytest.mark.parametrize("how", ["cancel", "revoke"])
def test_a_thread_cannot_be_stopped(site: Site, how: str) -> None:
    result = site.task("note").delay(how, 1.0)
    eventually(lambda: site.shop.lines(f"begin {how}"))
    if how == "cancel":
        site.shop.fairlane.blocking.cancel([result.id])
    else:
        result.revoke(terminate=True)
    assert result.get(timeout=30) == how
    assert site.ended(result.id).state is JobState.COMPLETED
