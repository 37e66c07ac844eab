"""An application with a load balancer and tasks for every way to end. Workers and producers of the tests create it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from kombu.common import Broadcast
from kombu.entity import Queue

from fairlane.integrations.celery import LoadBalancer

VARIABLE = "FAIRLANE_TEST_BALANCER"
HEARTBEAT = 2.0
"""As by default: on a slow machine a worker must not be taken for dead."""
PATIENCE = 900.0
"""Longer than any test: a task that waits is ended by its gate, or with its worker."""


def create(settings: Mapping[str, Any]) -> LoadBalancer:
    """Create the application and its balancer. `settings` is JSON, so that it can be passed to another process."""
    app = Celery("balanced", broker=settings["broker"], backend=settings.get("backend", settings["broker"]))
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_transport_options={"global_keyprefix": settings["prefix"], **settings.get("transport_options", {})},
        result_backend_transport_options={"global_keyprefix": settings["prefix"]},
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0.05, "interval_max": 0.1},
        worker_hijack_root_logger=False,
        task_default_queue="elsewhere",
        worker_prefetch_multiplier=1,
        **settings.get("conf", {}),
    )
    if settings.get("broadcast"):
        app.conf.task_queues = (Broadcast(settings["broadcast"]), Queue("elsewhere"))
    balancer = LoadBalancer(
        app,
        settings["url"],
        queues=settings["queues"],
        namespace=settings["namespace"],
        heartbeat=settings.get("heartbeat", HEARTBEAT),
    )
    declare_tasks(app, Path(settings["folder"]))
    return balancer


def declare_tasks(app: Any, folder: Path) -> None:
    """Tasks write a line for each execution, and those that wait do so for a file."""

    def note(task: Task[Any, Any], name: str) -> None:
        line = json.dumps([name, task.request.id, task.request.retries, os.getpid(), task.request.delivery_info])
        with (folder / "executions").open("a") as file:
            file.write(line + "\n")

    def wait_for(name: str) -> None:
        end = time.monotonic() + PATIENCE
        while not (folder / name).exists() and time.monotonic() < end:
            time.sleep(0.02)

    @app.task(shared=False, name="ok", bind=True)
    def ok(self: Any, *args: Any) -> int:
        note(self, "ok")
        return len(args)

    @app.task(shared=False, name="wait", bind=True)
    def wait(self: Any, gate: str) -> str:
        note(self, gate)
        wait_for(gate)
        if (folder / gate).read_text() == "fail":
            raise ValueError(gate)
        return gate

    @app.task(shared=False, name="wait_late", bind=True, acks_late=True)
    def wait_late(self: Any, gate: str) -> str:
        note(self, gate)
        wait_for(gate)
        return gate

    @app.task(shared=False, name="fail", bind=True)
    def fail(self: Any, *args: Any) -> None:
        note(self, "fail")
        raise ValueError("expected")

    @app.task(shared=False, name="retry_twice", bind=True, max_retries=2)
    def retry_twice(self: Any, until: int) -> None:
        note(self, "retry")
        if self.request.retries < until:
            raise self.retry(countdown=0.05, exc=ValueError("expected"))

    @app.task(shared=False, name="ignore", bind=True)
    def ignore(self: Any) -> None:
        note(self, "ignore")
        raise Ignore

    @app.task(shared=False, name="replace", bind=True)
    def replace(self: Any) -> None:
        note(self, "replace")
        raise self.replace(app.tasks["ok"].s(1))

    @app.task(shared=False, name="reject", bind=True, acks_late=True)
    def reject(self: Any, requeue: bool) -> None:
        note(self, "reject")
        if self.request.delivery_info["redelivered"]:
            return
        raise Reject("expected", requeue=requeue)

    @app.task(shared=False, name="soft_limit", bind=True, soft_time_limit=0.3)
    def soft_limit(self: Any) -> None:
        note(self, "soft_limit")
        time.sleep(PATIENCE)

    @app.task(shared=False, name="hard_limit", bind=True, time_limit=0.6)
    def hard_limit(self: Any) -> None:
        note(self, "hard_limit")
        time.sleep(PATIENCE)

    @app.task(shared=False, name="die", bind=True)
    def die(self: Any) -> None:
        note(self, "die")
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(shared=False, name="die_late", bind=True, acks_late=True)
    def die_late(self: Any) -> None:
        note(self, "die_late")
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(shared=False, name="die_once", bind=True, acks_late=True, reject_on_worker_lost=True)
    def die_once(self: Any) -> None:
        note(self, "die_once")
        if not self.request.delivery_info["redelivered"]:
            os.kill(os.getpid(), signal.SIGKILL)

    @app.task(shared=False, name="leave", bind=True)
    def leave(self: Any) -> None:
        note(self, "leave")
        sys.exit(3)

    @app.task(shared=False, name="tsum")
    def tsum(numbers: list[int]) -> int:
        return sum(numbers)


def __getattr__(name: str) -> Any:
    """`app`: the application that the command of a worker names, from the settings in the environment."""
    if name != "app":
        raise AttributeError(name)
    app = create(json.loads(os.environ[VARIABLE])).app
    globals()["app"] = app
    return app
