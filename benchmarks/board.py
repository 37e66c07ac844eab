"""What the bodies of jobs write down: memory that all processes of one measurement share.

A body writes the moment it starts under the number of its job, so that the process that measures needs no word from
the worker, and knows of every job whether it ran, and whether it ran twice. Moments are of the system's monotonic
clock, which is the same in all processes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

BOARD = "FAIRLANE_BENCH_BOARD"
WORKER = "FAIRLANE_BENCH_WORKER"
WORKERS = 8
"""How many processes that run bodies there is room for."""
APART = 2
"""How many workers are started at most: the processes of one worker have places this far apart."""
HEADER = 8 * (1 + 2 * WORKERS)


class Board:
    """One measurement's memory; for a worker process also its place in it."""

    def __init__(self, path: Path, worker: int = 0) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.jobs = (len(self._memory) - HEADER) // 9
        whole = memoryview(self._memory)
        self._head = whole[:HEADER].cast("d")
        self._starts = whole[HEADER : HEADER + 8 * self.jobs].cast("d")
        self._runs = whole[HEADER + 8 * self.jobs :]
        self._ready = 1 + 2 * worker
        self._ran = self._ready + 1

    @classmethod
    def make(cls, jobs: int) -> Board:
        """An empty board with room for jobs 0 to `jobs` - 1."""
        # In memory where possible: a page of a file may be locked while it is on its way to the disk.
        shared = Path("/dev/shm")
        handle, name = tempfile.mkstemp(prefix="fairlane-bench-", dir=shared if shared.is_dir() else None)
        os.ftruncate(handle, HEADER + 9 * jobs)
        os.close(handle)
        return cls(Path(name))

    @classmethod
    def mine(cls, part: int = 0) -> Board:
        """The board that this worker was started with; `part` tells its processes apart if several run bodies."""
        return cls(Path(os.environ[BOARD]), int(os.environ[WORKER]) + part * APART)

    def environment(self, worker: int) -> dict[str, str]:
        """What a worker process needs to find its place."""
        return {BOARD: str(self.path), WORKER: str(worker)}

    def close(self) -> None:
        """Nobody needs it any more."""
        self.path.unlink()

    # What a worker process calls.

    def wait(self) -> None:
        """Say that everything is imported, then wait until all may start."""
        self._head[self._ready] = 1.0
        while not self._head[0]:
            time.sleep(0.001)

    def ran(self, number: int) -> None:
        """A body has started. Threads of one process must not call it at the same time."""
        self._starts[number] = time.perf_counter()
        self._runs[number] += 1
        # In the shared memory itself: who forks a process for each job still counts on.
        self._head[self._ran] += 1.0

    # What the measuring process calls.

    def ready(self, workers: int) -> bool:
        """Whether all workers wait for the start."""
        return all(self._head[1 + 2 * worker] for worker in range(workers))

    def go(self) -> None:
        """Let them go."""
        self._head[0] = 1.0

    @property
    def count(self) -> int:
        """How many bodies have started."""
        return int(sum(self._head[2 + 2 * worker] for worker in range(WORKERS)))

    def start(self, number: int) -> float:
        """When a job started; 0 as long as it has not."""
        return self._starts[number]

    def runs(self, number: int) -> int:
        """How often a job has started."""
        return self._runs[number]

    def first(self) -> float:
        """When the first job started."""
        return min(self._starts)

    def check(self, who: str) -> None:
        """Every job must have run, and only once."""
        never = sum(not runs for runs in self._runs)
        again = sum(runs > 1 for runs in self._runs)
        if never or again:
            raise AssertionError(f"{who}: of {self.jobs} jobs {never} never ran, and {again} ran more than once")
