"""A shop with workers: the fixture of most tests of fair mode."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from fairlane.model.job import Job, JobState
from tests.integrations.celery.kit import DATABASE, CeleryProcess, eventually
from tests.servers import valkey

from .shop import Shop

MODULE = "tests.integrations.celery.fair.worker_app"


class Site:
    """A shop and its workers. A Valkey server has its results, and is its broker and store unless others are named."""

    def __init__(
        self,
        folder: Path,
        server: valkey.ValkeyServer | None = None,
        store: str | None = None,
        ahead: int = 0,
        broker: str | None = None,
    ) -> None:
        self.folder = folder
        self.server = server or valkey.server()
        self.journal = f"{self.server.url}/{DATABASE}"
        self.broker = broker or self.journal
        self.prefix = f"shop-{secrets.token_hex(4)}:"
        self.store = store or self.server.fresh_namespace()
        self.ahead = ahead
        self.shop = Shop(self.broker, self.prefix, self.store, self.journal, ahead)
        self.workers: list[CeleryProcess] = []

    def worker(self, *options: str, ready: bool = True, **environ: str) -> CeleryProcess:
        """Start a worker."""
        number = len(self.workers)
        started = CeleryProcess(
            MODULE,
            self.folder / f"worker-{number}.log",
            *("-n", f"w{number}@test", "--without-mingle", "--without-gossip"),
            *options,
            environ=self.environ() | environ,
        )
        self.workers.append(started)
        if ready:
            started.ready()
        return started

    def beat(self) -> CeleryProcess:
        """Start a beat, which sends what the shop has scheduled. The caller stops it."""
        schedule = str(self.folder / "schedule")
        options = ("--schedule", schedule, "--pidfile", "")
        return CeleryProcess(MODULE, self.folder / "beat.log", *options, environ=self.environ(), command="beat")

    def environ(self) -> dict[str, str]:
        """The variables by which other processes make the same application."""
        return {
            "SHOP_BROKER": self.broker,
            "SHOP_PREFIX": self.prefix,
            "SHOP_STORE": self.store,
            "SHOP_JOURNAL": self.journal,
            "SHOP_AHEAD": str(self.ahead),
        }

    def task(self, name: str) -> Any:
        """A task by its short name."""
        return self.shop.task(name)

    def app_result(self, id: str) -> Any:
        """The result of a task id."""
        return self.shop.app.AsyncResult(id).get(timeout=120)

    def job(self, id: str) -> Job:
        """The job of a task id."""
        return self.shop.fairlane.blocking.job(id)

    def ended(self, id: str) -> Job:
        """The same, once it has ended."""

        eventually(lambda: self.job(id).state.final)
        return self.job(id)

    def has_ended(self, count: int) -> bool:
        """Whether so many tasks have run to their end."""
        return len(self.shop.lines("end")) >= count

    def running(self, id: str) -> Job:
        """The same, once it runs."""

        eventually(lambda: self.job(id).state is JobState.RUNNING)
        return self.job(id)

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.close()
        self.shop.close()
