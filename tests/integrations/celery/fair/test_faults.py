"""Workers that stop, die, or lose their broker: every job ends once, and none is stuck."""

import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import ImproperlyConfigured, WorkerLostError

from fairlane.integrations.celery import Fair
from fairlane.integrations.celery.worker_steps import _refuse
from fairlane.model.job import JobState, Priority, Reason
from fairlane.model.session import SessionState
from tests.integrations.celery.kit import eventually
from tests.servers.valkey import own_server
from tests.sizes import sized

from .site import Site

POOLS = pytest.mark.parametrize("pool", ["prefork", "threads"])


@POOLS
def test_a_warm_stop_waits_for_its_tasks(own_site: Site, pool: str) -> None:
    worker = own_site.worker("-P", pool, "-c", "2")
    results = [own_site.task("wait").delay(f"warm{n}") for n in range(4)]
    eventually(lambda: len(own_site.shop.lines("begin")) == 2)
    worker.process.terminate()
    sessions = own_site.shop.fairlane.blocking.sessions
    eventually(lambda: sessions()[0].state is SessionState.STOPPING)
    own_site.shop.open_gate()
    assert worker.ended() == 0, worker.log()
    jobs = [own_site.job(result.id) for result in results]
    assert Counter(job.state for job in jobs) == {JobState.COMPLETED: 2, JobState.PENDING: 2}
    [session] = sessions()
    assert session.state is SessionState.ENDED


def test_a_cold_stop_hands_back_what_may_run_again(own_site: Site) -> None:
    worker = own_site.worker("-P", "prefork", "-c", "2")
    late, once = own_site.task("wait_late").delay("late"), own_site.task("wait").delay("once")
    eventually(lambda: len(own_site.shop.lines("begin")) == 2)
    worker.stop(signal.SIGQUIT)
    job = own_site.job(late.id)
    assert job.state is JobState.PENDING, worker.log()
    assert [attempt.outcome for attempt in job.attempts] == ["handed_back"]
    job = own_site.job(once.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)


def test_a_cold_stop_waits_for_threads(own_site: Site) -> None:
    worker = own_site.worker("-P", "threads", "-c", "2")
    results = [own_site.task(name).delay(name) for name in ("wait_late", "wait")]
    eventually(lambda: len(own_site.shop.lines("begin")) == 2)
    worker.process.send_signal(signal.SIGQUIT)
    eventually(lambda: own_site.shop.fairlane.blocking.sessions()[0].state is SessionState.STOPPING)
    waits = own_site.task("add").delay(1, 2)
    own_site.shop.open_gate()
    worker.ended()
    assert [own_site.job(result.id).state for result in results] == [JobState.COMPLETED] * 2, worker.log()
    assert own_site.job(waits.id).state is JobState.PENDING


def test_a_soft_stop_claims_nothing_more(own_site: Site) -> None:
    """Celery's main thread sleeps, and could not start another task; one that it has claimed would crash with it."""
    softly = ("worker.soft_shutdown_timeout=600", "worker.enable_soft_shutdown_on_idle=yes")
    worker = own_site.worker("-P", "threads", "-c", "1", "--", *softly)
    sessions = own_site.shop.fairlane.blocking.sessions
    eventually(sessions)
    worker.process.send_signal(signal.SIGQUIT)
    eventually(lambda: "Initiating Soft Shutdown" in worker.log())
    eventually(lambda: sessions()[0].state is SessionState.ENDED)
    assert worker.process.poll() is None, worker.log()


