"""Which Celery workers join the pool, with which index and which queues."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import ImproperlyConfigured
from kombu.entity import Queue

from fairlane import Fairlane
from fairlane.errors import InvalidInput
from fairlane.integrations.celery import Fair, StickyRouter
from fairlane.integrations.celery.applications import fairs
from fairlane.integrations.celery.publishing import captured
from fairlane.integrations.celery.sticky_workers import Membership, join


def router(**conf: Any) -> StickyRouter:
    """A router whose store and broker are never opened."""
    app = Celery("joining", broker="redis://", set_as_current=False)
    app.conf.update(conf)
    return StickyRouter(app, Fairlane("sqlite:///never.db"), org="org")


def joined(of: StickyRouter, queues: str | None = None, index: str | None = None) -> tuple[Membership | None, set[str]]:
    """What a worker with these options becomes."""
    if queues is not None:
        of.app.amqp.queues.select(queues.split(","))
    membership = join(of, SimpleNamespace(options={"index": index}))
    return membership, set(of.app.amqp.queues.consume_from)


def test_other_workers_do_not_join() -> None:
    assert joined(router(), "scheduler") == (None, {"scheduler"})
    assert joined(router()) == (None, {"celery"})


@pytest.mark.parametrize(
    ("queues", "index", "expected", "consumed"),
    [
        (None, "2", 2, {"org.worker", "org.worker-2"}),
        ("scheduler", "2", 2, {"scheduler", "org.worker", "org.worker-2"}),
        ("org.worker,org.worker-3", None, 3, {"org.worker", "org.worker-3"}),
        ("org.worker,org.worker-3", "auto", 3, {"org.worker", "org.worker-3"}),
        ("org.worker", None, None, {"org.worker"}),
        ("org.worker", "host", None, {"org.worker"}),
    ],
)
def test_the_index_and_the_queues(
    queues: str | None, index: str | None, expected: int | None, consumed: set[str]
) -> None:
    membership, found = joined(router(), queues, index)
    assert membership is not None
    assert (membership.index, found) == (expected, consumed)


def test_the_environment_names_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_INDEX", "4")
    membership, _ = joined(router(), "org.worker")
    assert membership is not None
    assert membership.index == 4


def test_queues_of_the_configuration_are_kept() -> None:
    declared = [Queue("celery"), Queue("org.worker"), Queue("org.worker-0"), Queue("org.worker-1")]
    membership, consumed = joined(router(task_queues=declared), index="1")
    assert membership is not None
    assert (membership.index, consumed) == (1, {"celery", "org.worker", "org.worker-0", "org.worker-1"})


@pytest.mark.parametrize(
    ("queues", "index", "match"),
    [
        ("org.worker-1,org.worker-2", None, "one index"),
        ("org.worker-1", "2", "contradicts"),
        (None, "two", "must be a number"),
        (None, "-1", "must be a number"),
        (None, "²", "must be a number"),
    ],
)
def test_contradictions_are_refused(queues: str | None, index: str | None, match: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=match):
        joined(router(), queues, index)


def test_a_router_fits_its_application() -> None:
    first = router()
    with pytest.raises(InvalidInput, match="twice"):
        StickyRouter(first.app, first.fair.fairlane, org="other")
    app = Celery("other", broker="redis://", set_as_current=False)
    Fair(app, Fairlane("sqlite:///never.db"))
    with pytest.raises(InvalidInput, match="fairlane"):
        StickyRouter(app, Fairlane("sqlite:///never.db"), org="org")
    with pytest.raises(InvalidInput, match="org"):
        StickyRouter(app, Fairlane("sqlite:///never.db"), org="not a name")


def test_names() -> None:
    names = router()
    assert [names.index_of(queue) for queue in ("org.worker-0", "org.worker-12", "org.worker-01", "org.worker")] == [
        *(0, 12, None, None)
    ]
    assert names.owns("org.broadcast")
    assert not names.owns("org2.worker")
    assert not names.owns("celery")


def test_a_cleanup_is_not_run_by_an_eager_application() -> None:
    made = router(task_always_eager=True)

    @made.app.task(shared=False)
    def delete() -> None:
        raise AssertionError("it ran")

    with pytest.raises(InvalidInput, match="task_always_eager"):
        made.release("key", cleanup=delete.si())


@pytest.mark.parametrize("canvas", [chain, group, chord])
def test_a_canvas_is_no_broadcast(canvas: Any) -> None:
    made = router()
    one = made.app.signature("joining.one")
    parts = ([one, one], one) if canvas is chord else ([one, one],)
    with pytest.raises(InvalidInput, match="task: must be one task"):
        made.broadcast(canvas(*parts))


@pytest.mark.parametrize(("queue", "key"), [("celery", None), ("org.worker-3", None), ("org.worker", "plan")])
def test_a_key_is_inherited_where_it_counts(queue: str, key: str | None) -> None:
    """As when a task of a key is retried in another queue, with the headers of its request."""
    app = Celery("keys", broker="redis://", set_as_current=False)
    Fair(app, Fairlane("sqlite:///never.db"))
    StickyRouter(app, fairs[app].fairlane, org="org")
    headers = {"fairlane_job": "x", "fairlane_queue": "org.worker-2", "fairlane_key": "plan"}
    with captured() as publishes:
        app.send_task("keys.task", queue=queue, headers=headers)
    [publish] = publishes
    assert publish.job(publish.id, None).sticky == key
