"""The command: ``python -m benchmarks [names] [--quick] [--json]``. Ends with 1 when a bound is broken."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from . import drain, enqueue, fairness, growth, port
from .figures import Figure, as_json, table
from .workload import Run

BENCHMARKS: dict[str, Callable[[Run], Awaitable[list[Figure]]]] = {
    "port": port.run,
    "drain": drain.run,
    "enqueue": enqueue.run,
    "growth": growth.run,
    "fairness": fairness.run,
}


def main() -> int:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; all when none")
    parser.add_argument("--quick", action="store_true", help="fewer jobs and rounds: minutes become seconds")
    parser.add_argument("--json", action="store_true", help="for programs instead of people")
    parser.add_argument("--directory", type=Path, help="the disk to measure; the temporary directory if not given")
    options = parser.parse_args()
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"{name!r} is none of {', '.join(BENCHMARKS)}")
    figures: list[Figure] = []
    for name in options.names or BENCHMARKS:
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="fairlane-bench-", dir=options.directory) as directory:
            figures += asyncio.run(_run(name, Run(Path(directory), options.quick)))
    print(as_json(figures) if options.json else table(figures))
    return int(any(figure.passed is False for figure in figures))


async def _run(name: str, run: Run) -> list[Figure]:
    return await BENCHMARKS[name](run)


if __name__ == "__main__":
    sys.exit(main())