@POOLS
def test_the_jobs_of_a_killed_worker_are_rescued(own_site: Site, pool: str) -> None:
    first = own_site.worker("-P", pool, "-c", "2")
    late, once = own_site.task("wait_late").delay("late"), own_site.task("wait").delay("once")
    eventually(lambda: len(own_site.shop.lines("begin")) == 2)
    first.close()
    own_site.worker("-P", pool, "-c", "2")
    job = own_site.ended(once.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    own_site.shop.open_gate()
    job = own_site.ended(late.id)
    assert [attempt.outcome for attempt in job.attempts] == ["crashed", "completed"]
    assert len(own_site.shop.lines("begin once")) == 1
    recount = own_site.shop.fairlane.blocking.recount()
    assert (recount.jobs, recount.differences) == (0, ())


@pytest.mark.parametrize("producer_acks_late", [False, True])
def test_what_was_sent_by_name_is_run_again_as_the_worker_says(own_site: Site, producer_acks_late: bool) -> None:
    """Only the worker has the task: whether it is acknowledged late is not known where it is sent."""
    app = own_site.shop.plain()
    app.conf.task_acks_late = producer_acks_late
    app.conf.result_backend = own_site.journal
    app.conf.result_backend_transport_options = {"global_keyprefix": own_site.prefix}
    Fair(app, own_site.shop.fairlane, queues=["celery"])
    first = own_site.worker("-P", "threads", "-c", "2")
    late, once = app.send_task("shop.wait_late", ("late",)), app.send_task("shop.wait", ("once",))
    eventually(lambda: len(own_site.shop.lines("begin")) == 2)
    first.close()
    own_site.worker("-P", "threads", "-c", "2")
    job = own_site.ended(once.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    with pytest.raises(WorkerLostError):
        own_site.app_result(once.id)
    own_site.shop.open_gate()
    job = own_site.ended(late.id)
    assert [attempt.outcome for attempt in job.attempts] == ["crashed", "completed"]
    assert len(own_site.shop.lines("begin once")) == 1
    app.close()


def test_a_worker_that_was_declared_dead_stops_its_tasks_and_goes_on(own_site: Site) -> None:
    first = own_site.worker("-P", "prefork", "-c", "1")
    result = own_site.task("wait_late").delay("paused")
    eventually(lambda: own_site.shop.lines("begin paused"))
    second = own_site.worker("-P", "prefork", "-c", "1")
    first.process.send_signal(signal.SIGSTOP)
    eventually(lambda: len(own_site.shop.lines("begin paused")) == 2)
    first.process.send_signal(signal.SIGCONT)
    eventually(lambda: "was declared dead" in first.log())
    # It claims again: there are two jobs now, and the second worker has one place, which is taken.
    assert own_site.task("add").delay(1, 2).get(timeout=120) == 3
    own_site.shop.open_gate()
    job = own_site.ended(result.id)
    assert [attempt.outcome for attempt in job.attempts] == ["crashed", "completed"]
    assert own_site.shop.lines("end paused") == ["end paused"], "the task of the dead session ran on"
    assert second.stop() == 0


@pytest.fixture
def broker_site(tmp_path: Path) -> Iterator[Site]:
    """A shop whose broker belongs to it alone."""
    with own_server() as server:
        made = Site(tmp_path, server)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("pool", sized(["prefork"], ["prefork", "threads"]))
def test_the_connection_to_the_broker_is_lost_under_load(broker_site: Site, pool: str) -> None:
    site = broker_site
    worker = site.worker("-P", pool, "-c", "2")
    results = [site.task("note" if n % 2 else "late").delay(f"n{n}", 0.02) for n in range(120)]
    for done in (20, 50, 80):
        eventually(partial(site.has_ended, done))
        for client in site.server.ask("CLIENT", "LIST").splitlines():
            fields = dict(field.partition("=")[::2] for field in client.split())
            if "fairlane" not in fields["name"] and fields["cmd"] in ("brpop", "subscribe", "psubscribe"):
                site.server.ask("CLIENT", "KILL", "ID", fields["id"])
    jobs = [site.ended(result.id) for result in results]
    assert {job.state for job in jobs} == {JobState.COMPLETED}, worker.log()
    assert Counter(site.shop.lines("begin")) == Counter(f"begin n{n}" for n in range(120)), "one has run twice"
    assert "Connection to broker lost" in worker.log()


def test_autoscale_is_refused(own_site: Site) -> None:
    worker = own_site.worker("--autoscale", "3,1", ready=False)
    assert worker.ended() != 0
    assert "does not work with --autoscale" in worker.log()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"pool_cls": SimpleNamespace(__module__="celery.concurrency.gevent")}, "the pool 'gevent'"),
        ({"pool_cls": SimpleNamespace(__module__="celery.concurrency.eventlet")}, "the pool 'eventlet'"),
        ({"use_eventloop": False}, "use Redis or RabbitMQ"),
        ({"app": SimpleNamespace(conf=SimpleNamespace(task_protocol=1))}, "task_protocol = 2"),
        ({"served": ["celery", "my queue"]}, "queue: 'my queue' must consist of .*; rename it"),
    ],
)
def test_what_cannot_work_is_refused(changed: dict[str, Any], sentence: str) -> None:
    usual: dict[str, Any] = {
        "pool_cls": SimpleNamespace(__module__="celery.concurrency.prefork"),
        "use_eventloop": True,
        "autoscale": None,
        "app": SimpleNamespace(conf=SimpleNamespace(task_protocol=2)),
    }
    _refuse(SimpleNamespace(**usual), ["celery"])
    with pytest.raises(ImproperlyConfigured, match=sentence):
        _refuse(SimpleNamespace(**usual | changed), changed.get("served", ["celery"]))


def test_the_size_of_the_pool_is_fixed(site: Site) -> None:
    [answer] = site.shop.app.control.pool_grow(1, reply=True, timeout=60, limit=1)
    assert "does not change the size" in str(answer)


def test_messages_of_an_unchanged_producer_are_adopted(site: Site) -> None:
    plain = site.shop.plain()
    ids = [plain.send_task("shop.add", (n, n), headers={"tenant": "old"}).id for n in range(20)]
    assert [site.app_result(id) for id in ids] == [2 * n for n in range(20)]
    job = site.ended(ids[0])
    assert (job.lane, job.state, job.queue, job.priority) == ("old", JobState.COMPLETED, "celery", Priority.NORMAL)
    assert site.shop.server.llen(f"{site.prefix}celery") == 0
    id = plain.send_task("shop.add", (1, 2), countdown=0.5).id
    assert site.app_result(id) == 3
    plain.close()
