"""Lets tests that measure time run alone: they would fail if other tests used the processors meanwhile.

Tests run in several processes. One that is marked `alone` waits until no other runs, and keeps others from starting
meanwhile. Tests start through a gate one by one, so that one that waits to be alone is not overtaken for ever.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def entered(folder: Path, *, alone: bool) -> Iterator[None]:
    """Run beside other tests or alone. `folder` is shared by all processes of a run."""
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
