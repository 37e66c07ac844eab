"""A Celery application in fair mode, made in the process of the tests and in its workers alike."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from typing import Any

import redis
from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from celery.worker.control import control_command

from fairlane import Fairlane
from fairlane.integrations.celery import Fair

JOURNAL, GATE = "journal", "gate"


@control_command()
def break_agent(state: Any) -> None:
    """A command to a worker: its agent ends by itself, as after an error that it does not know."""
    loop = state.consumer.controller.fairlane_agent._loop
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])


class Shop:
    """The application, its tasks, and a journal that they write, in the server that also has their results."""

    def __init__(self, broker: str, prefix: str, store: str, journal: str, ahead: int = 0) -> None:
        self.prefix = prefix
        self.broker = broker
        self.app = self.plain()
        self.app.conf.update(
            result_backend=journal,
            result_backend_transport_options={"global_keyprefix": prefix},
            broker_connection_retry_on_startup=True,
            worker_cancel_long_running_tasks_on_connection_loss=True,
            task_track_started=True,
            task_routes={"shop.routed": {"queue": "other"}},
            beat_schedule={
                "tick": {
                    "task": "shop.note",
                    "schedule": 0.5,
                    "args": ("tick",),
                    "options": {"headers": {"tenant": "beat"}, "expires": 60},
                }
            },
        )
        self.fairlane = Fairlane(store)
        self.fairlane.queue("limited", limit=1)
        fair = ["celery", "other", "limited", "quiet"]
        self.fair = Fair(self.app, self.fairlane, tenant="tenant", queues=fair, ahead=ahead)
        self.server = redis.Redis.from_url(journal)
        self._declare()

    def plain(self) -> Celery:
        """An application with the same broker, without fair mode, tasks and results."""
        app = Celery("shop", broker=self.broker, set_as_current=False)
        app.conf.broker_transport_options = {"global_keyprefix": self.prefix}
        return app

    def close(self) -> None:
        """Close every connection of this process."""
        # Results that are alive would connect again.
        gc.collect()
        self.app.backend.result_consumer.stop()
        self.app.backend.client.connection_pool.disconnect()
        self.app.close()
        self.fairlane.blocking.close()
        self.server.close()

    def write(self, *words: object) -> None:
        """Add a line to the journal."""
        self.server.rpush(self.prefix + JOURNAL, " ".join(map(str, words)))

    def open_gate(self) -> None:
        """Let every `wait` end."""
        self.server.set(self.prefix + GATE, 1)

    def lines(self, word: str = "") -> list[str]:
        """The lines of the journal that begin with a word."""
        found: Any = self.server.lrange(self.prefix + JOURNAL, 0, -1)
        return [line for raw in found if (line := raw.decode()).startswith(word)]

    def task(self, name: str) -> Any:
        """A task by its short name."""
        return self.app.tasks[f"shop.{name}"]

    def _declare(self) -> None:
        app, write = self.app, self.write

        @app.task(shared=False, name="shop.add")
        def add(x: int, y: int) -> int:
            return x + y

        @app.task(shared=False, name="shop.total")
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        @app.task(shared=False, name="shop.lane", bind=True)
        def lane(self: Task, *_: object) -> Any:
            return self.request.get("fairlane_lane")

        @app.task(shared=False, name="shop.publish", bind=True)
        def publish(self: Task) -> Any:
            return lane.delay().id

        @app.task(shared=False, name="shop.routed", bind=True)
        def routed(self: Task) -> Any:
            return self.request.delivery_info["routing_key"]

        @app.task(shared=False, name="shop.note")
        def note(word: str, seconds: float = 0.0) -> str:
            write("begin", word)
            time.sleep(seconds)
            write("end", word)
            return word

        @app.task(shared=False, name="shop.wait")
        def wait(word: str) -> None:
            write("begin", word)
            while not self.server.exists(self.prefix + GATE):
                time.sleep(0.05)

        @app.task(shared=False, name="shop.deaf")
        def deaf(word: str) -> int:
            usual = signal.signal(signal.SIGTERM, lambda *_: write("ignores", word))
            try:
                wait(word)
            finally:
                signal.signal(signal.SIGTERM, usual)
            return os.getpid()

        @app.task(shared=False, name="shop.wait_late", acks_late=True)
        def wait_late(word: str) -> None:
            wait(word)
            write("end", word)

        @app.task(shared=False, name="shop.late", acks_late=True)
        def late(word: str, seconds: float = 0.0) -> str:
            write("begin", word)
            time.sleep(seconds)
            write("end", word)
            return word

        @app.task(shared=False, name="shop.lasting", acks_late=True, reject_on_worker_lost=True)
        def lasting(word: str, seconds: float = 0.0) -> str:
            return str(late(word, seconds))

        @app.task(shared=False, name="shop.fail")
        def fail(word: str) -> None:
            raise ValueError(word)

        @app.task(shared=False, name="shop.silent", ignore_result=True)
        def silent() -> None:
            pass

        @app.task(shared=False, name="shop.again", bind=True, max_retries=5, default_retry_delay=0.1)
        def again(self: Task, left: int) -> list[int]:
            if left:
                raise self.retry(args=[left - 1])
            return [left, self.request.retries]

        @app.task(shared=False, name="shop.stubborn", bind=True, max_retries=1, default_retry_delay=0)
        def stubborn(self: Task) -> None:
            raise self.retry(exc=KeyError("never"))

        @app.task(shared=False, name="shop.flaky", bind=True, autoretry_for=(ConnectionError,), retry_backoff=False)
        def flaky(self: Task) -> int:
            if self.request.retries < 2:
                raise ConnectionError("not yet")
            return int(self.request.retries)

        flaky.default_retry_delay = 0

        @app.task(shared=False, name="shop.quietly", bind=True)
        def quietly(self: Task, left: int) -> str:
            if left:
                self.retry(args=[left - 1], countdown=0, throw=False)
                return "returned"
            write("quietly", self.request.retries)
            return "second"

        @app.task(shared=False, name="shop.wander", bind=True)
        def wander(self: Task, queues: list[str]) -> list[Any]:
            if queues:
                raise self.retry(args=[queues[1:]], queue=queues[0], countdown=0)
            return [self.request.retries, self.request.get("fairlane_lane")]

        @app.task(shared=False, name="shop.ignore")
        def ignore() -> None:
            raise Ignore

        @app.task(shared=False, name="shop.reject", acks_late=True, bind=True)
        def reject(self: Task, requeue: bool) -> str:
            write("reject", self.request.id)
            if requeue and len(self_lines(self.request.id)) > 1:
                return "second"
            raise Reject("no", requeue=requeue)

        def self_lines(id: str) -> list[str]:
            return self.lines(f"reject {id}")

        @app.task(shared=False, name="shop.replace", bind=True)
        def replace(self: Task, x: int) -> Any:
            return self.replace(add.si(x, 1) if x else add.si(0, 0) | add.s(5))

        @app.task(shared=False, name="shop.soft", soft_time_limit=0.3)
        def soft() -> None:
            time.sleep(30)

        @app.task(shared=False, name="shop.hard", time_limit=0.5)
        def hard(word: str) -> None:
            write("begin", word)
            time.sleep(30)

        @app.task(shared=False, name="shop.suicide")
        def suicide(word: str) -> None:
            write("begin", word)
            os.kill(os.getpid(), signal.SIGKILL)

        @app.task(shared=False, name="shop.reborn", acks_late=True, reject_on_worker_lost=True)
        def reborn(word: str, times: int) -> str:
            write("begin", word)
            if len(self.lines(f"begin {word}")) <= times:
                os.kill(os.getpid(), signal.SIGKILL)
            return word

        @app.task(shared=False, name="shop.leave")
        def leave() -> None:
            sys.exit(3)


def from_environment() -> Shop:
    """The application of a worker process."""
    names = ("BROKER", "PREFIX", "STORE", "JOURNAL", "AHEAD")
    broker, prefix, store, journal, ahead = (os.environ[f"SHOP_{name}"] for name in names)
    return Shop(broker, prefix, store, journal, int(ahead))
