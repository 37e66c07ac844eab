"""How log records look: as text for people, as JSON for machines. The library itself only ever writes to loggers named
``fairlane.…`` and adds no handler; `configure` is for programs that own their process, such as the command line.

Job, task and lane names come from outside, so nothing in a record can begin a new line or move the cursor: in text
what is not printable is escaped, and every line of a traceback is indented.
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
    """Lets every record pass, and adds ``job``, ``task`` and ``attempt`` to those written by the body of a job."""

    def filter(self, record: logging.LogRecord) -> bool:
        from .running_job import current_job_or_none

        job = current_job_or_none()
        if job is not None:
            # What the writer of the record said itself counts more.
            for field, value in zip(_JOB_FIELDS, (job.id, job.task, job.attempt), strict=True):
                record.__dict__.setdefault(field, value)
        return True


class TextFormatter(logging.Formatter):
    """One line for a record: time in UTC, level, logger, message, and the job it is about."""

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
    """One JSON object on one line for a record; what was given as `extra` stands beside the fields of its own."""

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
        # ASCII alone: lone surrogates and line separators cannot break the stream or whoever reads it.
        return json.dumps(fields, ensure_ascii=True, allow_nan=False)


class _Handler(logging.StreamHandler[TextIO]):
    """Known by its class, so that configuring again replaces it and leaves the handlers of others alone."""

    configured = ("info", "text")


def configure(level: str = "info", format: str = "text", stream: TextIO | None = None) -> None:
    """Write the records of this process to `stream`, standard error unless given. Calling it again replaces that."""
    if level.lower() not in LEVELS:
        raise InvalidInput("level", f"{level!r} is none of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise InvalidInput("format", f"{format!r} is none of {', '.join(FORMATS)}")
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    # On the handler, not on a logger: the filters of a logger do not see the records of those below it.
    handler.addFilter(JobLogFilter())
    handler.configured = (level, format)
    root = logging.getLogger()
    for other in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())


def configured() -> tuple[str, str] | None:
    """The level and the format that this process was configured with, None when it was not."""
    return next((h.configured for h in logging.getLogger().handlers if isinstance(h, _Handler)), None)


def escaped(text: str) -> str:
    """The text with everything that is not printable written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback and the stack of a record, as far as it has them."""
    parts = []
    if record.exc_text:
        # The writer of the record gave the text, or another handler has dropped the exception and kept it.
        parts.append(_bounded(record.exc_text))
    elif record.exc_info:
        parts.append(_bounded(formatter.formatException(record.exc_info)))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _bounded(text: str) -> str:
    """A traceback of bounded size: how it begins and, more of it, how it ends, where the message is."""
    if len(text) <= LONGEST_TRACEBACK:
        return text
    head, tail = LONGEST_TRACEBACK // 4, LONGEST_TRACEBACK * 3 // 4
    return f"{text[:head]}\n… {len(text) - head - tail} characters left out …\n{text[-tail:]}"


def _plain(value: object, depth: int = 0) -> object:
    """The value as JSON can hold it; a record is never lost because of what was attached to it."""
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
        return f"a {type(value).__name__} that cannot be shown"
