"""What is stored and cancelled in a store in a file, without workers and without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from celery._state import _task_stack
from celery.app.control import Control
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from celery.signals import task_postrun
from kombu.exceptions import OperationalError

from fairlane import Fairlane, InvalidInput
from fairlane.integrations.celery import Fair
from fairlane.integrations.celery.adoption import adopting
from fairlane.integrations.celery.messages import digest_of, following
from fairlane.integrations.celery.publishing import MOST_RUNS_OF_AN_ID
from fairlane.model.job import JobState, NewJob

QUEUE = "storing"


@pytest.fixture
def fair(tmp_path: Path) -> Iterator[Fair]:
    """Fair mode of an application without tasks."""
    app = Celery("storing", broker="memory://localhost", set_as_current=False)
    app.conf.task_default_queue = QUEUE
    made = Fair(app, Fairlane(f"sqlite:///{tmp_path}/fairlane.db"), queues=[QUEUE])
    yield made
    made.fairlane.blocking.close()
    app.close()


def state(fair: Fair, id: str) -> JobState:
    return fair.fairlane.blocking.job(id).state


@pytest.fixture
def huge(fair: Fair) -> Iterator[Any]:
    """A task whose message is too large for a job, so that Celery runs it, and is doing so."""

    @fair.app.task(shared=False, name="storing.huge", bind=True)
    def huge(self: Task, text: str) -> None:
        """Nothing."""

    _task_stack.push(huge)
    sent_to = {"exchange": "", "routing_key": QUEUE}
    huge.push_request(
        id="huge", task=huge.name, args=("x" * 300_000,), kwargs={}, delivery_info=sent_to, called_directly=False
    )
    yield huge
    huge.pop_request()
    _task_stack.pop()


def test_the_retry_of_what_stays_with_celery_stays_there(fair: Fair, huge: Any) -> None:
    with pytest.raises(Retry):
        huge.retry(countdown=0)
    with fair.app.connection_for_read() as connection:
        message = connection.default_channel.basic_get(QUEUE, no_ack=True)
        assert (message.headers["id"], message.headers["retries"]) == ("huge", 1)
        with pytest.raises(InvalidInput, match="payload"):
            huge.apply_async(huge.request.args)
        assert connection.default_channel.basic_get(QUEUE) is None


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_retry_that_is_stored_and_sent_to_the_broker_is_one_job(
    fair: Fair, huge: Any, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a time limit interrupts the call of the store: nobody knows whether it has stored the retry."""
    store = fair.enqueue

    def interrupted(*args: Any) -> None:
        store(*args)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(fair, "enqueue", interrupted)
    fair.app.conf.task_compression = compression
    huge.request.args = ("x",)
    with pytest.raises(Retry):
        huge.retry(countdown=60)
    monkeypatch.undo()
    happened: list[str] = []
    consumer = SimpleNamespace(connection_errors=())
    receive = adopting(lambda *_, **__: happened.append("run by Celery"), fair, consumer)
    with fair.app.connection_for_read() as connection:
        message = connection.default_channel.basic_get(QUEUE, no_ack=True)
    receive(message, None, lambda *_: happened.append("acknowledged"), None, None)
    assert happened == ["acknowledged"]
    assert [job.id for job in fair.fairlane.blocking.find().jobs] == ["huge"]
    assert state(fair, "huge") is JobState.SCHEDULED


@pytest.mark.parametrize("older_first", [True, False])
def test_a_compressed_message_of_older_code_is_the_one_that_newer_code_sends(fair: Fair, older_first: bool) -> None:
    """Code before `plain` compares the digests of compressed messages; both send during a rolling deploy."""
    fair.app.conf.task_compression = "zlib"
    fair.app.send_task("report", task_id="report")
    newer = fair.fairlane.blocking.job("report").payload
    content = json.loads(newer)
    assert content[1]["message"].pop("plain")
    older = json.dumps(content).encode()
    if not older_first:
        assert digest_of(newer) == digest_of(older)  # what older code compares
        assert digest_of(following(older, newer)) == digest_of(older)
        return
    fair.fairlane.blocking.send([NewJob(id="again", task="report", queue=QUEUE, payload=older)])
    fair.app.send_task("report", task_id="again")
    assert sorted(job.id for job in fair.fairlane.blocking.find().jobs) == ["again", "report"]


@pytest.mark.parametrize("throw", [True, False])
def test_a_retry_that_cannot_be_stored_fails_the_task_that_asks_for_it(fair: Fair, huge: Any, throw: bool) -> None:
    """After the run nothing would see that: without `throw` the task would succeed, and its retry be lost."""
    huge.request.update(fairlane_job="huge", fairlane_queue=QUEUE)
    with pytest.raises(Reject, match=r"payload: .* exceed the limit"):
        huge.retry(countdown=0, throw=throw)
    task_postrun.send(sender=huge, task=huge, state="FAILURE")
    assert not fair.fairlane.blocking.find().jobs


def test_a_revoke_cancels_the_jobs_of_its_id_only(fair: Fair) -> None:
    """Other tasks and other programs may use ids that look like those of its replacements."""
    fair.app.send_task("other", task_id="report.1")
    fair.fairlane.blocking.send([NewJob(id="report.2", task="native", queue="celery", payload=b"[[], {}]")])
    fair.app.send_task("report", task_id="report")
    fair.app.send_task("report", ("replaced",), task_id="report", replaced_task_nesting=1)
    fair.cancel(["report"], running=False)
    states = {id: state(fair, id) for id in ("report", "report.1", "report.2", "report.3")}
    waits, cancelled = JobState.PENDING, JobState.CANCELLED
    assert states == {"report": cancelled, "report.1": waits, "report.2": waits, "report.3": cancelled}


def test_a_revoke_cancels_without_a_broker(fair: Fair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OperationalError("the broker is away")

    monkeypatch.setattr(Control, "revoke", fails)
    result = fair.app.send_task("task")
    with pytest.raises(OperationalError):
        result.revoke()
    assert state(fair, result.id) is JobState.CANCELLED


def test_a_revoke_cancels_the_last_of_many_replacements(fair: Fair) -> None:
    for nesting in range(MOST_RUNS_OF_AN_ID + 1):
        fair.app.send_task("poll", task_id="poll", replaced_task_nesting=nesting)
    fair.cancel(["poll"], running=False)
    assert state(fair, f"poll.{MOST_RUNS_OF_AN_ID}") is JobState.CANCELLED
