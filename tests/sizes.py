"""How much of an exhaustive test runs: a part by default, all of it with ``FAIRLANE_TEST_FULL=1`` set."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "FAIRLANE_TEST_FULL"
FULL = os.environ.get(VARIABLE, "") not in ("", "0")


def sized(usual: T, full: T) -> T:
    """Return `full` in a full run, else `usual`."""
    return full if FULL else usual
