"""Log records as people and machines read them: whole, on one line, and impossible to forge."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import logging.config
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.runtime import logs, running_job
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from tests.conformance.kit import Kit

FORGED = "x\n2026-01-01T00:00:00.000Z INFO    worker: all is well\r\x1b[2K\u2028\u202e"
log = logging.getLogger("fairlane.worker.fetcher")


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    """Nothing that a test configures outlives it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    enabled = [
        each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger) and not each.disabled
    ]
    yield
    for logger in enabled:
        logger.disabled = False
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("fairlane").setLevel(logging.NOTSET)


@pytest.fixture
def out() -> io.StringIO:
    """Where the records go."""
    return io.StringIO()


def objects(out: io.StringIO) -> list[dict[str, Any]]:
    """The records written as JSON, one for each line."""
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture
async def job(tmp_path: Path) -> running_job.RunningJob:
    """A job as its body knows it, in its second attempt."""
    store = await open_store(f"sqlite:///{tmp_path / 'fairlane.db'}", clock=ManualClock())
    kit = Kit(store, ManualClock())
    await kit.enqueue("render", id="job-1", lane="ann", payload=b'[["hunter2"],{}]')
    worker = await kit.worker()
    await worker.retry(*await worker.claim())
    [claimed] = await worker.claim()
    await store.close()
    return running_job.RunningJob(claimed, lambda held, value: None)


def write_inside(job: running_job.RunningJob, message: str, **extra: object) -> None:
    """Write a record as the body of a job does."""

    def body() -> None:
        job.enter()
        log.warning(message, extra=extra)

    contextvars.Context().run(body)


