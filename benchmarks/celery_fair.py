"""What fair mode costs: throughput and CPU time per task of Celery with and without it, alternating.

    python -m benchmarks.celery_fair --rounds 3 --tasks 400 --seconds 0.02     throughput
    python -m benchmarks.celery_fair --rounds 3 --tasks 1000 --seconds 0       CPU time

Each round starts a worker for each side in turn, publishes the tasks in this process and waits until all have run. The
throughput is that of the worker while every task waits already. The CPU time of this process is the enqueue side;
that of the worker and its children is the run side, without start-up. The time of the server is not counted. The result
is the median over the rounds, as a part of plain Celery's.
"""

# Celery has no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import redis

from fairlane import Fairlane
from tests.servers.valkey import ValkeyServer, own_server

from .celery_balancer import group_seconds

VARIABLE = "BENCH_CELERY_FAIR"
SIDES = ("plain", "fair", "ahead")
WARM_UP = 50


class Measured(NamedTuple):
    """One run of one side."""

    enqueue: float
    """CPU seconds per task."""
    run: float
    """CPU seconds per task."""
    throughput: float
    """Tasks per second."""


def create(side: str, url: str) -> Any:
    """The application of one side. No side stores results."""
    from celery import Celery

    app: Any = Celery("bench", broker=url)
    app.conf.update(
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"global_keyprefix": f"{side}:"},
        worker_hijack_root_logger=False,
    )
    if side != "plain":
        from fairlane.integrations.celery import Fair

        Fair(app, Fairlane(f"{url}?namespace={side}"), tenant="tenant", ahead=int(side == "ahead"))
    client = redis.Redis.from_url(url)

    @app.task(name="work", shared=False)
    def work(seconds: float) -> None:
        time.sleep(seconds)
        client.incr("done")

    return app


def __getattr__(name: str) -> Any:
    """`app`: the application of a worker, from the environment."""
    if name != "app":
        raise AttributeError(name)
    side, _, url = os.environ[VARIABLE].partition(" ")
    globals()["app"] = create(side, url)
    return globals()["app"]


def measure(side: str, server: ValkeyServer, given: argparse.Namespace) -> Measured:
    """Run one side once."""
    client = redis.Redis.from_url(server.url)
    client.flushall()
    app = create(side, server.url)
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.celery_fair:app", "worker", "-l", "ERROR"]
    worker = subprocess.Popen(
        [*command, "-P", given.pool, "-c", str(given.concurrency), "--without-mingle", "--without-gossip"],
        # As many slots for these tasks as plain Celery has: none is kept for urgent ones.
        env={**os.environ, VARIABLE: f"{side} {server.url}", "FAIRLANE_HIGH_PRIORITY_RESERVED": "0"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    try:
        task = app.tasks["work"]
        for _ in range(WARM_UP):
            task.delay(0)
        _until(client, WARM_UP)
        # Every task waits before the first one starts.
        worker.send_signal(signal.SIGSTOP)
        cpu = time.process_time()
        for _ in range(given.tasks):
            task.delay(given.seconds)
        enqueue = time.process_time() - cpu
        used, began = group_seconds(worker.pid), time.perf_counter()
        worker.send_signal(signal.SIGCONT)
        _until(client, WARM_UP + given.tasks)
        seconds = time.perf_counter() - began
        run = group_seconds(worker.pid) - used
        return Measured(enqueue / given.tasks, run / given.tasks, given.tasks / seconds)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait()
        client.close()
        app.close()


def _until(client: Any, tasks: int) -> None:
    while int(client.get("done") or 0) < tasks:
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--pool", default="prefork")
    parser.add_argument("--concurrency", type=int, default=4)
    given = parser.parse_args()
    seen: dict[str, list[Measured]] = {side: [] for side in SIDES}
    with own_server() as server:
        for _ in range(given.rounds):
            for side in SIDES:
                seen[side].append(measure(side, server, given))
                print(side, _text(seen[side][-1]), flush=True)
    medians = {side: Measured(*map(statistics.median, zip(*runs, strict=True))) for side, runs in seen.items()}
    plain = medians["plain"]
    for side, found in medians.items():
        ratio = (found.enqueue + found.run) / (plain.enqueue + plain.run)
        print(f"{side}: {_text(found)}; throughput {found.throughput / plain.throughput:.2f}, CPU {ratio:.2f}")


def _text(found: Measured) -> str:
    return f"enqueue {found.enqueue * 1e6:.0f} µs, run {found.run * 1e6:.0f} µs, {found.throughput:.0f} tasks/s"


if __name__ == "__main__":
    main()
