"""The settings of fair mode, without workers."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from celery._state import _task_stack
from celery.exceptions import Retry
from celery.utils.nodenames import worker_direct
from kombu.common import Broadcast
from kombu.entity import Exchange, Queue

from fairlane import Fairlane, InvalidInput
from fairlane.integrations.celery import Fair, StickyRouter
from fairlane.integrations.celery.adoption import _queue_of
from fairlane.integrations.celery.agent import Agent
from fairlane.integrations.celery.publishing import captured
from fairlane.model.job import Priority


@pytest.mark.parametrize(("broker", "highest"), [("redis://", 0), ("amqp://", 9)])
def test_priorities_mean_what_they_mean_for_the_broker(broker: str, highest: int, tmp_path: object) -> None:
    app = Celery("priorities", broker=broker, set_as_current=False)
    fair = Fair(app, Fairlane(f"sqlite:///{tmp_path}/fairlane.db"))
    classes = [fair.priority_of(abs(highest - step)) for step in range(10)]
    high, normal, low = Priority.HIGH, Priority.NORMAL, Priority.LOW
    assert classes == [*[high] * 3, *[normal] * 4, *[low] * 3]
    with pytest.raises(InvalidInput, match="priority: must be a number from 0 to 9, not a str"):
        fair.priority_of("5")


def test_bad_settings_are_refused(tmp_path: object) -> None:
    app, fairlane = Celery("bad", set_as_current=False), Fairlane(f"sqlite:///{tmp_path}/fairlane.db")
    with pytest.raises(InvalidInput, match="tenant"):
        Fair(app, fairlane, tenant=3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(InvalidInput, match="queues"):
        Fair(app, fairlane, queues="celery")
    with pytest.raises(InvalidInput, match="ahead"):
        Fair(app, fairlane, ahead=-1)
    Fair(app, fairlane)
    with pytest.raises(InvalidInput, match="twice"):
        Fair(app, fairlane)


def test_what_is_no_application_is_refused() -> None:
    """A URL instead of the Fairlane application was noticed by the first publish, which did not say what is wrong."""
    app, fairlane = Celery("mixed", set_as_current=False), Fairlane("sqlite:///never.db")
    wrong: list[tuple[Any, Any]] = [(fairlane, app), ("shop", fairlane)]
    for first, second in wrong:
        with pytest.raises(InvalidInput, match=r"app: must be a Celery application, not a (Fairlane|str)"):
            Fair(first, second)
        with pytest.raises(InvalidInput, match=r"app: must be a Celery application, not a (Fairlane|str)"):
            StickyRouter(first, second, org="org")
    url: Any = "redis://localhost"
    with pytest.raises(InvalidInput, match=r"fairlane: must be a Fairlane application, .* not a str"):
        Fair(app, url)
    with pytest.raises(InvalidInput, match=r"fairlane: must be a Fairlane application, .* not a str"):
        StickyRouter(app, url, org="org")
    Fair(app, fairlane)
    app.close()


def _fair_by_default() -> Fair:
    """Fair mode of an application whose workers also consume queues of one worker and of all; nothing is opened."""
    app = Celery("default", broker="redis://", set_as_current=False)
    exchange = Exchange("images", type="topic")
    app.conf.task_queues = [Queue("celery"), Queue("images", exchange, "image.*"), Broadcast("all")]
    fair = Fair(app, Fairlane("sqlite:///never.db"))
    # As `worker_direct=True` does it when a worker starts.
    app.amqp.queues.select_add(worker_direct("w1@host"))
    return fair


def _agent(fair: Fair, places: int = 1) -> Agent:
    controller = SimpleNamespace(concurrency=8, pool=SimpleNamespace(num_processes=places), hostname="w1@host")
    return Agent(fair, controller)


def test_the_queues_of_one_worker_and_of_all_workers_are_not_fair() -> None:
    fair = _fair_by_default()
    assert fair.served() == ["celery", "images"]
    assert set(_agent(fair)._settings().queues) == {"celery", "images"}


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("", "celery", "celery"),
        ("images", "image.*", "images"),
        ("images", "image.resize", "images"),
        ("images", "sound.play", None),
        ("C.dq2", "w1@host", None),
        ("", "w1@host.dq2", None),
        ("all", "", None),
        ("", "elsewhere", None),
    ],
)
def test_messages_of_fair_queues_are_adopted(exchange: str, key: str, queue: str | None) -> None:
    message: Any = SimpleNamespace(delivery_info={"exchange": exchange, "routing_key": key})
    assert _queue_of(message, _fair_by_default()) == queue


@pytest.mark.parametrize(
    ("options", "queue"),
    [
        ({}, "usual"),
        ({"routing_key": "anything"}, "usual"),
        ({"queue": "direct", "routing_key": "anything"}, "direct"),
        ({"routing_key": "feed.import", "exchange_type": "topic", "exchange": "tasks"}, "feed"),
        ({"exchange": Exchange("tasks", type="topic"), "routing_key": "feed.import"}, "feed"),
        ({"exchange": "tasks", "routing_key": "of.no.queue"}, None),
        ({"exchange": "tasks", "routing_key": "both.first"}, None),
        ({"exchange": "apart", "routing_key": "direct.key"}, "direct"),
        ({"exchange": "unknown", "routing_key": "x"}, None),
        ({"exchange": "C.dq2", "routing_key": "w1@host"}, None),
        ({"queue": "feed", "routing_key": "feed.import"}, "feed"),
        ({"queue": "feed", "routing_key": "of.no.queue"}, None),
        ({"queue": Queue("unlisted", Exchange("tasks", type="topic"), "new.#"), "routing_key": "new.x"}, "unlisted"),
    ],
)
def test_an_exchange_and_a_routing_key_lead_where_celery_sends_them(options: dict[str, Any], queue: str | None) -> None:
    """Celery adds the default queue to a publish that names none. What reaches no fair queue goes to the broker."""
    app = Celery("exchanges", broker="memory://", set_as_current=False)
    tasks = Exchange("tasks", type="topic")
    app.conf.update(
        task_default_queue="usual",
        task_queues=[
            Queue("usual", Exchange("usual"), "usual"),
            Queue("feed", tasks, "feed.#"),
            Queue("first", tasks, "both.#"),
            Queue("second", tasks, "both.*"),
            Queue("direct", Exchange("apart"), "direct.key"),
        ],
    )
    Fair(app, Fairlane("sqlite:///never.db"))
    with captured() as publishes:
        app.send_task("task", **options)
    assert [publish.queue for publish in publishes] == ([] if queue is None else [queue])
    app.close()


def test_a_routing_key_leads_through_the_exchange_of_the_default_queue() -> None:
    app = Celery("topics", broker="memory://", set_as_current=False)
    tasks = Exchange("topics", type="topic")
    app.conf.update(
        task_default_queue="rest", task_queues=[Queue("rest", tasks, "rest.#"), Queue("feeds", tasks, "feed.#")]
    )
    Fair(app, Fairlane("sqlite:///never.db"))
    with captured() as publishes:
        app.send_task("task")
        app.send_task("task", routing_key="rest.x")
        app.send_task("task", routing_key="feed.x")
    assert [publish.queue for publish in publishes] == ["rest", "rest", "feeds"]
    app.close()


@pytest.mark.parametrize("option", ["fairlane_key", "fairlane_unique", "fairlane_ttl"])
def test_an_option_that_the_broker_does_not_have_is_refused(option: str) -> None:
    app = Celery("refusing", broker="memory://localhost", set_as_current=False)
    app.conf.task_default_queue = "refusing"
    StickyRouter(app, Fairlane("sqlite:///never.db"), org="org")
    with pytest.raises(InvalidInput, match=f"{option}: requires a fair queue"):
        app.send_task("task", **{option: "1"})
    with pytest.raises(InvalidInput, match=f"{option}: requires a fair queue"):
        app.send_task("task", headers={option: "1"})
    # A lane has no effect there.
    app.send_task("task", headers={"fairlane_lane": "ann", option: None}, **{option: None})
    app.close()


@pytest.mark.parametrize("queue", ["fair", "brokered"])
def test_a_misspelt_option_is_refused(queue: str) -> None:
    """Celery ignores what it does not know: the task would run without its key or its priority."""
    app = Celery("misspelling", broker="memory://localhost", set_as_current=False)
    Fair(app, Fairlane("sqlite:///never.db"), queues=["fair"])
    with (
        captured() as publishes,
        pytest.raises(InvalidInput, match=r"fairlane_prio: is not an option; .* fairlane_pri"),
    ):
        app.send_task("task", queue=queue, fairlane_prio="high")
    assert publishes == []
    app.close()


def test_a_retry_for_the_broker_may_have_the_headers_of_its_request() -> None:
    """As when Celery runs a message of an unchanged producer that could not become a job."""
    app = Celery("retrying", broker="memory://localhost", set_as_current=False)
    app.conf.task_default_queue = "retrying"
    Fair(app, Fairlane("sqlite:///never.db"), queues=[])
    headers = {"fairlane_unique": "1"}

    @app.task(shared=False, name="retrying.task", bind=True)
    def task(self: Task) -> None:
        """Nothing."""

    task.push_request(id="id", task=task.name, args=(), kwargs={}, headers=headers, called_directly=False)
    _task_stack.push(task)
    try:
        with pytest.raises(Retry):
            task.retry(countdown=0)
        with pytest.raises(InvalidInput, match="fairlane_unique: requires a fair queue"):
            app.send_task("other", headers={"fairlane_unique": "2"})
    finally:
        _task_stack.pop()
        task.pop_request()
    app.close()


def test_an_agent_claims_as_many_jobs_as_the_pool_has_places() -> None:
    """The solo pool has one, whatever the worker's concurrency is."""
    assert _agent(_fair_by_default(), places=1)._settings().slots.total == 1
    assert _agent(_fair_by_default(), places=3)._settings().slots.total == 3
