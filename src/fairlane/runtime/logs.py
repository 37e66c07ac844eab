"""Log formatters, for text and for JSON. The library itself only writes to loggers named ``fairlane.…`` and adds no
handler; `configure` is for programs that own their process, such as the command line.

Names of jobs, tasks and lanes come from outside, so a record must not be able to begin a new line or move the cursor:
in text, characters that are not printable are escaped, and every line of a traceback is indented.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from ..errors import InvalidInput

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")
DEEPEST = 5
LONGEST_TRACEBACK = 16 * 1024

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_JOB_FIELDS = ("job", "task", "attempt")


class JobLogFilter(logging.Filter):
    """Adds ``job``, ``task`` and ``attempt`` to records that a job writes. Filters nothing out."""

    def filter(self, record: logging.LogRecord) -> bool:
        from .running_job import current_job_or_none

        job = current_job_or_none()
        if job is not None:
            # Fields that the record already has take precedence.
            for field, value in zip(_JOB_FIELDS, (job.id, job.task, job.attempt), strict=True):
                record.__dict__.setdefault(field, value)
        return True


class TextFormatter(logging.Formatter):
    """One line per record: time in UTC, level, logger, message, and the job."""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("fairlane.")
        line = escaped(f"{_time(record)} {record.levelname:<7} {name}: {record.getMessage()}")
        job, task, attempt = (record.__dict__.get(field) for field in _JOB_FIELDS)
        if None not in (job, task, attempt) and not record.getMessage().startswith(f"{task} {job}"):
            line += escaped(f" [{task} {job} attempt {attempt}]")
        if exception := _exception(self, record):
            line += "".join(f"\n    {escaped(each)}" for each in exception.splitlines())
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per record, on one line, including the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if exception := _exception(self, record):
            fields["exception"] = exception
        for name, value in vars(record).items():
            if name not in _OWN_FIELDS:
                fields.setdefault(name, _plain(value))
        # ASCII only: lone surrogates and line separators cannot break the stream or its reader.
        return json.dumps(fields, ensure_ascii=True, allow_nan=False)


class _Own(logging.Handler):
    """A class of its own, so that `configure` replaces its handlers and leaves others alone."""

    configured: tuple[str, str | None]


class _Writer(_Own, logging.StreamHandler[TextIO]):
    """Writes records."""


class _Silent(_Own, logging.NullHandler):
    """Stands for a console that the application writes to by itself."""


def configure(level: str = "info", format: str | None = None, stream: TextIO | None = None) -> None:
    """Write the records of this process to `stream`, by default standard error. Another call replaces the handler.

    An application whose root logger writes to the console keeps its handlers there, with their format and level, unless
    a format is given: then they are replaced, so that no record is written twice.
    """
    if level.lower() not in LEVELS:
        raise InvalidInput("level", f"{level!r} is none of {', '.join(LEVELS)}")
    if format is not None and format not in FORMATS:
        raise InvalidInput("format", f"{format!r} is none of {', '.join(FORMATS)}")
    root, own = logging.getLogger(), logging.getLogger("fairlane")
    theirs = [h for h in root.handlers if _writes_to_console(h)] if stream is None else []
    handler: _Own
    if theirs and format is None:
        handler = _Silent()
        own.setLevel(level.upper())
    else:
        handler = _Writer(stream or sys.stderr)
        handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
        # On the handler, not on a logger: a logger's filters do not see the records of its descendants.
        handler.addFilter(JobLogFilter())
        own.setLevel(logging.NOTSET)
        root.setLevel(level.upper())
        for each in theirs:
            root.removeHandler(each)
    handler.configured = (level, format)
    for each in [h for h in root.handlers if isinstance(h, _Own)]:
        root.removeHandler(each)
    root.addHandler(handler)
    # `logging.config`, and so Django, disables the loggers that exist when it is called.
    for name, logger in root.manager.loggerDict.items():
        if name.startswith("fairlane") and isinstance(logger, logging.Logger):
            logger.disabled = False


def configured() -> tuple[str, str | None] | None:
    """The level and the format given to `configure` in this process, None if it was not called."""
    return next((h.configured for h in logging.getLogger().handlers if isinstance(h, _Own)), None)


def _writes_to_console(handler: logging.Handler) -> bool:
    return (
        isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, _Own)
        and handler.stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    )


def escaped(text: str) -> str:
    """The text with every character that is not printable escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback and the stack of a record, if it has them."""
    parts = []
    if record.exc_text:
        # Set by the code that made the record, or by another handler that kept only the text.
        parts.append(_bounded(record.exc_text))
    elif record.exc_info:
        parts.append(_bounded(formatter.formatException(record.exc_info)))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _bounded(text: str) -> str:
    """A traceback of bounded size: some of its beginning and more of its end, where the message is."""
    if len(text) <= LONGEST_TRACEBACK:
        return text
    head, tail = LONGEST_TRACEBACK // 4, LONGEST_TRACEBACK * 3 // 4
    return f"{text[:head]}\n… {len(text) - head - tail} characters left out …\n{text[-tail:]}"


def _plain(value: object, depth: int = 0) -> object:
    """The value in a form that JSON can encode, so that no record is lost because of its fields."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < DEEPEST:
        if isinstance(value, Mapping):
            return {str(key): _plain(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(each, depth + 1) for each in value]
    try:
        return str(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be formatted"
