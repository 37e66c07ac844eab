"""A Celery application with sticky plans, made in the process of the tests and in its workers alike."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery, Task

from fairlane import Fairlane
from fairlane.integrations.celery import StickyRouter

JOURNAL = "journal"
ORG = "org"


class Plans:
    """The application, its tasks, and a journal in the broker's server that they write."""

    def __init__(self, broker: str, prefix: str, store: str) -> None:
        self.prefix = prefix
        self.app = Celery("plans", broker=broker, backend=broker, set_as_current=False)
        self.app.conf.update(
            broker_transport_options={"global_keyprefix": prefix},
            result_backend_transport_options={"global_keyprefix": prefix},
            broker_connection_retry_on_startup=True,
            task_routes={
                "plans.remove_models_from_db": {"queue": f"{ORG}.worker"},
                "plans.remove_models_from_buffer": {"queue": f"{ORG}.broadcast"},
            },
        )
        self.fairlane = Fairlane(store)
        self.router = StickyRouter(self.app, self.fairlane, org=ORG, ttl=120)
        self.server = redis.Redis.from_url(broker)
        self._declare()

    def write(self, *words: object) -> None:
        """Add a line to the journal."""
        self.server.rpush(self.prefix + JOURNAL, " ".join(map(str, words)))

    def lines(self, word: str = "") -> list[str]:
        """The lines of the journal that begin with a word."""
        found: Any = self.server.lrange(self.prefix + JOURNAL, 0, -1)
        return [line for raw in found if (line := raw.decode()).startswith(word)]

    def task(self, name: str) -> Any:
        """A task by its short name."""
        return self.app.tasks[f"plans.{name}"]

    def _declare(self) -> None:
        app, write = self.app, self.write

        def queue_of(task: Task) -> str:
            return str(task.request.delivery_info["routing_key"])

        @app.task(shared=False, name="plans.prepare_task", bind=True)
        def prepare_task(self: Task, plan: str, *_: object) -> list[str]:
            # As the original does it: the second step goes to the very queue of the first.
            compute = compute_task.apply_async((plan,), queue=queue_of(self))
            return [queue_of(self), compute.id]

        @app.task(shared=False, name="plans.compute_task", bind=True)
        def compute_task(self: Task, plan: str, seconds: float = 0.0) -> str:
            write("compute", plan, queue_of(self))
            until = f"{plans.prefix}go:{plan}"
            while seconds > 0 and not plans.server.exists(until):
                time.sleep(0.05)
                seconds -= 0.05
            return queue_of(self)

        plans = self

        @app.task(shared=False, name="plans.where", bind=True)
        def where(self: Task, *_: object) -> str:
            return queue_of(self)

        @app.task(shared=False, name="plans.again", bind=True, max_retries=2, default_retry_delay=0)
        def again(self: Task) -> list[object]:
            if self.request.retries < 1:
                raise self.retry()
            return [queue_of(self), self.request.retries]

        @app.task(shared=False, name="plans.delete_pod", bind=True)
        def delete_pod(self: Task, plan: str) -> None:
            write("deleted", plan, queue_of(self))

        @app.task(shared=False, name="plans.remove_models_from_db", bind=True)
        def remove_models_from_db(self: Task, word: str) -> str:
            write("db", word, self.request.hostname)
            return queue_of(self)

        @app.task(shared=False, name="plans.remove_models_from_buffer", bind=True)
        def remove_models_from_buffer(self: Task, word: str) -> str:
            write("buffer", word, self.request.hostname)
            return queue_of(self)


def from_environment() -> Plans:
    """The application of a worker process."""
    return Plans(os.environ["PLANS_BROKER"], os.environ["PLANS_PREFIX"], os.environ["PLANS_STORE"])
