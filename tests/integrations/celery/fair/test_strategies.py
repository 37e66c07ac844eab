"""What the consumer of a worker does with messages, before and after its pool is restarted."""

from types import SimpleNamespace
from typing import Any

from celery import Celery

from fairlane import Fairlane
from fairlane.integrations.celery import Fair
from fairlane.integrations.celery.job_requests import FairRequest
from fairlane.integrations.celery.worker_steps import DeliveryStep


def test_restarting_the_pool_keeps_fair_mode() -> None:
    """Celery makes new strategies then, also for tasks that were just imported."""
    app = Celery("strategies", broker="redis://", set_as_current=False)
    Fair(app, Fairlane("sqlite:///never.db"))
    strategies: dict[str, Any] = {}

    def update() -> None:
        strategies.update(dict.fromkeys(app.tasks, str))

    consumer = SimpleNamespace(
        app=app, strategies=strategies, update_strategies=update, controller=SimpleNamespace(fairlane_agent=None)
    )
    DeliveryStep(consumer)
    consumer.update_strategies()

    @app.task(shared=False, name="strategies.imported")
    def imported() -> None:
        """Nothing."""

    consumer.update_strategies()
    assert issubclass(imported.Request, FairRequest)
    assert {each.__qualname__ for each in strategies.values()} == {"adopting.<locals>.receive"}
