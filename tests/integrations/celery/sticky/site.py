"""Workers of a pool: the fixture of the tests of sticky plans."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from fairlane.model.job import Job
from tests.integrations.celery.kit import DATABASE, CeleryProcess, eventually
from tests.servers import valkey

from .plans import ORG, Plans

MODULE = "tests.integrations.celery.sticky.worker_app"


class Site:
    """Plans whose broker is a Valkey server, and their workers."""

    def __init__(self, folder: Path) -> None:
        server = valkey.server()
        self.folder = folder
        self.broker = f"{server.url}/{DATABASE}"
        self.prefix = f"plans-{secrets.token_hex(4)}:"
        self.store = server.fresh_namespace()
        self.plans = Plans(self.broker, self.prefix, self.store)
        self.router = self.plans.router
        self.started: list[CeleryProcess] = []

    def start(self, name: str, *options: str, slots: int = 3, **environ: str) -> CeleryProcess:
        """Start a worker, without waiting for it."""
        started = CeleryProcess(
            MODULE,
            self.folder / f"{name}-{len(self.started)}.log",
            *("-n", f"{name}@test", "--without-mingle", "--without-gossip", "-P", "threads", "-c", str(slots)),
            *options,
            environ={
                "PLANS_BROKER": self.broker,
                "PLANS_PREFIX": self.prefix,
                "PLANS_STORE": self.store,
                "FAIRLANE_LEASE": "12",
            }
            | environ,
        )
        self.started.append(started)
        return started

    def workers(self, *indices: int, **options: Any) -> list[CeleryProcess]:
        """Start workers with these indices, and wait until they claim."""
        started = [self.start(f"w{index}", "--index", str(index), **options) for index in indices]
        for worker in started:
            worker.ready()
        self.live(*indices)
        return started

    def live(self, *indices: int) -> None:
        """Wait until these workers are live."""
        eventually(lambda: set(indices) <= {session.index for session in self.router.workers()})

    def task(self, name: str) -> Any:
        """A task by its short name."""
        return self.plans.task(name)

    def job(self, id: str) -> Job:
        """The job of a task id."""
        return self.plans.fairlane.blocking.job(id)

    def loads(self) -> dict[int, list[str]]:
        """The keys that are bound to each worker."""
        found: dict[int, list[str]] = {}
        for binding in self.router.bindings():
            found.setdefault(binding.index, []).append(binding.key)
        return found

    def go(self, plan: str) -> None:
        """Let the steps of a plan that wait for this end."""
        self.plans.server.set(f"{self.prefix}go:{plan}", 1)

    def release_all(self) -> None:
        """Release every key, and wait until none is bound."""
        for binding in self.router.bindings():
            self.go(binding.key)
            self.router.release(binding.key)
        eventually(lambda: not self.router.bindings())

    def close(self) -> None:
        """End all workers."""
        for worker in self.started:
            worker.close()
        self.plans.app.close()
        self.plans.fairlane.blocking.close()
        self.plans.server.close()


def direct(index: int) -> str:
    """The queue of a worker."""
    return f"{ORG}.worker-{index}"
