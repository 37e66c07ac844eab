"""Huey's side of the drain: ``python -m benchmarks.drain_huey PATH JOBS full|off``. Prints its pace as JSON.

One worker thread: more of them are slower, because they compete for the file and for the interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time

from huey import SqliteHuey

from .workload import Stopwatch


def main(path: str, jobs: int, synchronous: str) -> None:
    """Load, drain, tell."""
    huey = SqliteHuey("bench", filename=path, fsync=synchronous == "full", results=True)
    done = 0

    @huey.task()  # type: ignore[untyped-decorator]  # huey has no types
    def noop() -> int:
        nonlocal done
        done += 1
        return 1

    for _ in range(jobs):
        noop()
    consumer = huey.create_consumer(workers=1, initial_delay=0.01, periodic=False, check_worker_health=False)
    watch = Stopwatch()
    consumer.start()
    while done < jobs:
        time.sleep(0.005)
    pace = watch.pace(jobs)
    print(json.dumps({"rate": pace.rate, "processor": pace.processor, "done": done}), flush=True)
    # The consumer's threads are not daemons, and what they still do is nobody's business here.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