class Unprintable:
    """A value whose `repr` raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_text_has_time_level_short_name_and_message(out: io.StringIO) -> None:
    logs.configure(stream=out)
    log.info("claimed %d jobs", 3)

    time, rest = out.getvalue().split(" ", 1)
    assert datetime.fromisoformat(time).utcoffset() is not None
    assert time.endswith("Z")
    assert rest == "INFO    worker.fetcher: claimed 3 jobs\n"


def test_names_of_others_stay_whole(out: io.StringIO) -> None:
    logs.configure(stream=out)
    logging.getLogger("shop.fairlane.cart").info("hello")

    assert " shop.fairlane.cart: hello\n" in out.getvalue()


@pytest.mark.parametrize("format", logs.FORMATS)
def test_a_message_cannot_forge_a_line(out: io.StringIO, format: str) -> None:
    logs.configure(format=format, stream=out)
    log.info("job %s", FORGED)

    written = out.getvalue()
    assert written.removesuffix("\n").isprintable()
    assert len(written.splitlines()) == 1
    assert "\\n2026" in written
    written.encode()


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
def test_half_a_character_can_be_written(formatter: logging.Formatter) -> None:
    # Not through a logger: pytest keeps what those write, and cannot send it from one process to another.
    written = formatter.format(logging.makeLogRecord({"msg": "file \udc80", "name": "shop"}))

    assert "file \\udc80" in written
    written.encode()


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
def test_a_record_that_came_from_elsewhere_keeps_the_text_of_its_exception(formatter: logging.Formatter) -> None:
    written = formatter.format(logging.makeLogRecord({"msg": "lost", "name": "shop", "exc_text": "ValueError: bad"}))

    assert "ValueError: bad" in written
    assert len(written.splitlines()) == (2 if isinstance(formatter, logs.TextFormatter) else 1)


@pytest.mark.parametrize("format", logs.FORMATS)
def test_a_logger_name_cannot_forge_a_line(out: io.StringIO, format: str) -> None:
    logs.configure(format=format, stream=out)
    logging.getLogger("shop\nfairlane").info("hello")

    assert len(out.getvalue().splitlines()) == 1


def test_an_exception_in_text_is_indented_line_by_line(out: io.StringIO) -> None:
    logs.configure(stream=out)
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("it broke")

    first, *others = out.getvalue().removesuffix("\n").split("\n")
    assert first.endswith("ERROR   worker.fetcher: it broke")
    assert others[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert any("ValueError: x" in line for line in others)


def test_json_has_one_object_a_line_with_the_same_fields(out: io.StringIO) -> None:
    logs.configure(level="debug", format="json", stream=out)
    log.debug("claimed %d", 3, extra={"queue": "images", "counts": {"high": [1, 2]}})
    log.error("lost")

    first, second = objects(out)
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {
        "level": "debug",
        "logger": "fairlane.worker.fetcher",
        "message": "claimed 3",
        "queue": "images",
        "counts": {"high": [1, 2]},
    }
    assert second.keys() == {"time", "level", "logger", "message"}


def test_json_has_the_exception_as_text(out: io.StringIO) -> None:
    logs.configure(format="json", stream=out)
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        log.exception("it broke", stack_info=True)

    [written] = objects(out)
    assert written["exception"].startswith("Traceback")
    assert "ValueError: bad\nvalue" in written["exception"]
    assert "Stack (most recent call last)" in written["exception"]


def test_no_extra_can_lose_a_record_or_replace_its_fields(out: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(format="json", stream=out)
    endless: list[object] = []
    endless.append(endless)
    odd = {"level": "calm", "nan": float("nan"), "what": Unprintable(), "keys": {1: {2}}, "endless": endless}
    log.info("hello", extra=odd)

    [written] = objects(out)
    assert written["level"] == "info"
    assert written["nan"] == "nan"
    assert written["what"] == "a Unprintable that cannot be formatted"
    assert written["keys"] == {"1": [2]}
    assert capsys.readouterr().err == ""


async def test_a_record_of_a_running_job_names_it(out: io.StringIO, job: running_job.RunningJob) -> None:
    logs.configure(format="json", stream=out)
    log.info("outside")
    write_inside(job, "inside")

    outside, inside = objects(out)
    assert "job" not in outside
    assert (inside["job"], inside["task"], inside["attempt"]) == ("job-1", "render", 2)
    assert "hunter2" not in out.getvalue()


async def test_text_shows_the_running_job_behind_the_message(out: io.StringIO, job: running_job.RunningJob) -> None:
    logs.configure(stream=out)
    write_inside(job, "half done")

    assert out.getvalue().endswith("WARNING worker.fetcher: half done [render job-1 attempt 2]\n")


async def test_fields_that_the_record_already_has_take_precedence(
    out: io.StringIO, job: running_job.RunningJob
) -> None:
    logs.configure(format="json", stream=out)
    write_inside(job, "inside", task="another")

    [written] = objects(out)
    assert (written["job"], written["task"]) == ("job-1", "another")


def test_a_record_below_the_level_is_not_written(out: io.StringIO) -> None:
    logs.configure(level="WARNING", stream=out)
    log.info("quiet")
    log.warning("loud")

    assert "quiet" not in out.getvalue()
    assert "loud" in out.getvalue()


def test_configuring_again_replaces_its_own_handler_and_no_other(out: io.StringIO) -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    before = io.StringIO()
    logs.configure(stream=before)
    logs.configure(stream=out)
    log.info("hello")

    assert before.getvalue() == ""
    assert out.getvalue().count("hello") == 1
    assert other in logging.getLogger().handlers


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    log.info("hello")

    captured = capsys.readouterr()
    assert "hello" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("field", "level", "format"), [("level", "loud", "text"), ("format", "info", "xml")])
def test_an_unknown_choice_is_refused_by_name_and_changes_nothing(field: str, level: str, format: str) -> None:
    handlers = list(logging.getLogger().handlers)
    with pytest.raises(InvalidInput) as refused:
        logs.configure(level, format)

    assert refused.value.field == field
    assert logging.getLogger().handlers == handlers


def test_importing_the_library_adds_no_handler() -> None:
    code = (
        "import fairlane, fairlane.store.instrumented, fairlane.runtime.logs, logging;"
        "print(logging.root.handlers, logging.getLogger('fairlane').handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[] []"


# -- beside the application's own logging ----------------------------------------------------------------------------


def with_console() -> dict[str, Any]:
    """A configuration as in Django's `LOGGING`, which disables existing loggers by default."""
    handler = {"class": "logging.StreamHandler", "formatter": "theirs", "stream": "ext://sys.stderr"}
    return {
        "version": 1,
        "formatters": {"theirs": {"format": "theirs: %(message)s"}},
        "handlers": {"console": handler},
        "root": {"level": "WARNING", "handlers": ["console"]},
    }


def test_a_console_of_the_application_is_kept_and_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    logging.config.dictConfig(with_console())
    logs.configure()
    log.info("ready")
    logging.getLogger("shop").info("below its level")
    assert capsys.readouterr().err == "theirs: ready\n"
    assert logs.configured() == ("info", None)
    logs.configure("error")
    log.info("below the level that was asked for")
    assert capsys.readouterr().err == ""


def test_a_format_that_is_given_replaces_the_console_of_the_application(capsys: pytest.CaptureFixture[str]) -> None:
    logging.config.dictConfig(with_console())
    logs.configure(format="json")
    log.info("ready")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "ready"


def test_handlers_that_do_not_write_to_the_console_stay(out: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().addHandler(logging.StreamHandler(out))
    logs.configure()
    log.info("ready")
    assert out.getvalue() == "ready\n"
    assert capsys.readouterr().err.endswith("worker.fetcher: ready\n")


def test_loggers_that_the_application_has_disabled_are_enabled(capsys: pytest.CaptureFixture[str]) -> None:
    logging.config.dictConfig(with_console())
    assert log.disabled
    logs.configure()
    assert not log.disabled
