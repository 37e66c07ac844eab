"""Lets a test have the machine to itself: one that measures time, and fails when others take the processors from it.

Tests run in several processes. Those that are marked `alone` wait until nobody else runs, and let nobody begin
meanwhile. Whoever begins goes through a gate one by one, so that those who want to be alone are not overtaken for ever.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def entered(folder: Path, *, alone: bool) -> Iterator[None]:
    """In the room where tests run, with others or without. `folder`: one that all processes of a run share."""
    with _opened(folder / "gate") as gate, _opened(folder / "room") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)  # which ends its locks
