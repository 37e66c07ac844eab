"""A balanced application on a Valkey server, and real workers of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from fairlane.errors import StoreUnavailable
from fairlane.integrations.celery.balancer.leases import Load
from tests.servers.valkey import ValkeyServer

from .application import VARIABLE, create

MODULE = f"{__package__}.application"
PATIENCE = 120.0


def until(holds: Callable[[], object], what: Callable[[], object] | str = "it", seconds: float = PATIENCE) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.03)


class Fleet:
    """One application: its producer is this process, its workers are started by `worker`."""

    def __init__(self, server: ValkeyServer, folder: Path, queues: int, balancer_url: str = "", **more: Any) -> None:
        self.folder = folder
        token = secrets.token_hex(5)
        self.settings: dict[str, Any] = {
            "broker": server.url,
            "url": balancer_url or server.url,
            "prefix": f"{token}:",
            "namespace": f"test-{token}",
            "queues": queues,
            "folder": str(folder),
            **more,
        }
        self.balancer = create(self.settings)
        self.app = self.balancer.app
        self._redis = redis.Redis.from_url(server.url)
        self._workers: list[Worker] = []

    def task(self, name: str) -> Any:
        """A task of the application."""
        return self.app.tasks[name]

    def worker(self, *options: str, pool: str = "prefork", concurrency: int = 4, ready: bool = True) -> Worker:
        """Start a worker and wait until it consumes."""
        worker = Worker(self, pool, concurrency, options)
        self._workers.append(worker)
        if ready:
            worker.until_ready()
        return worker

    def executions(self) -> list[list[Any]]:
        """Name, id, retries, process and delivery of every execution so far."""
        file = self.folder / "executions"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def names(self) -> list[str]:
        """The names of the executions so far."""
        return [execution[0] for execution in self.executions()]

    def open(self, gate: str, how: str = "") -> None:
        """Let the tasks that wait for a gate end."""
        (self.folder / f"{gate}.new").write_text(how)
        (self.folder / f"{gate}.new").rename(self.folder / gate)

    def pairs(self) -> list[tuple[int, int]]:
        """The loads in the order of the queues."""
        return [(load.pending, load.running) for load in self.balancer.loads().values()]

    def total(self) -> tuple[int, int]:
        """The sum of the loads. On a busy machine the server may fail to answer in time, and is asked again."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                loads = self.balancer.loads().values()
                break
            except StoreUnavailable:
                assert time.monotonic() < end
                time.sleep(0.1)
        return sum(load.pending for load in loads), sum(load.running for load in loads)

    def until_total(self, pending: int, running: int, seconds: float = PATIENCE) -> None:
        """Wait for these sums."""
        until(lambda: self.total() == (pending, running), lambda: f"{self.pairs()}, {self.names()}", seconds)

    def waiting(self) -> list[list[str]]:
        """The ids of the messages that wait in the broker, by queue."""
        found = []
        for name in self.balancer.queues:
            raw: Any = self._redis.lrange(f"{self.settings['prefix']}{name}", 0, -1)
            found.append([json.loads(message)["headers"].get("id", "") for message in reversed(raw)])
        return found

    def push(self, queue: str, message: str) -> None:
        """Put anything into a queue of the broker."""
        self._redis.lpush(f"{self.settings['prefix']}{queue}", message)

    def purge(self) -> None:
        """Remove every message behind the back of the balancer."""
        for name in self.balancer.queues:
            self._redis.delete(f"{self.settings['prefix']}{name}")

    def environment(self) -> dict[str, str]:
        """The environment of a process that creates the same application."""
        return {**os.environ, VARIABLE: json.dumps(self.settings)}

    def close(self) -> None:
        """End the workers and close the connections."""
        for worker in self._workers:
            worker.kill()
        self.balancer.close()
        self.app.close()
        self._redis.close()


class Worker:
    """A process of ``celery worker`` in a group of its own."""

    def __init__(self, fleet: Fleet, pool: str, concurrency: int, options: tuple[str, ...]) -> None:
        self.name = f"w{secrets.token_hex(3)}@test"
        self._fleet = fleet
        self.log = fleet.folder / f"{self.name}.log"
        command = [
            *(sys.executable, "-m", "celery", "-A", f"{MODULE}:app", "worker", "--loglevel", "INFO"),
            *("--hostname", self.name, "--pool", pool, "--concurrency", str(concurrency), *options),
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=fleet.environment(), start_new_session=True
            )

    def until_ready(self) -> None:
        """Wait until it consumes."""
        until(lambda: " ready." in self.log.read_text() or self.process.poll() is not None, self.log.read_text)
        assert self.process.poll() is None, self.log.read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its main process."""
        self.process.send_signal(number)

    def stop(self) -> None:
        """Stop it as an operator does, and wait."""
        self.process.terminate()
        self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill it with all its children."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


@contextlib.contextmanager
def fleet_of(server: ValkeyServer, folder: Path, queues: int, **more: Any) -> Iterator[Fleet]:
    """A fleet that is closed at the end."""
    fleet = Fleet(server, folder, queues, **more)
    try:
        yield fleet
    finally:
        fleet.close()


def load(pending: int, running: int) -> Load:
    """A load to compare with."""
    return Load(pending, running)
