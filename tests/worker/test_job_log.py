"""The log of jobs: one line for each that ended, and the traceback of an error."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from fairlane.errors import Cancel, Fail, Snooze
from fairlane.model.job import JobState
from fairlane.model.retry import Backoff
from fairlane.runtime import logs
from fairlane.worker.executor import Executor

from . import isolated_tasks
from .yard import PATIENCE, Yard

AT_ONCE = Backoff(base=0, most=0)


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """Where records go, as JSON; nothing of it outlives the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    written = io.StringIO()
    logs.configure("info", "json", written)
    yield written
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    return [each for each in found if each["logger"] == "fairlane.worker.jobs"]


async def test_a_finished_job_has_one_line_with_all_about_it(yard: Yard, out: io.StringIO) -> None:
    async def fine(secret: str) -> str:
        return secret

    yard.task(fine, queue="images")
    async with yard.worker(queues={"images": 1}):
        id = await yard.enqueue("fine", "sk-live", lane="user:ann")
        await yard.until(id)
    [line] = lines(out)
    assert line["level"] == "info"
    assert 0 <= line.pop("run") < 20
    assert 0 <= line.pop("wait") < 20
    assert ", waited " in line["message"]
    known = {"job": id, "task": "fine", "attempt": 1, "queue": "images", "lane": "user:ann", "outcome": "completed"}
    assert {field: line[field] for field in known} == known
    assert line["message"].startswith(f"fine {id}, attempt 1 of 4 in queue images, lane user:ann, ")
    assert line["message"].endswith(" s: completed")
    assert "sk-live" not in out.getvalue()


async def test_a_failure_has_its_traceback_from_the_users_first_frame_on(yard: Yard, out: io.StringIO) -> None:
    async def explode() -> None:
        raise RuntimeError("the fuse was lit")

    def blow_up() -> None:
        raise RuntimeError("the fuse was lit")

    yard.task(explode, retries=1, backoff=AT_ONCE)
    yard.task(blow_up, retries=0)
    async with yard.worker(slots=1):
        stored = [await yard.until(await yard.enqueue(name)) for name in ("explode", "blow_up")]
    told = lines(out)
    assert [(each["task"], each["level"], each["outcome"]) for each in told] == [
        ("explode", "warning", "retry"),
        ("explode", "error", "failed"),
        ("blow_up", "error", "failed"),
    ]
    for each, body in zip(told, ("explode", "explode", "blow_up"), strict=True):
        assert each["exception"].startswith("Traceback (most recent call last):\n")
        assert f"in {body}" in each["exception"]
        assert each["exception"].endswith("RuntimeError: the fuse was lit")
        assert "fairlane/worker" not in each["exception"]
    assert [job.error and job.error.rstrip() for job in stored] == [told[1]["exception"], told[2]["exception"]]


async def test_the_line_of_a_failure_names_the_error_whatever_lines_its_message_has(
    yard: Yard, out: io.StringIO
) -> None:
    async def explode() -> None:
        raise RuntimeError("the fuse was lit\nINFO all is well")

    yard.task(explode, retries=0)
    async with yard.worker():
        await yard.until(await yard.enqueue("explode"))
    [line] = lines(out)
    assert line["message"].endswith(" s: failed, no retry is left: RuntimeError: the fuse was lit")


async def test_handlers_of_others_get_the_exception_itself(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async def explode() -> None:
        raise RuntimeError("the fuse was lit")

    yard.task(explode, retries=0)
    async with yard.worker():
        await yard.until(await yard.enqueue("explode"))
    [record] = [r for r in caplog.records if r.name == "fairlane.worker.jobs" and r.levelname == "ERROR"]
    assert record.exc_info is not None
    kind, error, trace = record.exc_info
    assert (kind, str(error)) == (RuntimeError, "the fuse was lit")
    assert trace is not None
    assert trace.tb_frame.f_code.co_name == "explode"


async def test_the_traceback_of_a_child_process_is_in_the_log_too(yard: Yard, out: io.StringIO) -> None:
    yard.registry.add(isolated_tasks.fail)
    async with yard.worker():
        await yard.until(await yard.enqueue("fail", "no paper", retries=0, timeout=60))
    [line] = lines(out)
    assert "in fail" in line["exception"]
    assert "no paper" in line["exception"]


async def test_a_traceback_of_any_size_is_bounded(yard: Yard, out: io.StringIO) -> None:
    async def explode() -> None:
        raise RuntimeError("x" * 1_000_000)

    yard.task(explode, retries=0)
    async with yard.worker():
        await yard.until(await yard.enqueue("explode"))
    [line] = lines(out)
    assert len(line["exception"]) <= 17 * 1024
    assert len(line["message"]) < 1_000


async def test_what_a_body_asks_for_is_no_failure(yard: Yard, out: io.StringIO) -> None:
    times: list[int] = []

    async def cancel() -> None:
        raise Cancel

    async def snooze() -> None:
        times.append(1)
        if len(times) == 1:
            raise Snooze(0)

    async def fail() -> None:
        raise Fail("no such customer")

    for body in (cancel, snooze, fail):
        yard.task(body, retries=3)
    async with yard.worker(slots=1):
        for name in ("cancel", "snooze", "fail"):
            await yard.until(await yard.enqueue(name))
    told = [(each["task"], each["level"], each["outcome"], "exception" in each) for each in lines(out)]
    assert told == [
        ("cancel", "info", "cancelled", False),
        ("snooze", "info", "snoozed", False),
        ("snooze", "info", "completed", False),
        ("fail", "error", "failed", True),
    ]
    assert "it is not retried" in lines(out)[-1]["message"]


@pytest.mark.parametrize("ends_by", ["a timeout", "an error", "a snooze"])
async def test_a_job_that_was_cancelled_meanwhile_is_logged_as_cancelled(
    yard: Yard, out: io.StringIO, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    ready, cancelled = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        if ends_by == "a timeout":
            try:
                await asyncio.sleep(PATIENCE)
            finally:
                ready.set()
                await cancelled.wait()
        ready.set()
        await cancelled.wait()
        raise ValueError("the fuse was lit") if ends_by == "an error" else Snooze(60)

    if ends_by != "a timeout":
        # The run ends before the worker learns of the request.
        monkeypatch.setattr(Executor, "stop", lambda *_: None)
    yard.task(body, retries=0, timeout=0.1 if ends_by == "a timeout" else None)
    async with yard.worker():
        id = await yard.enqueue("body")
        await ready.wait()
        await yard.store.cancel([id])
        cancelled.set()
        assert (await yard.until(id)).state is JobState.CANCELLED
    [line] = lines(out)
    endings = {
        "a timeout": "; the run ended with: the run took longer than its timeout of 0.1 s",
        "an error": "; the run ended with: ValueError: the fuse was lit",
        "a snooze": "",
    }
    assert (line["outcome"], line["level"]) == ("cancelled", "info" if ends_by == "a snooze" else "warning")
    assert line["message"].endswith(f" s: cancelled, as was requested meanwhile{endings[ends_by]}")


async def test_nothing_is_made_for_a_level_that_is_not_written(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fine() -> None: ...

    logger = logging.getLogger("fairlane.worker.jobs")
    monkeypatch.setattr(logger, "makeRecord", lambda *_: pytest.fail("a record was made"))
    logger.setLevel(logging.WARNING)
    try:
        yard.task(fine)
        async with yard.worker():
            assert (await yard.until(await yard.enqueue("fine"))).result == b"null"
    finally:
        logger.setLevel(logging.NOTSET)
