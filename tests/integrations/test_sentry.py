"""Sentry: one issue for each job that fails, with its stack and tags, and none for intended endings."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from fairlane import Backoff, Cancel, Fail, Fairlane, Retry, RunningJob, Settings, Snooze, current_job
from fairlane.integrations import sentry
from tests.cli.project import Project
from tests.worker.yard import QUICK

AT_ONCE = Backoff(base=0, most=0)


class Kept(Transport):
    """Keeps the events that would be sent."""

    events: list[dict[str, Any]]

    def capture_envelope(self, envelope: Envelope) -> None:
        documents = [item.payload.json for item in envelope.items if item.type == "event"]
        self.events += [document for document in documents if document is not None]


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    """What was sent to Sentry, which is set up as it is by default as far as errors go."""
    transport = Kept()
    transport.events = []
    sentry_sdk.init(
        dsn="https://key@sentry.invalid/1",
        transport=transport,
        default_integrations=False,
        integrations=[LoggingIntegration(), DedupeIntegration()],
    )
    yield transport.events
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture
async def app(store_url: str) -> AsyncIterator[Fairlane]:
    made = Fairlane(settings=Settings(url=store_url, intervals=QUICK))
    yield made
    await made.close()


async def drain(app: Fairlane, *tasks: Any, **options: Any) -> None:
    for task in tasks:
        await task.options(backoff=AT_ONCE, **options).enqueue()
    await app.worker(slots=2, burst=True).run()


def stack(event: dict[str, Any]) -> list[str]:
    return [frame["function"] for frame in event["exception"]["values"][-1]["stacktrace"]["frames"]]


async def test_a_failed_job_is_one_issue_with_its_stack_and_its_tags(app: Fairlane, sent: list[Any]) -> None:
    sentry.instrument(app)

    def deeper() -> None:
        raise ValueError("the fuse was lit")

    @app.task(name="explode", queue="images", lane="user:ann")
    async def explode() -> None:
        logging.getLogger("shop").warning("it smells")
        deeper()

    @app.task(name="blow_up", queue="images")
    def blow_up() -> None:
        deeper()

    await drain(app, explode, retries=1)
    [event] = sent
    [error] = event["exception"]["values"]
    assert (error["type"], error["value"], stack(event)) == ("ValueError", "the fuse was lit", ["explode", "deeper"])
    assert error["mechanism"] == {"type": "fairlane", "handled": False}
    assert event["transaction"] == "explode"
    assert event["tags"] == {"task": "explode", "queue": "images", "lane": "user:ann", "attempt": "2"}
    assert event["contexts"]["fairlane"]["retries"] == 1
    assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]] == ["it smells"]

    await drain(app, blow_up, retries=0)
    assert stack(sent[1]) == ["blow_up", "deeper"]
    assert sent[1]["tags"] == {"task": "blow_up", "queue": "images", "attempt": "1"}
    assert len(sent) == 2


async def test_what_a_job_is_retried_after_is_reported_if_asked_for(app: Fairlane, sent: list[Any]) -> None:
    sentry.instrument(app, retries=True)

    @app.task(name="flaky")
    async def flaky() -> None:
        if current_job().attempt < 3:
            raise OSError(f"try {current_job().attempt}")

    await drain(app, flaky)
    assert [event["tags"]["attempt"] for event in sent] == ["1", "2"]


async def test_what_a_job_requests_is_not_reported_but_how_it_fails_is(app: Fairlane, sent: list[Any]) -> None:
    sentry.instrument(app)

    @app.task(name="cancel")
    async def cancel() -> None:
        raise Cancel

    @app.task(name="snooze")
    def snooze() -> None:
        if current_job().fence == 1:
            raise Snooze(0)

    @app.task(name="again")
    async def again() -> None:
        raise Retry("not yet", delay=0)

    @app.task(name="fail")
    async def fail() -> None:
        raise Fail("no such customer")

    @app.task(name="choosy", no_retry_on=KeyError)
    async def choosy() -> None:
        raise KeyError("who?")

    await drain(app, cancel, snooze)
    assert sent == []
    await drain(app, again, retries=1)
    await drain(app, fail, choosy, retries=3)
    assert sorted((event["tags"]["task"], event["tags"]["attempt"]) for event in sent) == [
        ("again", "2"),
        ("choosy", "1"),
        ("fail", "1"),
    ]


async def test_what_no_job_raised_is_reported_as_a_message(app: Fairlane, sent: list[Any]) -> None:
    sentry.instrument(app)

    @app.task(name="sleep", timeout=0.05)
    async def sleep() -> None:
        await asyncio.sleep(60)

    @app.task(name="odd")
    async def odd() -> object:
        return object()

    await drain(app, sleep, odd, retries=0)
    assert sorted((event["message"], event["tags"]["queue"], event["level"]) for event in sent) == [
        ("odd: bad_result", "default", "error"),
        ("sleep: timeout", "default", "error"),
    ]


async def test_an_error_of_an_inner_hook_is_reported_and_scopes_do_not_mix(app: Fairlane, sent: list[Any]) -> None:
    sentry.instrument(app)

    @app.around_job
    def check(job: RunningJob) -> Iterator[None]:
        sentry_sdk.set_tag("checked", job.task)
        yield
        if job.task == "second":
            raise PermissionError("not today")

    for name in ("first", "second"):

        @app.task(name=name)
        async def body() -> None:
            await asyncio.sleep(0)

        await drain(app, body, retries=0)
    [event] = sent
    assert (event["tags"]["task"], event["tags"]["checked"]) == ("second", "second")
    sentry_sdk.capture_message("outside")
    assert sent[1].get("tags", {}) == {}


SHOP = """
import json, sentry_sdk
from sentry_sdk.transport import Transport
from fairlane import Fairlane
from fairlane.integrations import sentry

class Written(Transport):
    def capture_envelope(self, envelope):
        with open("events.jsonl", "a") as file:
            for item in envelope.items:
                file.write(json.dumps(item.payload.json) + "\\n")

sentry_sdk.init(dsn="https://key@sentry.invalid/1", transport=Written(), auto_enabling_integrations=False)
app = Fairlane()
sentry.instrument(app)

@app.task(isolate=True, retries=0)
def explode() -> None:
    raise ValueError("the fuse was lit")
"""


def test_the_error_of_an_isolated_job_is_reported_once_by_its_child_process(project: Project) -> None:
    project.write("watched.py", SHOP)
    # In another process: importing the module sets Sentry up.
    project.start("enqueue", "-A", "watched", "explode").communicate(timeout=60)
    worker = project.start("worker", "-A", "watched", "--burst")
    _, output = worker.communicate(timeout=60)
    assert worker.returncode == 0, output
    assert (project.path / "events.jsonl").exists(), output
    [event] = [json.loads(line) for line in (project.path / "events.jsonl").read_text().splitlines()]
    assert stack(event) == ["explode"]
    assert event["tags"] == {"task": "watched.explode", "queue": "default", "attempt": "1"}
