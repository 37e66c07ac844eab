"""What a Celery worker starts and stops besides its own parts: the agent, and the delivery of jobs to its consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from celery.worker.consumer.tasks import Tasks

from ...errors import InvalidInput
from ...model.names import check_name
from .adoption import adopting
from .agent import Agent
from .applications import fair_of
from .job_requests import mix_into
from .sticky_workers import join

GREEN_POOLS = ("gevent", "eventlet")


class AgentStep(bootsteps.StartStopStep):
    """Owns the agent of a worker: refuses what cannot work, and ends the session after the pool has stopped."""

    def include(self, parent: Any) -> bool:
        """Check the worker's options and create its agent."""
        fair = fair_of(parent.app)
        membership = None if fair.router is None else join(fair.router, parent)
        served = fair.served()
        if not served:
            return False
        _refuse(parent, served)
        parent.fairlane_agent = Agent(fair, parent, membership)
        _stop_claiming_softly(parent, parent.fairlane_agent)
        # The first step is stopped last: when the pool has stopped, every running task has reported its end.
        parent.steps.insert(0, self)
        return True

    def start(self, parent: Any) -> None:
        """Do nothing: the agent starts when Celery's consumer does, after the pool has forked its processes."""

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """Called with each new connection to the broker."""
        parent.fairlane_agent.register(hub)

    def close(self, parent: Any) -> None:
        """The worker is about to stop."""
        parent.fairlane_agent.stop_claiming()

    def stop(self, parent: Any) -> None:
        """The pool has stopped, warm."""
        parent.fairlane_agent.leave()

    def terminate(self, parent: Any) -> None:
        """The pool has stopped, cold."""
        parent.fairlane_agent.leave()


class DeliveryStep(bootsteps.StartStopStep):
    """Delivers jobs to Celery's consumer while that has a connection to the broker."""

    requires = (Tasks,)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        update, fair = consumer.update_strategies, fair_of(consumer.app)

        def update_strategies() -> None:
            """Celery does this for each new connection, and when the remote control restarts the pool."""
            for task in consumer.app.tasks.values():
                mix_into(task)
            update()
            if self.include_if(consumer):
                for name, strategy in consumer.strategies.items():
                    consumer.strategies[name] = adopting(strategy, fair, consumer)

        consumer.update_strategies = update_strategies

    def include_if(self, consumer: Any) -> bool:
        """Whether the worker has an agent."""
        return hasattr(consumer.controller, "fairlane_agent")

    def start(self, consumer: Any) -> None:
        """Called with each new connection to the broker, after Celery has made the strategies of its tasks."""
        agent: Agent = consumer.controller.fairlane_agent
        agent.connection_lost = False
        _protect(consumer, agent)
        agent.attach(consumer.create_task_handler())

    def stop(self, consumer: Any) -> None:
        """The connection is lost, or the worker stops."""
        consumer.controller.fairlane_agent.detach()


def _refuse(worker: Any, served: Sequence[str]) -> None:
    """Reject options and names of queues that fair mode cannot work with."""
    pool = worker.pool_cls.__module__.rpartition(".")[2]
    if pool in GREEN_POOLS:
        raise ImproperlyConfigured(
            f"Fairlane's fair mode does not work with the pool {pool!r}: use -P prefork or -P threads"
        )
    if not worker.use_eventloop:
        raise ImproperlyConfigured(
            "Fairlane's fair mode requires a broker that Celery reads with its event loop: use Redis or RabbitMQ"
        )
    if worker.autoscale:
        raise ImproperlyConfigured(
            "Fairlane's fair mode does not work with --autoscale, because the slots of a worker are fixed: use -c"
        )
    if worker.app.conf.task_protocol != 2:
        raise ImproperlyConfigured("Fairlane's fair mode requires task_protocol = 2")
    try:
        for name in served:
            check_name("queue", name)
    except InvalidInput as exc:
        raise ImproperlyConfigured(
            f"{exc}; rename it, or name the queues that are fair with Fair(queues=[…])"
        ) from None


def _stop_claiming_softly(worker: Any, agent: Agent) -> None:
    """Claim nothing more in a soft shutdown: Celery's main thread sleeps then, and could not start what is claimed."""
    wait: Any = getattr(worker, "wait_for_soft_shutdown", None)  # Celery 5.5 and later

    def wait_for_soft_shutdown() -> None:
        agent.stop_claiming()
        wait()

    if wait is not None:
        worker.wait_for_soft_shutdown = wait_for_soft_shutdown


def _protect(consumer: Any, agent: Agent) -> None:
    """Keep Celery from dropping jobs when its connection to the broker is lost, and from changing the pool's size."""
    if getattr(consumer.pool, "fairlane_protected", False):
        return
    flush, pool = consumer.pool.flush, consumer.pool
    on_error = consumer.on_connection_error_after_connected

    def on_connection_error(exc: Any) -> None:
        agent.connection_lost = True
        on_error(exc)

    def fixed(n: int = 1) -> None:
        raise ValueError("Fairlane's fair mode does not change the size of a running pool: restart it with another -c")

    pool.flush = lambda: agent.flushed(flush)
    pool.grow = pool.shrink = fixed
    pool.fairlane_protected = True
    consumer.on_connection_error_after_connected = on_connection_error
