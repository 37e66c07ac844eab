"""What a herd costs: many idle workers and one job, and many producers of one queue.

``python -m benchmarks.postgresql_herd [--workers 50] [--rounds 2] [--against OTHER/src]`` counts calls, transactions
and NOTIFYs on the server. Counts hardly depend on the machine. With ``--against`` the same is measured with another
version of the package, alternating, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from fairlane import Fairlane
from fairlane.store import open_store

from .contest import Options
from .postgresql import started
from .postgresql_server import Server, connected
from .workload import Run, job

URL = "FAIRLANE_URL"
CALLS = r"""
SELECT regexp_replace(funcname, '_[^_]+$', ''), sum(calls)::int FROM pg_stat_user_functions
WHERE funcname ~ '^(lead|claim_one|exchange|admit_queues)_[^_]+$' GROUP BY 1
"""
COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
STARTS = (
    "SELECT o.started_at - j.enqueued_at FROM fairlane.outcome o JOIN fairlane.job j ON j.seq = o.seq ORDER BY j.seq"
)
SETTLE = 2.5
"""Seconds until idle connections have reported what they counted."""
app = Fairlane()


@app.task(name="bench", queue="bench")
async def bench(text: str = "") -> None:
    """Do nothing."""


async def produce(url: str, jobs: int) -> None:
    """Send single jobs one after the other, from the line that says so."""
    store = await open_store(url)
    await store.enqueue([job("user:0")])
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for number in range(jobs):
        await store.enqueue([job(f"user:{number % 100}")])
    print(time.monotonic(), flush=True)
    await asyncio.sleep(0.1)
    await store.close()


@contextmanager
def _environment(source: Path, url: str) -> Iterator[Mapping[str, str]]:
    yield {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{Path(__file__).parents[1]}", URL: url}


async def _process(environment: Mapping[str, str], *arguments: str) -> Process:
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    command = (sys.executable, *arguments)
    return await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe, stderr=nothing)


@asynccontextmanager
async def _processes(count: int, environment: Mapping[str, str], *arguments: str) -> AsyncIterator[list[Any]]:
    made = [await _process(environment, *arguments) for _ in range(count)]
    try:
        yield made
    finally:
        for process in made:
            if process.returncode is None:
                process.terminate()
        for process in made:
            await process.wait()


class Counter:
    """What the server has counted since it was made."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._before: dict[str, float] = {}
        self.notified = 0

    async def begin(self) -> None:
        """Begin to count, once everything so far has been reported."""
        await asyncio.sleep(SETTLE)
        self._before = await self._read()
        self.notified = 0
        self._began = time.monotonic()

    async def end(self) -> dict[str, float]:
        """What was counted, by name, with the seconds it took."""
        seconds = time.monotonic() - self._began
        await asyncio.sleep(SETTLE)
        now = await self._read()
        found = {name: now[name] - self._before.get(name, 0.0) for name in now}
        return found | {"seconds": seconds, "all seconds": seconds + SETTLE, "notified": self.notified}

    async def _read(self) -> dict[str, float]:
        await self._connection.execute("SELECT pg_stat_clear_snapshot()")
        found = {name: float(calls) for name, calls in await self._connection.fetch(CALLS)}
        return found | {"commits": float(await self._connection.fetchval(COMMITS))}

    def receive(self, connection: object, pid: int, channel: str, payload: str) -> None:
        """Count one NOTIFY of a queue."""
        self.notified += payload.startswith("queue:")


