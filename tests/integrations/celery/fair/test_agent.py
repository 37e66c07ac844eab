"""An agent that ends by itself stops its worker, and other workers run its jobs."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import WorkerLostError

from fairlane import Fairlane
from fairlane.integrations.celery import Fair
from fairlane.integrations.celery.agent import Agent
from fairlane.model.job import JobState, Reason
from tests.integrations.celery.kit import eventually

from .site import Site


def test_an_agent_that_cannot_start_stops_the_worker(own_site: Site) -> None:
    worker = own_site.worker("-P", "threads", "-c", "2", ready=False, SHOP_STORE="redis://127.0.0.1:1")
    assert worker.ended() != 0
    assert "the Fairlane agent has ended: this Celery worker stops" in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_agent_that_ends_while_tasks_run_stops_the_worker(own_site: Site, pool: str) -> None:
    site = own_site
    worker = site.worker("-P", pool, "-c", "2")
    late, once = site.task("wait_late").delay("late"), site.task("wait").delay("once")
    eventually(lambda: len(site.shop.lines("begin")) == 2)
    site.shop.app.control.broadcast("break_agent")
    job = site.ended(once.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    eventually(lambda: site.job(late.id).state is JobState.PENDING)
    # Threads cannot be stopped: the worker waits for them.
    site.shop.open_gate()
    assert worker.ended() != 0
    assert "the Fairlane agent has ended: this Celery worker stops" in worker.log()
    site.worker("-P", pool, "-c", "2")
    job = site.ended(late.id)
    assert [attempt.outcome for attempt in job.attempts] == ["handed_back", "completed"]
    if pool == "prefork":
        with pytest.raises(WorkerLostError):
            once.get(timeout=120)
    else:
        # It ran to its end, and result backends are not fenced.
        assert once.get(timeout=120) is None
    assert len(site.shop.lines("begin once")) == 1


def test_what_celery_was_not_given_is_returned_while_there_is_no_broker() -> None:
    """Its event loop stands still, perhaps for hours."""
    app = Celery("agent", broker="redis://", set_as_current=False)
    agent = Agent(Fair(app, Fairlane("sqlite:///never.db")), SimpleNamespace())
    returned: list[str] = []

    def deliver(name: str) -> None:
        delivery: Any = SimpleNamespace(given_back=lambda: name, end=returned.append)
        agent.deliver(delivery)

    agent._attached = True
    deliver("before")
    assert returned == []
    agent.detach()
    deliver("after")
    assert returned == ["before", "after"]
