"""How much of an exhaustive test runs: a part by default, all of it with ``FAIRLANE_TEST_FULL=1`` set."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., Any])
VARIABLE = "FAIRLANE_TEST_FULL"
FULL = os.environ.get(VARIABLE, "") not in ("", "0")


def sized(usual: T, full: T) -> T:
    """Return `full` in a full run, else `usual`."""
    return full if FULL else usual


def strict(test: Test) -> Test:
    """Mark a test whose bounds are times: wide ones by default, and figures in a full run, where it runs alone."""
    return pytest.mark.alone(test) if FULL else test
