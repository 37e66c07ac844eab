"""Fairlane and other queues for Python on one PostgreSQL server, beside the bare loop in the same run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .contest import Options, hold
from .figures import Figure
from .postgresql_server import Server, binaries
from .workload import Run


@contextmanager
def started(run: Run, options: Options) -> Iterator[Server]:
    """A server of the benchmark's own."""
    server = Server(binaries(options.server), run.directory)
    server.start()
    print(f"PostgreSQL {server.version} with its default settings (fsync on)", file=sys.stderr, flush=True)
    try:
        yield server
    finally:
        server.stop()


async def run(run: Run, options: Options) -> list[Figure]:
    """The contest on PostgreSQL."""
    with started(run, options) as server:
        return list((await hold("postgresql", server, options, quick=run.quick)).figures())
