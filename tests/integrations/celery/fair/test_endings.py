"""How Celery ends a task, and what becomes of its job: one test for each row, on processes and on threads."""

import pytest
from celery import states
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError

from fairlane.model.job import JobState, Reason
from tests.integrations.celery.kit import eventually

from .site import Site


def test_success_completes(site: Site) -> None:
    result = site.task("add").delay(2, 3)
    assert result.get(timeout=30) == 5
    job = site.ended(result.id)
    assert (job.state, job.task, job.queue, job.attempt) == (JobState.COMPLETED, "shop.add", "celery", 1)


def test_failure_fails(site: Site) -> None:
    result = site.task("fail").delay("broken")
    with pytest.raises(ValueError, match="broken"):
        result.get(timeout=30)
    job = site.ended(result.id)
    assert (job.state, job.reason, job.error_group) == (JobState.FAILED, Reason.ERROR, "ValueError")
    assert job.error is not None
    assert "ValueError: broken" in job.error


def test_retry_runs_again_with_its_new_arguments(site: Site) -> None:
    result = site.task("again").delay(2)
    assert result.get(timeout=30) == [0, 2]
    job = site.ended(result.id)
    assert job.state is JobState.COMPLETED
    assert [attempt.outcome for attempt in job.attempts] == ["retry", "retry", "completed"]


def test_retries_used_up_fail(site: Site) -> None:
    result = site.task("stubborn").delay()
    with pytest.raises(KeyError, match="never"):
        result.get(timeout=30)
    job = site.ended(result.id)
    assert (job.state, job.attempt) == (JobState.FAILED, 2)


def test_autoretry(site: Site) -> None:
    result = site.task("flaky").delay()
    assert result.get(timeout=30) == 2
    assert site.ended(result.id).attempt == 3
    assert result.state == states.SUCCESS
    eventually(lambda: f"{result.id}, attempt 3 in queue" in site.workers[0].log())


def test_a_retry_that_is_not_raised_is_a_job_of_its_own(site: Site) -> None:
    result = site.task("quietly").delay(1)
    assert site.ended(result.id).state is JobState.COMPLETED
    assert site.ended(f"{result.id}.1").state is JobState.COMPLETED
    assert site.shop.lines("quietly") == ["quietly 1"]


def test_a_retry_goes_to_the_broker_and_comes_back(site: Site) -> None:
    result = site.task("wander").apply_async((["brokered", "celery"],), headers={"tenant": "ann"})
    assert result.get(timeout=30) == [2, "ann"]
    assert site.ended(result.id).state is JobState.COMPLETED
    assert site.ended(f"{result.id}.1").state is JobState.COMPLETED


def test_ignore_completes(site: Site) -> None:
    assert site.ended(site.task("ignore").delay().id).state is JobState.COMPLETED


def test_reject_fails(site: Site) -> None:
    result = site.task("reject").delay(False)
    job = site.ended(result.id)
    assert (job.state, job.error_group) == (JobState.FAILED, "Reject")
    eventually(lambda: result.state == states.FAILURE)


def test_reject_with_requeue_runs_again_uncharged(site: Site) -> None:
    result = site.task("reject").delay(True)
    assert result.get(timeout=30) == "second"
    job = site.ended(result.id)
    assert (job.attempt, [attempt.outcome for attempt in job.attempts]) == (1, ["snoozed", "completed"])


def test_a_replacement_is_a_job_of_its_own(site: Site) -> None:
    result = site.task("replace").delay(4)
    assert result.get(timeout=30) == 5
    assert site.ended(result.id).task == "shop.replace"
    assert site.ended(f"{result.id}.1").task == "shop.add"


def test_a_chain_as_replacement(site: Site) -> None:
    result = site.task("replace").delay(0)
    assert result.get(timeout=30) == 5


def test_exit_crashes(site: Site) -> None:
    result = site.task("leave").delay()
    with pytest.raises(WorkerLostError):
        result.get(timeout=30)
    job = site.ended(result.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    assert site.task("add").delay(1, 1).get(timeout=30) == 2


def test_an_unknown_task_is_declined(site: Site) -> None:
    result = site.shop.app.send_task("shop.unknown")
    eventually(lambda: any(attempt.outcome == "declined" for attempt in site.job(result.id).attempts))
    job = site.job(result.id)
    assert (job.state, job.attempt) == (JobState.PENDING, 0)
    site.shop.fairlane.blocking.cancel([result.id])


def test_content_that_is_not_accepted_fails(site: Site) -> None:
    result = site.task("add").apply_async((1, 2), serializer="pickle")
    job = site.ended(result.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.BAD_PAYLOAD)


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_the_soft_time_limit_fails(site: Site) -> None:
    result = site.task("soft").delay()
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=30)
    assert site.ended(result.id).error_group == "SoftTimeLimitExceeded"


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_the_hard_time_limit_fails_as_timeout(site: Site) -> None:
    result = site.task("hard").delay("limit")
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=30)
    job = site.ended(result.id)
    assert (job.state, job.reason, job.attempt) == (JobState.FAILED, Reason.TIMEOUT, 1)


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_the_death_of_a_child_is_never_repeated_without_acks_late(site: Site) -> None:
    result = site.task("suicide").delay("once")
    with pytest.raises(WorkerLostError):
        result.get(timeout=120)
    job = site.ended(result.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    assert len(site.shop.lines("begin once")) == 1


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_the_death_of_a_child_is_repeated_with_reject_on_worker_lost(site: Site) -> None:
    result = site.task("reborn").delay("again", 1)
    assert result.get(timeout=120) == "again"
    job = site.ended(result.id)
    assert [(attempt.outcome, attempt.reason) for attempt in job.attempts] == [
        ("retry", Reason.CRASHED),
        ("completed", None),
    ]
