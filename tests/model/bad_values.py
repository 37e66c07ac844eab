"""Values that callers send by mistake or on purpose, by kind. Every check must refuse its kind, naming the field."""

from typing import Any

import pytest
from hypothesis import strategies as st

from fairlane.errors import InvalidInput

NAN = float("nan")
INFINITY = float("inf")

NOT_TEXT: list[Any] = [None, 5, b"name", ["name"], {"name": 1}]
NOT_NAMES: list[Any] = [
    *NOT_TEXT,
    "",
    "x" * 129,
    "x" * 300,
    "two words",
    "tab\t",
    "line\n",
    "nul\0",
    "escape\x1b",
    "slash/",
    "star*",
    "umlaut-ä",
    "full-width-ａ",
    "\ud800",
]
NOT_KEYS: list[Any] = [
    *NOT_TEXT,
    "",
    "x" * 201,
    "x" * 300,
    "ä" * 101,
    "😀" * 51,
    "tab\t",
    "line\n",
    "nul\0",
    "escape\x1b",
    "del\x7f",
    "c1\x9b",
    "line separator\u2028",
    "right-to-left override\u202e",
    "lone high\ud800",
    "lone low\udfff",
]
NOT_NUMBERS: list[Any] = [None, "1", b"1", True, [1], 1j, NAN, INFINITY, -INFINITY, 10**400, -(10**400)]
NOT_WHOLE: list[Any] = [*NOT_NUMBERS, 1.0, 1.5, 10**5000, -(10**5000)]
NOT_DURATIONS: list[Any] = [*NOT_NUMBERS, -1, -0.001, 10 * 365 * 86_400 + 1]
NOT_INSTANTS: list[Any] = [*NOT_NUMBERS, -1, 1_700_000_000_000]
NOT_FACTORS: list[Any] = [*NOT_NUMBERS, 0, -1, 0.009, 100.1]
NOT_JSON: list[Any] = [
    None,
    "[]",
    bytearray(b"[]"),
    [[], {}],
    b"",
    b"{",
    b"[1,]",
    b"[] []",
    b"NaN",
    b"[Infinity]",
    b"[01]",
    b"{1: 2}",
    b"'single'",
    b'"control \x01"',
    b'"no such escape \\q"',
    b'"lone surrogate \\ud800"',
    b'"not UTF-8 \xff"',
    b'"surrogate in UTF-8 \xed\xa0\x80"',
    b"\xef\xbb\xbf[]",
    b"[" * 100_000 + b"]" * 100_000,
]

names = st.from_regex(r"[A-Za-z0-9_.:-]{1,128}", fullmatch=True)
printable = st.characters().filter(str.isprintable)
keys = st.text(printable, min_size=1, max_size=200).filter(lambda text: len(text.encode()) <= 200)


def refused_field(call: Any, *args: Any, **kwargs: Any) -> str:
    """Call, expect a rejection, and return the field that it names. The message must be fit for a log."""
    with pytest.raises(InvalidInput) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"{caught.value.field}: ")
    assert len(caught.value.problem) > 5
    assert len(message) < 1_000, "a message must stay short, however long the value"
    message.encode()
    return caught.value.field


def short(value: object) -> str:
    """Name a value in a test id; the long ones by their size."""
    text = ascii(value) if not isinstance(value, int) or value.bit_length() < 64 else "huge number"
    return text if len(text) <= 24 else f"{text[:20]}...({len(text)})"