async def herd(server: Server, source: Path, workers: int, jobs: int) -> dict[str, float]:
    """Idle workers, then one job every 100 ms."""
    url = await server.database("herd")
    await server.execute(f'ALTER DATABASE "{url.rsplit("/", 1)[1]}" SET track_functions = pl')
    command = ["-m", "fairlane", "worker", "-A", "benchmarks.postgresql_herd:app", "-Q", "bench", "-c", "10"]
    found: dict[str, float] = {}
    with _environment(source, url) as environment:
        async with _processes(1, environment, "-m", "benchmarks.postgresql_herd", "--produce", "0") as [first]:
            await first.stdout.readline()
        async with connected(url) as connection, _processes(workers, environment, *command):
            live = "SELECT count(*) FROM fairlane.session WHERE state = 'live'"
            while await connection.fetchval(live) < workers:  # noqa: ASYNC110 - other processes write this
                await asyncio.sleep(0.2)
            await asyncio.sleep(12)
            counter = Counter(connection)
            await counter.begin()
            await asyncio.sleep(20)
            idle = await counter.end()
            found["idle statements/s"] = idle["commits"] / idle["all seconds"]
            found["idle lead/s"] = idle.get("lead", 0.0) / idle["all seconds"]
            async with _processes(1, environment, "-m", "benchmarks.postgresql_herd", "--pace", str(jobs)) as [sender]:
                await sender.stdout.readline()
                await counter.begin()
                spent = server.processor()
                sender.stdin.write(b"go\n")
                await sender.wait()
                spent = server.processor() - spent
                busy = await counter.end()
            per = {name: busy.get(name, 0.0) / jobs for name in ("claim_one", "exchange")}
            found["claim_one/job"] = per["claim_one"]
            found["exchange/job, polls included"] = per["exchange"]
            found["server ms/job"] = spent / jobs * 1e3
            waits = [row[0] * 1e3 for row in await connection.fetch(STARTS)][-jobs:]
            found["start p50 ms"], found["start p99 ms"] = median(waits), quantiles(waits, n=100)[98]
    await server.drop(url)
    return found


async def pace(url: str, jobs: int) -> None:
    """Send a job every 100 ms."""
    store = await open_store(url)
    await store.enqueue([job()])
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for _ in range(jobs):
        await store.enqueue([job()])
        await asyncio.sleep(0.1)
    await store.close()


async def crowd(server: Server, source: Path, producers: int, jobs: int, workers: int) -> dict[str, float]:
    """Producers that send single jobs to one queue at the same time."""
    url = await server.database("crowd")
    await server.execute(f'ALTER DATABASE "{url.rsplit("/", 1)[1]}" SET track_functions = pl')
    command = ["-m", "fairlane", "worker", "-A", "benchmarks.postgresql_herd:app", "-Q", "bench", "-c", "10"]
    with _environment(source, url) as environment:
        async with (
            connected(url) as connection,
            _processes(producers, environment, "-m", "benchmarks.postgresql_herd", "--produce", str(jobs)) as senders,
            _processes(workers, environment, *command),
        ):
            for sender in senders:
                await sender.stdout.readline()
            await asyncio.sleep(5 if workers else 0)
            counter = Counter(connection)
            await connection.add_listener("fairlane.topics.fairlane", counter.receive)
            await counter.begin()
            begun = time.monotonic()
            for sender in senders:
                sender.stdin.write(b"go\n")
            took = max([float(await sender.stdout.readline()) for sender in senders]) - begun
            for sender in senders:
                await sender.wait()
            seen = await counter.end()
    await server.drop(url)
    sent = producers * jobs
    return {
        "jobs/s": sent / took,
        "NOTIFY/job": seen["notified"] / sent,
        "admit calls/job": seen.get("admit_queues", 0.0) / sent,
        "transactions/job": seen["commits"] / sent,
    }


async def compare(options: argparse.Namespace) -> None:
    """Measure each version in turn, and print the medians side by side."""
    sources = {"this": Path(__file__).parents[1] / "src"} | ({"other": options.against} if options.against else {})
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="fairlane-bench-") as directory,
        started(Run(Path(directory)), Options(server=options.server)) as server,
    ):
        await server.execute("ALTER SYSTEM SET max_connections = 500")
        server.stop()
        server.restart()
        for _ in range(options.rounds):
            for name, source in sources.items():
                cases: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
                    f"{options.workers} idle workers": partial(herd, server, source, options.workers, options.jobs),
                    "16 producers": partial(crowd, server, source, 16, options.jobs, 0),
                    "16 producers, 4 workers": partial(crowd, server, source, 16, options.jobs, 4),
                }
                for case, measure in cases.items():
                    if options.only not in case:
                        continue
                    for figure, value in (await measure()).items():
                        found.setdefault((case, figure), {}).setdefault(name, []).append(value)
    for (case, figure), values in found.items():
        print(f"{case:28}{figure:32}" + "".join(f"{name} {median(all_):10.2f}   " for name, all_ in values.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.postgresql_herd", description=__doc__)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--server", default="wheel")
    parser.add_argument("--only", default="", help="only the cases whose name contains this")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--produce", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.produce is not None:
        asyncio.run(produce(os.environ[URL], given.produce))
    elif given.pace is not None:
        asyncio.run(pace(os.environ[URL], given.pace))
    else:
        asyncio.run(compare(given))
