"""Validation of names, keys and numbers. Every check raises `InvalidInput` naming the field.

Names (queues, tasks, pools) appear in key names, file names and metric labels, so their alphabet is small.
Keys (lanes, sticky keys, unique values, ids) contain the user's own text, so they are any printable text of
bounded size.
"""

from __future__ import annotations

import math
import re
from datetime import datetime
from functools import lru_cache
from typing import Any

from ..errors import InvalidInput

NAME_LENGTH = 128
NAME_PATTERN = re.compile(rf"[A-Za-z0-9_.:-]{{1,{NAME_LENGTH}}}")
KEY_BYTES = 200
LONGEST_SECONDS = 10 * 365 * 86_400.0
"""Ten years: a longer duration is a mistake in the unit."""
LOWEST_FACTOR, HIGHEST_FACTOR = 0.01, 100.0
"""The range of cost and weight. It bounds how far one job can push its lane behind the others."""
PAYLOAD_BYTES = 256 * 1024
RESULT_BYTES = 256 * 1024
ERROR_BYTES = 16 * 1024


def plural(count: int, noun: str) -> str:
    """``1 job``, ``2,000 jobs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown(value: object) -> str:
    """The value as an error may show it: strings escaped and shortened, of other values only the type."""
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    return repr(value) if len(value) <= 60 else f"{value[:57]!r}…"


def check_name(field: str, value: str) -> str:
    """Check a queue, task, pool or schedule name: 1 to 128 letters, digits and ``_ . : -``."""
    if not isinstance(value, str):
        raise InvalidInput(field, f"must be text, not {type(value).__name__}")
    # Check the length first, so that the cache never holds a long text.
    if len(value) > NAME_LENGTH or not _is_name(value):
        raise InvalidInput(
            field,
            f"{shown(value)} must consist of 1 to 128 letters, digits and '_', '.', ':', '-'",
        )
    return value


def check_key(field: str, value: str) -> str:
    """Check a lane, sticky key, unique value or id: printable text of 1 to 200 bytes."""
    if not isinstance(value, str):
        raise InvalidInput(field, f"must be text, not {type(value).__name__}")
    if not value:
        raise InvalidInput(field, "must not be empty")
    # str.isprintable is False for control characters, NUL, line breaks and lone surrogates alike.
    if not value.isprintable():
        raise InvalidInput(field, f"{shown(value)} contains a non-printable character")
    if len(value) * 4 > KEY_BYTES and len(value.encode()) > KEY_BYTES:
        raise InvalidInput(field, f"{shown(value)} is longer than {KEY_BYTES} bytes")
    return value


def check_seconds(field: str, value: float, *, least: float = 0.0) -> float:
    """Check a duration in seconds: finite, at least `least`, at most ten years."""
    number = _check_number(field, value)
    if number < least:
        raise InvalidInput(field, f"{number:g} s is less than {least:g} s")
    if number > LONGEST_SECONDS:
        raise InvalidInput(field, f"{number:g} s is more than ten years; durations are in seconds")
    return number


def check_instant(field: str, value: float) -> float:
    """Check a time given as seconds since 1970 (UTC)."""
    number = _check_number(field, value)
    if not 0 <= number <= 1e11:
        raise InvalidInput(field, f"{number:g} is not a time; give seconds since 1970, not milliseconds")
    return number


def instant(field: str, value: Any) -> Any:
    """Convert a moment to seconds since 1970; other values are left as they are, to be validated with the job."""
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise InvalidInput(field, "has no time zone; use an aware datetime such as datetime.now(UTC) + …")
    return value.timestamp()


def check_factor(field: str, value: float) -> float:
    """Check a cost or weight: 0.01 to 100."""
    number = _check_number(field, value)
    if not LOWEST_FACTOR <= number <= HIGHEST_FACTOR:
        raise InvalidInput(field, f"must be between {LOWEST_FACTOR:g} and {HIGHEST_FACTOR:g}, not {number:g}")
    return number


def check_count(field: str, value: int, *, least: int, most: int = 2**31 - 1) -> int:
    """Check a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(field, f"must be a whole number, not {type(value).__name__}")
    if not least <= value <= most:
        # Python refuses to format a number of thousands of digits.
        written = value if value.bit_length() <= 64 else "a number that large"
        raise InvalidInput(field, f"must be between {least} and {most}, not {written}")
    return value


def check_size(field: str, value: bytes, most: int) -> bytes:
    """Check encoded data of at most `most` bytes."""
    if not isinstance(value, bytes):
        raise InvalidInput(field, f"must be bytes, not {type(value).__name__}")
    if len(value) > most:
        raise InvalidInput(
            field,
            f"{len(value)} bytes exceed the limit of {most}; store the data elsewhere and pass a reference",
        )
    return value


@lru_cache(maxsize=4096)
def _is_name(value: str) -> bool:
    return NAME_PATTERN.fullmatch(value) is not None


def _check_number(field: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(field, f"must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidInput(field, f"{number} is not a finite number")
    return number
