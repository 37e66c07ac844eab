"""What bodies did, told by themselves: one line for each event in an append-only file that no store knows of.

Times are readings of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import msgspec

BEGIN, END = "begin", "end"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event of one body. Whatever is not the beginning ends it: end, raised or cancelled."""

    job: str
    task: str
    event: str
    attempt: int
    fence: int
    pid: int
    worker: str
    at: int
    """Nanoseconds."""
    priority: str = ""
    lane: str | None = None
    sticky: str | None = None


def append(path: Path, entry: Entry) -> None:
    """Write one line by one call, so that lines of several processes never mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, msgspec.json.encode(entry) + b"\n")
    finally:
        os.close(file)


class Ledger:
    """Reads the file and answers the questions of the scenarios."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Entry]:
        """All entries, by time."""
        if not self.path.exists():
            return []
        # The text after the last line end is still being written.
        lines = self.path.read_bytes().split(b"\n")[:-1]
        return sorted((msgspec.json.decode(line, type=Entry) for line in lines), key=lambda entry: entry.at)

    def of(self, job: str, event: str | None = None) -> list[Entry]:
        """The events of one job."""
        return [e for e in self.entries() if e.job == job and event in (None, e.event)]

    def begins(self, jobs: Iterable[str] | None = None) -> list[Entry]:
        """Every start of the given jobs, or of all, in order of time."""
        wanted = None if jobs is None else set(jobs)
        return [e for e in self.entries() if e.event == BEGIN and (wanted is None or e.job in wanted)]

    def starts(self) -> Counter[str]:
        """How often each job was started."""
        return Counter(entry.job for entry in self.begins())

    def most_at_once(self, which: Callable[[Entry], bool] = lambda _: True) -> int:
        """The largest number of bodies that ran at the same instant."""
        return most_at_once(entry for entry in self.entries() if which(entry))

    def gaps(self, jobs: Iterable[str]) -> list[float]:
        """Seconds from the end of each of these jobs to the begin of the one after it."""
        wanted = set(jobs)
        mine = [e for e in self.entries() if e.job in wanted]
        return [
            (after.at - before.at) / 1e9
            for before, after in pairwise(mine)
            if before.event == END and after.event == BEGIN
        ]


def most_at_once(entries: Iterable[Entry]) -> int:
    """The largest number of bodies that ran at the same time, by these entries."""
    running: set[tuple[str, int]] = set()
    most = 0
    for entry in entries:
        if entry.event == BEGIN:
            running.add((entry.job, entry.fence))
        else:
            running.discard((entry.job, entry.fence))
        most = max(most, len(running))
    return most


def now() -> int:
    """The current time, as entries have it."""
    return time.monotonic_ns()
