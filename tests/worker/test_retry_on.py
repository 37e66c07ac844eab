"""Which errors are retried, by their class, wherever the body runs."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from fairlane import Cancel, Fail, Fairlane, InvalidInput, JobState, Retry, Snooze, current_job
from fairlane.model.job import Job

from . import choosy
from .hook_kit import AT_ONCE, both, ran
from .yard import Yard

# ConnectionError is an OSError, ConnectionRefusedError a ConnectionError.
CASES: list[tuple[dict[str, Any], type[Exception], int]] = [
    ({"retry_on": ConnectionError}, ConnectionError, 3),
    ({"retry_on": ConnectionError}, ConnectionRefusedError, 3),
    ({"retry_on": ConnectionError}, OSError, 1),
    ({"retry_on": [KeyError, ConnectionError]}, KeyError, 3),
    ({"retry_on": (KeyError, ConnectionError)}, ValueError, 1),
    ({"no_retry_on": ConnectionError}, ConnectionRefusedError, 1),
    ({"no_retry_on": ConnectionError}, OSError, 3),
    ({"retry_on": OSError, "no_retry_on": ConnectionError}, OSError, 3),
    ({"retry_on": OSError, "no_retry_on": ConnectionError}, ConnectionRefusedError, 1),
    # The narrower class in retry_on changes nothing: no_retry_on wins.
    ({"retry_on": ConnectionRefusedError, "no_retry_on": ConnectionError}, ConnectionRefusedError, 1),
]


@both
@pytest.mark.parametrize(("settings", "kind", "runs"), CASES)
@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_the_class_of_an_error_decides(
    app: Fairlane, task: Any, settings: dict[str, Any], kind: type[Exception], runs: int
) -> None:
    def body() -> None:
        raise kind("no")

    job = await ran(app, task(app, body, retries=2, **settings))
    assert (job.state, job.attempt, str(job.reason)) == (JobState.FAILED, runs, "error")


async def test_an_error_that_is_not_retried_fails_the_job_at_once(app: Fairlane) -> None:
    @app.task(name="call_out", no_retry_on=socket.gaierror)
    async def call_out() -> None:
        raise socket.gaierror("no such host")

    job = await ran(app, call_out)
    assert (job.state, job.attempt, job.error_group) == (JobState.FAILED, 1, "gaierror in call_out")


@both
async def test_what_a_body_asks_for_is_not_subject_to_the_rule(app: Fairlane, task: Any) -> None:
    def body() -> int:
        if current_job().fence == 1:
            raise Retry(delay=0)
        if current_job().fence == 2:
            raise Snooze(0)
        return current_job().attempt

    job = await ran(app, task(app, body, retries=1, retry_on=KeyError, no_retry_on=Exception))
    assert (job.state, job.result) == (JobState.COMPLETED, b"2")


async def test_a_timeout_is_a_matter_of_retries_alone(app: Fairlane) -> None:
    @app.task(name="late", timeout=0.02, retries=1, retry_on=KeyError, backoff=AT_ONCE)
    async def late() -> None:
        await asyncio.sleep(60)

    job = await ran(app, late)
    assert (str(job.reason), job.attempt) == ("timeout", 2)


@pytest.mark.parametrize(
    ("name", "kind", "runs"),
    [
        ("declared", "Busy", 3),
        ("declared", "TooBusy", 3),
        ("declared", "Broken", 1),
        ("called", "Busy", 3),
        ("called", "Broken", 1),
        ("elsewhere", "TooBusy", 3),
        ("elsewhere", "Broken", 1),
    ],
)
@pytest.mark.parametrize("store_kind", ["sqlite"], indirect=True)
async def test_it_holds_in_child_processes_however_the_task_was_registered(
    yard: Yard, name: str, kind: str, runs: int
) -> None:
    """A task that another module registered by a call is found only as its function, without its settings."""
    yard.registry.add(choosy.app.registry.find(name) if name != "elsewhere" else choosy.registered_here(yard))
    async with yard.worker():
        job: Job = await yard.until(await yard.enqueue(name, kind, retries=2, timeout=60))
    assert (job.state, job.attempt) == (JobState.FAILED, runs)


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"retry_on": "ValueError"}, "retry_on", "must be exception classes"),
        ({"retry_on": ()}, "retry_on", "retries=0"),
        ({"retry_on": [ValueError, "KeyError"]}, "retry_on", "'KeyError' is not an exception class"),
        ({"no_retry_on": int}, "no_retry_on", "is not an exception class"),
        ({"no_retry_on": ValueError("x")}, "no_retry_on", "must be exception classes"),
        ({"retry_on": Retry}, "retry_on", "Retry decides itself how a run ends"),
        ({"no_retry_on": (Fail, Cancel)}, "no_retry_on", "Fail decides itself"),
    ],
)
def test_a_senseless_rule_is_refused(settings: dict[str, Any], field: str, words: str) -> None:
    app = Fairlane("sqlite:///never-opened.db")
    with pytest.raises(InvalidInput, match=words) as caught:
        app.task(name="work", **settings)(lambda: None)
    assert caught.value.field == field


def test_a_rule_belongs_to_the_task_and_not_to_a_call() -> None:
    task: Any = choosy.app.registry.find("declared")
    with pytest.raises(InvalidInput, match=r"retry_on: is set in @app\.task"):
        task.options(retry_on=KeyError)
