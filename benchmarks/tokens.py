"""PostgreSQL alone beside PostgreSQL with tokens in Redis: what idle workers cost, and how soon a job starts.

Workers are real ones, several to a process, each with an application, connections and threads of its own. Calls are
what the server counts for the functions of the store. ``python -m benchmarks.tokens work URL COUNT`` is a process of
workers, ``python -m benchmarks.tokens send URL COUNT JOBS`` one of senders.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median, quantiles
from typing import Any

from fairlane import Fairlane
from fairlane.store import open_store
from fairlane.store.deployment import with_redis

from . import postgresql_server, redis_server
from .contest import Options
from .figures import Bound, Figure, ratio
from .postgresql_server import connected
from .side import module_command
from .workload import QUEUE, Run, job, load

ALONE, TOKENS = "PostgreSQL alone", "with tokens"
PROCESSES = 5
SENDERS = 16
SETTINGS = ("max_connections=500", "track_functions=all")
CALLED = "SELECT regexp_replace(funcname, '_[0-9a-f]{12}$', '') AS name, calls FROM pg_stat_user_functions"
VERBS = ("claim_one", "exchange", "enqueue_one", "enqueue", "renew", "lead", "admit", "promote", "rescue", "prune",
         "admit_queues", "read_claimable")  # fmt: skip
STARTS = """SELECT o.started_at - j.enqueued_at AS waited FROM fairlane.outcome o JOIN fairlane.job j ON j.seq = o.seq
WHERE j.enqueued_at >= $1 ORDER BY waited"""
Calls = Counter[str]


async def run(run: Run, options: Options) -> list[Figure]:
    """Each case on both, one after the other, round by round."""
    postgresql = postgresql_server.Server(postgresql_server.binaries(options.server), run.directory, settings=SETTINGS)
    redis = redis_server.Server(redis_server.program(options.server), run.directory)
    postgresql.start()
    measured: dict[str, dict[str, list[float]]] = {}
    try:
        for turn in range(1 if run.quick else options.rounds):
            for kind in (ALONE, TOKENS):
                # It takes minutes for each of them, so once is enough.
                pin = 0.0 if turn else 10.0 if run.quick else options.pin
                for case, value in (await _measure(postgresql, redis, kind, run, options, pin)).items():
                    measured.setdefault(case, {}).setdefault(kind, []).append(value)
    finally:
        postgresql.stop()
    return [_figure(case, kinds) for case, kinds in measured.items()]


BOUNDS = {
    "calls that only claim, per job, 50 idle workers": ("calls", Bound(limit=1.2, least=False), False),
    "calls of workers, per job, 50 idle workers": ("calls", Bound(limit=2.5, least=False), False),
    "calls per second of 50 idle workers": ("calls/s", Bound(limit=0.3, least=False), True),
    "start p50, 20 idle workers": ("ms", Bound(limit=0.6, least=False), True),
    "start p99, 20 idle workers": ("ms", Bound(limit=0.7, least=False), True),
    "enqueue by 16 senders, 4 workers": ("jobs/s", Bound(limit=1.2), True),
    "drain by 4 workers": ("jobs/s", Bound(limit=0.95), True),
    "drains by 4 workers, with an open transaction": ("jobs/s", Bound(limit=1.0), True),
}
"""The unit of each case, what must hold, and whether that is of the ratio to PostgreSQL alone."""


def _figure(case: str, kinds: dict[str, list[float]]) -> Figure:
    unit, bound, relative = BOUNDS[case]
    return Figure(
        bench="tokens",
        case=f"{case} (alone: {median(kinds[ALONE]):.4g})",
        value=median(kinds[TOKENS]),
        unit=unit,
        ratio=ratio(kinds[TOKENS], kinds[ALONE]) if relative else None,
        against=ALONE if relative else "",
        bound=bound,
    )


async def _measure(
    postgresql: postgresql_server.Server,
    redis: redis_server.Server,
    kind: str,
    run: Run,
    options: Options,
    pin: float,
) -> dict[str, float]:
    database = await postgresql.database("tokens")
    url = with_redis(database, {"redis": await redis.database("tokens")}) if kind == TOKENS else database
    found: dict[str, float] = {}
    try:
        await (await open_store(url)).close()
        async with _workers(url, 50):
            await asyncio.sleep(5)
            seconds = 5 if run.quick else 20
            before = await _calls(database)
            await asyncio.sleep(seconds)
            idle = await _calls(database) - before
            found["calls per second of 50 idle workers"] = sum(idle[name] for name in VERBS) / seconds
            jobs = 30 if run.quick else 200
            before = await _calls(database)
            await _one_at_a_time(url, jobs)
            calls = await _calls(database) - before
            found["calls that only claim, per job, 50 idle workers"] = calls["claim_one"] / jobs
            found["calls of workers, per job, 50 idle workers"] = (calls["claim_one"] + calls["exchange"]) / jobs
        async with _workers(url, 20):
            await asyncio.sleep(5)
            began = await _now(database)
            await _one_at_a_time(url, 30 if run.quick else 300)
            waited = await _starts(database, began)
            found["start p50, 20 idle workers"] = median(waited) * 1000
            found["start p99, 20 idle workers"] = quantiles(waited, n=100)[98] * 1000
        async with _workers(url, 4):
            await asyncio.sleep(3)
            found["enqueue by 16 senders, 4 workers"] = await _sent(url, 50 if run.quick else 250)
            await _all_done(url)
            found["drain by 4 workers"] = await _drained(url, 1_000 if run.quick else options.jobs)
            if pin:
                found["drains by 4 workers, with an open transaction"] = await _pinned(url, database, pin)
    finally:
        await postgresql.drop(database)
        if kind == TOKENS:
            await redis.drop(url)
    return found


@asynccontextmanager
async def _workers(url: str, count: int) -> AsyncIterator[None]:
    each = [count // PROCESSES + (n < count % PROCESSES) for n in range(PROCESSES)]
    processes = [
        await asyncio.create_subprocess_exec(
            *module_command(__name__, "work", url, str(some)), stdout=asyncio.subprocess.PIPE
        )
        for some in each
        if some
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if not await process.stdout.readline():
                raise AssertionError("workers did not start")
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await process.wait()


async def _calls(database: str) -> Calls:
    """Calls of each function so far. Connections report theirs once a second at most."""
    await asyncio.sleep(1.5)
    async with connected(database) as connection:
        found: Calls = Counter()
        for row in await connection.fetch(CALLED):
            found[row["name"]] += row["calls"]
        return found


async def _now(database: str) -> float:
    async with connected(database) as connection:
        return float(await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())"))


async def _starts(database: str, since: float) -> list[float]:
    async with connected(database) as connection:
        return [float(row["waited"]) for row in await connection.fetch(STARTS, since)]


async def _one_at_a_time(url: str, jobs: int) -> None:
    store = await open_store(url)
    for _ in range(jobs):
        await store.enqueue([job()])
        await asyncio.sleep(0.1)
    await store.close()
    await _all_done(url)


async def _all_done(url: str) -> None:
    store = await open_store(url)
    while any(queue.counts.pending or queue.counts.running for queue in await store.queues()):  # noqa: ASYNC110 - other processes
        await asyncio.sleep(0.05)
    await store.close()


async def _drained(url: str, jobs: int) -> float:
    store = await open_store(url)
    began = time.perf_counter()
    await load(store, (job() for _ in range(jobs)))
    await store.close()
    await _all_done(url)
    return jobs / (time.perf_counter() - began)


async def _pinned(url: str, database: str, seconds: float) -> float:
    """Jobs per second of one backlog after the other, while no dead row can be removed."""
    rates = []
    async with connected(database) as holder, holder.transaction(isolation="repeatable_read", readonly=True):
        await holder.fetchval("SELECT count(*) FROM pg_class")
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            rates.append(await _drained(url, 2_000))
    # All backlogs are of one size.
    return len(rates) / sum(1 / rate for rate in rates)


async def _sent(url: str, jobs: int) -> float:
    """Jobs per second of senders that send one after the other, four to a process."""
    processes = [
        await asyncio.create_subprocess_exec(
            *module_command(__name__, "send", url, str(SENDERS // 4), str(jobs)), stdout=asyncio.subprocess.PIPE
        )
        for _ in range(4)
    ]
    times: list[list[float]] = [json.loads((await process.communicate())[0]) for process in processes]
    return SENDERS * jobs / (max(end for _, end in times) - min(begin for begin, _ in times))


async def work(url: str, count: int) -> None:
    """Run workers until this process is ended."""
    workers: list[Any] = []
    for _ in range(count):
        app = Fairlane(url)

        @app.task(name="bench", queue=QUEUE)
        async def nothing(text: str) -> None:
            pass

        workers.append(app.worker(slots=10, queues=[QUEUE]))

    def stop() -> None:
        for worker in workers:
            worker.stop(now=True)

    # As ``fairlane worker`` ends: sessions that stay behind would count as slots.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    running = [asyncio.ensure_future(worker.run()) for worker in workers]
    for worker in workers:
        await worker.ready.wait()
    print("ready", flush=True)
    await asyncio.gather(*running)


async def send(url: str, count: int, jobs: int) -> None:
    """Send jobs by so many stores at once, each waiting for one before it sends the next."""
    stores = [await open_store(url) for _ in range(count)]
    for store in stores:
        await store.enqueue([job()])

    async def one(number: int) -> None:
        for _ in range(jobs):
            await stores[number].enqueue([job()])

    begin = time.time()
    await asyncio.gather(*(one(number) for number in range(count)))
    end = time.time()
    for store in stores:
        await store.close()
    print(json.dumps([begin, end]))


if __name__ == "__main__":
    what, where, *numbers = sys.argv[1:]
    asyncio.run(work(where, int(numbers[0])) if what == "work" else send(where, int(numbers[0]), int(numbers[1])))
