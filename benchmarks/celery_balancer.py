"""What the load balancer costs: CPU time per task of Celery with and without it, enqueue and run, alternating.

"plain" is Celery with the same 20 queues, used in turn.

    python -m benchmarks.celery_balancer --rounds 5 --tasks 2000

Each round starts a worker for each side in turn, publishes the tasks in this process and waits until all have run. The
CPU time of this process is the enqueue side; that of the worker and its children is the run side, without start-up.
The time of the server is not counted. The result is the median over the rounds.
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
from pathlib import Path
from typing import Any

import redis

from tests.servers.valkey import ValkeyServer, own_server

VARIABLE = "BENCH_CELERY_BALANCER"
SIDES = ("plain", "balanced")
QUEUES = 20


def create(side: str, url: str) -> Any:
    """The application of one side. Neither stores results."""
    from celery import Celery

    app: Any = Celery("bench", broker=url)
    app.conf.update(
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"global_keyprefix": f"{side}:"},
        worker_hijack_root_logger=False,
    )
    if side == "balanced":
        from fairlane.integrations.celery import LoadBalancer

        LoadBalancer(app, url, queues=QUEUES)
    elif side == "plain":
        from kombu.entity import Queue

        make: Any = Queue
        app.conf.task_queues = [make(f"queue_{k}", routing_key=f"queue_{k}") for k in range(QUEUES)]
    client = redis.Redis.from_url(url)

    @app.task(name="noop", shared=False)
    def noop(number: int) -> None:
        if number < 0:
            client.incr(f"{side}:done")

    return app


def __getattr__(name: str) -> Any:
    """`app`: the application of a worker, from the environment."""
    if name != "app":
        raise AttributeError(name)
    side, _, url = os.environ[VARIABLE].partition("|")
    globals()["app"] = create(side, url)
    return globals()["app"]


def group_seconds(leader: int) -> float:
    """User and system time of all processes of a group, with children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader:
            ticks += sum(map(int, fields[11:15] if stat.parent.name == str(leader) else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(side: str, server: ValkeyServer, tasks: int, pool: str) -> tuple[float, float]:
    """CPU seconds per task to enqueue and to run."""
    app = create(side, server.url)
    client = redis.Redis.from_url(server.url)
    client.flushall()
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.celery_balancer:app", "worker", "-P", pool, "-c", "2"]
    environment = {**os.environ, VARIABLE: f"{side}|{server.url}"}
    worker = subprocess.Popen(
        [*command, "--loglevel", "ERROR"], env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        task = app.tasks["noop"]
        _run(task, client, side, 200)
        begun = group_seconds(worker.pid)
        cpu = _run(task, client, side, tasks)
        return cpu / tasks, (group_seconds(worker.pid) - begun) / tasks
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait()
        client.close()
        app.close()


def _run(task: Any, client: Any, side: str, tasks: int) -> float:
    """Publish tasks and wait until all have run. Returns the CPU seconds of publishing."""
    client.delete(f"{side}:done")
    options = [{"queue": f"queue_{k}"} if side == "plain" else {} for k in range(QUEUES)]
    began = time.process_time()
    for number in range(tasks):
        task.apply_async((number,), **options[number % QUEUES])
    spent = time.process_time() - began
    # Markers run last in each queue; with two slots a task may still be running beside the last one.
    for option in options:
        task.apply_async((-1,), **option)
    while int(client.get(f"{side}:done") or 0) < QUEUES:
        time.sleep(0.2)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=2_000)
    parser.add_argument("--pool", default="prefork")
    given = parser.parse_args()
    seen: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    with own_server() as server:
        for _ in range(given.rounds):
            for side in SIDES:
                seen[side].append(measure(side, server, given.tasks, given.pool))
                enqueue, run = (seconds * 1e6 for seconds in seen[side][-1])
                print(f"{side:9} enqueue {enqueue:6.0f} µs, run {run:6.0f} µs", flush=True)
    medians = {side: [statistics.median(part) * 1e6 for part in zip(*seen[side], strict=True)] for side in SIDES}
    print("median")
    for side, (enqueue, run) in medians.items():
        print(
            f"{side:9} enqueue {enqueue:6.0f} µs, run {run:6.0f} µs, together {enqueue + run:6.0f} µs of CPU per task"
        )
    print(f"overhead {sum(medians['balanced']) / sum(medians['plain']) - 1:+.1%}")


if __name__ == "__main__":
    main()
