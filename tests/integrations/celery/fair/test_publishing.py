"""What a publish becomes: the job's id, task, queue, lane, priority, time and expiry."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import cast
from uuid import uuid4

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from fairlane import InvalidInput
from fairlane.model.job import JobState, Priority, Reason
from tests.integrations.celery.kit import ROOT
from tests.sizes import sized

from .site import Site

pytestmark = pytest.mark.parametrize("pool", sized(["prefork"], ["prefork", "threads"]), indirect=True)
QUIET = {"queue": "quiet"}
"""No worker of the tests serves it."""


def test_a_publish_is_a_job(site: Site) -> None:
    result = site.task("note").apply_async(("a",), {"seconds": 1}, headers={"tenant": "ann"}, **QUIET)
    job = site.job(result.id)
    assert (job.task, job.queue, job.lane, job.state) == ("shop.note", "quiet", "ann", JobState.PENDING)
    assert (job.priority, job.retries) == (Priority.NORMAL, 0)
    args, kwargs = json.loads(job.payload)
    assert args == []
    message = kwargs["message"]
    assert message["body"][:2] == [["a"], {"seconds": 1}]
    assert (message["headers"]["id"], message["content_type"]) == (result.id, "application/json")


def test_a_body_that_is_not_json(site: Site) -> None:
    result = site.task("note").apply_async(("a",), serializer="pickle", compression="zlib", **QUIET)
    message = json.loads(site.job(result.id).payload)[1]["message"]
    assert message["headers"]["compression"] == "application/x-gzip"
    assert base64.b64decode(message["base64"])


def test_a_compressed_task_runs(site: Site) -> None:
    assert site.task("add").apply_async((20, 3), compression="zlib").get(timeout=30) == 23


def test_acks_late_may_run_again_after_a_crash(site: Site) -> None:
    assert site.job(site.task("late").apply_async(("a",), **QUIET).id).retries == 6


def test_options_of_fairlane(site: Site) -> None:
    options = {"fairlane_lane": "bob", "fairlane_priority": "high", "fairlane_unique": "only"}
    job = site.job(site.task("note").apply_async(("a",), headers={"tenant": "ann"}, **options, **QUIET).id)
    assert (job.lane, job.priority, job.unique) == ("bob", Priority.HIGH, "only")
    job = site.job(site.task("note").apply_async(("a",), headers={"fairlane_lane": "eve"}, **QUIET).id)
    assert job.lane == "eve"


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # by Celery
def test_a_duplicate_of_a_unique_job_is_revoked(site: Site) -> None:
    first = site.task("note").apply_async(("a",), fairlane_unique="pair", **QUIET)
    second = site.task("note").apply_async(("b",), fairlane_unique="pair", **QUIET)
    with pytest.raises(TaskRevokedError, match=first.id):
        second.get(timeout=30)
    with pytest.raises(LookupError):
        site.job(second.id)
    site.shop.fairlane.blocking.cancel([first.id])


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # by Celery
def test_a_duplicate_may_have_an_id_that_its_job_begins_with(site: Site) -> None:
    id = str(uuid4())
    first = site.task("note").apply_async(("a",), task_id=f"{id}0", fairlane_unique="prefix", **QUIET)
    second = site.task("note").apply_async(("b",), task_id=id, fairlane_unique="prefix", **QUIET)
    with pytest.raises(TaskRevokedError, match=first.id):
        second.get(timeout=30)
    site.shop.fairlane.blocking.cancel([first.id])


def test_a_duplicate_that_ignores_its_result_has_none(site: Site) -> None:
    first = site.task("silent").apply_async(fairlane_unique="silent", **QUIET)
    second = site.task("silent").apply_async(fairlane_unique="silent", **QUIET)
    assert site.shop.app.AsyncResult(second.id).state == states.PENDING
    site.shop.fairlane.blocking.cancel([first.id])


def test_a_wrong_option_stores_nothing(site: Site) -> None:
    with pytest.raises(InvalidInput, match="priority"):
        site.task("note").apply_async(("a",), fairlane_priority="urgent", **QUIET)


def test_a_large_message_is_refused(site: Site) -> None:
    with pytest.raises(InvalidInput, match=r"payload: .* exceed the limit"):
        site.task("note").apply_async(("a" * 300_000,), **QUIET)


def test_send_task_by_name(site: Site) -> None:
    assert site.shop.app.send_task("shop.add", (4, 5)).get(timeout=30) == 9


def test_routes_decide_the_queue(site: Site) -> None:
    result = site.task("routed").delay()
    assert result.get(timeout=30) == "other"
    assert site.job(result.id).queue == "other"


def test_another_queue_goes_to_the_broker(site: Site) -> None:
    result = site.task("note").apply_async(("a",), queue="plain", fairlane_lane="x")
    assert site.shop.server.llen(f"{site.prefix}plain") == 1
    with pytest.raises(LookupError):
        site.job(result.id)


def test_a_message_for_the_broker_has_no_headers_of_a_claim(site: Site) -> None:
    claim = {"fairlane_job": "x", "fairlane_queue": "celery", "fairlane_key": "k"}
    site.task("note").apply_async(("a",), queue="sent", headers={"mine": "kept", **claim})
    [raw] = cast(list[bytes], site.shop.server.lrange(f"{site.prefix}sent", 0, -1))
    headers = json.loads(raw)["headers"]
    assert headers["mine"] == "kept"
    assert not claim.keys() & headers.keys()


def test_countdown_and_eta(site: Site) -> None:
    job = site.job(site.task("add").apply_async((1, 2), countdown=60, **QUIET).id)
    assert job.state is JobState.SCHEDULED
    assert job.due_at is not None
    assert 50 < job.due_at - job.enqueued_at <= 61
    due = datetime.now(UTC) + timedelta(hours=1)
    job = site.job(site.task("add").apply_async((1, 2), eta=due, **QUIET).id)
    assert job.due_at == pytest.approx(due.timestamp(), abs=0.01)
    assert site.task("add").apply_async((1, 2), countdown=0.3).get(timeout=30) == 3


def test_expires(site: Site) -> None:
    job = site.job(site.task("add").apply_async((1, 2), expires=60, **QUIET).id)
    assert job.expires_at is not None
    assert 50 < job.expires_at - job.enqueued_at <= 61
    result = site.task("add").apply_async((1, 2), expires=0.01, countdown=0.5)
    job = site.ended(result.id)
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.EXPIRED)


def test_publishing_inside_an_event_loop(site: Site) -> None:
    async def send() -> str:
        return str(site.task("add").delay(1, 2).id)

    assert site.ended(asyncio.run(send())).state is JobState.COMPLETED


def test_the_same_id_with_other_content_is_another_job(site: Site) -> None:
    id = site.task("add").apply_async((1, 2), **QUIET).id
    site.task("add").apply_async((1, 3), task_id=id, **QUIET)
    assert site.job(f"{id}.1").task == "shop.add"


SEND_AGAIN = """
import sys
from tests.integrations.celery.fair.shop import from_environment
from_environment().task("add").apply_async((1, 2), task_id=sys.argv[1], countdown=60, expires=90, queue="quiet")
"""


def test_the_same_message_from_another_process_is_the_same_job(site: Site) -> None:
    """It comes from another place, and what is computed from the present has changed."""
    id = site.task("add").apply_async((1, 2), countdown=60, expires=90, **QUIET).id
    command = [sys.executable, "-c", SEND_AGAIN, id]
    subprocess.run(command, cwd=ROOT, env=os.environ | site.environ(), check=True)
    assert site.job(id).state is JobState.SCHEDULED
    with pytest.raises(LookupError):
        site.job(f"{id}.1")


def test_the_same_message_after_a_retry_is_the_same_job(site: Site) -> None:
    """The retry has replaced the payload of the job."""
    again = site.task("again")
    result = again.apply_async((1,), expires=60)
    assert result.get(timeout=30) == [0, 1]
    again.apply_async((1,), task_id=result.id, expires=90)
    with pytest.raises(LookupError):
        site.job(f"{result.id}.1")
