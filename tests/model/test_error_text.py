"""The one line that names the error of a stored traceback, whatever lines its message has."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fairlane.error_text import error_summary
from fairlane.errors import JobFailed
from fairlane.model import states
from fairlane.model.job import Held, Reason
from fairlane.model.listings import error_line
from fairlane.model.names import ERROR_BYTES

FORGED = "no\n12:00:00 INFO worker stopped"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


class Form(BaseModel):
    a: int
    b: int


def raised(error: Exception, *, cause: Exception | None = None) -> str:
    try:
        raise error from cause
    except Exception as exc:
        return "".join(traceback.format_exception(exc))


def invalid() -> str:
    try:
        Form.model_validate({"b": "x"})
    except ValueError as exc:
        return "".join(traceback.format_exception(exc))
    raise AssertionError


def syntax() -> str:
    try:
        compile("x =", "<sent>", "exec")
    except SyntaxError as exc:
        return "".join(traceback.format_exception(exc))
    raise AssertionError


def noted() -> Exception:
    error = ValueError("no")
    error.add_note("12:00:00 INFO worker stopped")
    return error


def deep(depth: int) -> str:
    frames = "".join(f'  File "/app/work.py", line {line}, in work\n    work({line})\n' for line in range(depth))
    return f"Traceback (most recent call last):\n{frames}ValueError: {FORGED}\n"


TRACEBACKS = [
    (invalid(), "pydantic_core._pydantic_core.ValidationError: 2 validation errors for Form"),
    (raised(ValueError(FORGED)), "ValueError: no"),
    (raised(ValueError("no\r12:00:00 INFO worker stopped")), "ValueError: no"),
    (raised(ValueError()), "ValueError"),
    (raised(ValueError("\n  no such cat\nat all")), "ValueError: no such cat"),
    (raised(KeyError("a")), "KeyError: 'a'"),
    (raised(noted()), "ValueError: no"),
    (raised(ValueError('no\n  File "x.py", line 3, in f\n    f()\nINFO: all is well')), "ValueError: no"),
    (raised(RuntimeError("the child failed:\n" + raised(ValueError("no")))), "RuntimeError: the child failed:"),
    (raised(RuntimeError(FORGED), cause=KeyError("a\nb")), "RuntimeError: no"),
    (raised(RuntimeError("no"), cause=ExceptionGroup("a", [KeyError(1)])), "RuntimeError: no"),
    (syntax(), "SyntaxError: invalid syntax"),
    (raised(ExceptionGroup(FORGED, [ValueError("a\nb"), TypeError()])), "ExceptionGroup: no"),
    (raised(ExceptionGroup("no", [ValueError("a")]), cause=KeyError(1)), "ExceptionGroup: no (1 sub-exception)"),
    ("".join(traceback.format_exception(ExceptionGroup("no", [KeyError()]))), "ExceptionGroup: no (1 sub-exception)"),
    ("".join(traceback.format_exception(ValueError(FORGED))), "ValueError: no"),
    (deep(3) + CONTEXT + "KeyError: 'a'\nb\n", "KeyError: 'a'"),
    ("the child process reported:\n" + deep(1), "ValueError: no"),
    # The beginning is missing.
    (deep(3)[60:], "ValueError: no"),
    (deep(3)[80:], "ValueError: no"),
    ((deep(2) + CAUSE + deep(3))[50:], "ValueError: no"),
]


@pytest.mark.parametrize(("text", "summary"), TRACEBACKS)
def test_the_line_that_names_the_error_is_found(text: str, summary: str) -> None:
    assert error_summary(text) == summary


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (None, None),
        ("", None),
        (" \n\n", None),
        ("boom", "boom"),
        ("  boom \n", "boom"),
        ("the run took longer than 5 s", "the run took longer than 5 s"),
        ("it ended\nwith exit code 3\n\n", "with exit code 3"),
        ("Traceback\n  here\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
    ],
)
def test_other_text_is_summarized_by_its_last_line(text: str | None, summary: str | None) -> None:
    assert error_summary(text) == summary


@pytest.mark.parametrize(
    "text",
    [
        deep(1_000),
        "Traceback (most recent call last):\n"
        + '  File "a.py", line 1, in f\n'
        + "ValueError: no\n"
        + "x\n" * ERROR_BYTES,
        raised(KeyError("a" * ERROR_BYTES)) + CAUSE + deep(3),
        raised(KeyError("a\n" * ERROR_BYTES)) + CAUSE + deep(250),
    ],
)
def test_the_stored_text_of_a_long_error_names_it_too(text: str) -> None:
    kept = states.fail(Held("a-1", 3), Reason.ERROR, text).error
    assert "…" in (kept or "")
    assert error_summary(kept) == "ValueError: no"


def test_the_error_of_a_result_and_of_a_listing_name_it() -> None:
    assert str(JobFailed("a-1", "error", deep(2))) == "job a-1 failed (error): ValueError: no"
    assert error_line(deep(2)) == "ValueError: no"


PIECES = [*CAUSE.split("\n"), *deep(1).split("\n"), "  + Exception Group Traceback (most recent call last):"]
STRANGE = ["  | ", "  | a", "  …", "…", "\r", "\x85", " ", "E: ", "é"]


@given(st.lists(st.sampled_from(PIECES + STRANGE)).map("\n".join))
def test_any_text_has_one_line_of_it_as_its_summary(text: str) -> None:
    summary = error_summary(text)
    assert (summary is None) == (not text.strip())
    if summary is not None:
        assert summary.strip()
        assert len(summary.splitlines()) == 1
