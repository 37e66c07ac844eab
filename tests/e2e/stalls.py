"""When the machine itself stood still: a bare write that is flushed to the disk every 20 ms tells.

A shared machine's disk or processor may not answer for some hundred milliseconds. No queue can commit meanwhile, so
such times are taken out of what a test measures; everything else counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY = 0.02
USUAL = 0.06
"""Seconds within which the next write is done when nothing is wrong."""


class Stalls:
    """The times at which not even a bare write came through, as nanoseconds of the monotonic clock."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def without(self, begin: int, end: int) -> float:
        """The seconds from `begin` to `end`, less those in which the machine stood still."""
        lost = sum(max(0, min(end, to) - max(begin, since)) for since, to in self.found)
        return (end - begin - lost) / 1e9


@contextmanager
def watched(directory: Path) -> Iterator[Stalls]:
    """Watch the disk of a directory inside the block."""
    stalls, over = Stalls(), threading.Event()

    def watch() -> None:
        file = os.open(directory / "probe", os.O_WRONLY | os.O_CREAT)
        last = time.monotonic_ns()
        while not over.wait(EVERY):
            os.pwrite(file, b".", 0)
            os.fsync(file)
            now = time.monotonic_ns()
            if (now - last) / 1e9 > USUAL:
                stalls.found.append((last, now))
            last = now
        os.close(file)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield stalls
    finally:
        over.set()
        watcher.join()
