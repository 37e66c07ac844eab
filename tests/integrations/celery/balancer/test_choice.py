"""Where tasks go while no worker runs: the order of the queues, bulk submissions, the hash route, explicit queues."""

from __future__ import annotations

import secrets
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from fairlane import Fairlane
from fairlane.errors import InvalidInput, NotFound
from fairlane.integrations.celery import Fair, LoadBalancer
from fairlane.integrations.celery.balancer.leases import Lease
from tests.servers.valkey import server
from tests.sizes import sized

from .fleet import Fleet, load

MakeFleet = Callable[..., Fleet]

ALICE = 15
"""The number of her queue: the same in every process and release, because messages may wait there."""
FOR_ALICE = """
from tests.integrations.celery.balancer.application import app
for number in range({}):
    app.fairlane_balancer.enqueue_for_user(app.tasks["ok"], "alice", number)
"""
CROWD = """
import os
from tests.integrations.celery.balancer.application import app
processes, tasks = {}, {}
read, write = os.pipe()
children = []
for _ in range(processes):
    child = os.fork()
    if not child:
        # All begin when the parent closes the pipe.
        os.close(write)
        os.read(read, 1)
        for number in range(tasks):
            app.tasks["ok"].delay(number)
        os._exit(0)
    children.append(child)
os.close(write)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
"""


def run(fleet: Fleet, code: str) -> None:
    """Run code that imports the application of a fleet, in another process."""
    subprocess.run([sys.executable, "-c", code], env=fleet.environment(), check=True, timeout=250)


def test_tasks_go_round_in_the_order_of_the_index(make_fleet: MakeFleet) -> None:
    """SC-01: 45 tasks over 20 queues."""
    fleet = make_fleet(20)
    ids = [fleet.task("ok").delay(k).id for k in range(45)]
    waiting = fleet.waiting()
    assert [next(q for q in range(20) if id in waiting[q]) for id in ids] == [k % 20 for k in range(45)]
    assert [load.total for load in fleet.balancer.loads().values()] == [3] * 5 + [2] * 15


def test_ties_go_to_the_lowest_number(make_fleet: MakeFleet) -> None:
    """SC-01: every queue has one task but 2 and 10, which come next in the order of their numbers."""
    fleet = make_fleet(20)
    for queue in range(20):
        if queue not in (2, 10):
            fleet.task("ok").apply_async((), queue=f"queue_{queue}")
    ids = [fleet.task("ok").delay().id for _ in range(2)]
    waiting = fleet.waiting()
    assert (waiting[2], waiting[10]) == ([ids[0]], [ids[1]])


def test_a_bulk_submission_is_spread_level_by_level(make_fleet: MakeFleet) -> None:
    """SC-04: one queue holds 30 tasks; a batch of 1,000 levels the others first."""
    fleet = make_fleet(20)
    for _ in range(30):
        fleet.task("ok").apply_async((), queue="queue_7")
    result = fleet.balancer.enqueue_many(fleet.task("ok").s(k) for k in range(1_000))
    assert len(result.results) == 1_000
    pending = [pair[0] for pair in fleet.pairs()]
    others = pending[:7] + pending[8:]
    assert sum(pending) == 1_030
    assert max(others) - min(others) <= 1
    assert pending[7] <= max(others) + 1
    assert [len(ids) for ids in fleet.waiting()] == pending


def test_a_bulk_submission_has_leases_as_single_tasks_do(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task id that comes twice is two messages, and one lease for each. Leases expire with their messages."""
    fleet = make_fleet(2)
    ok = fleet.task("ok")
    given: list[Lease] = []
    twice = ok.s().set(task_id="twice")
    fleet.balancer.enqueue_many([twice, twice])
    assert fleet.total() == (2, 0)

    def note(leases: Sequence[Lease]) -> None:
        given.extend(leases)

    monkeypatch.setattr(fleet.balancer._publisher, "allot", note)
    monkeypatch.setattr(ok, "expires", 30)
    due = datetime.now(UTC) + timedelta(seconds=50)
    expiries: list[Any] = [{}, {"expires": None}, {"expires": 40}, {"expires": due}, {"expires": due.isoformat()}]
    fleet.balancer.enqueue_many(ok.s().set(**each) for each in expiries)
    assert [lease.expires_in and round(lease.expires_in, -1) for lease in given] == [30, None, 40, 50, 50]


def test_a_user_has_one_queue(make_fleet: MakeFleet) -> None:
    """SC-08: the same in every process and after a restart, and counted."""
    fleet = make_fleet(20)
    for number in (4, 3, 3):
        run(fleet, FOR_ALICE.format(number))
    queue = fleet.balancer.queue_for_user("alice")
    index = fleet.balancer.queues.index(queue)
    assert index == ALICE
    assert fleet.balancer.load(queue) == load(10, 0)
    assert fleet.total() == (10, 0)
    assert len(fleet.waiting()[index]) == 10
    for _ in range(19):
        fleet.task("ok").delay()
    assert fleet.balancer.load(queue) == load(10, 0)
    fleet.balancer.enqueue_for_user(fleet.task("ok"), "")
    fleet.balancer.enqueue_for_user(fleet.task("ok"), None)
    assert len(fleet.waiting()[0]) == 3 + (10 if index == 0 else 0)


def test_every_way_to_publish_is_routed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(4)
    ok = fleet.task("ok")
    ok.delay(1)
    ok.apply_async((1,))
    fleet.app.send_task("not registered here")
    group(ok.s(1), ok.s(2)).apply_async()
    chain(ok.s(1), ok.s()).apply_async()
    chord([ok.s(1), ok.s(2)], fleet.task("tsum").s()).apply_async()
    assert fleet.pairs() == [(2, 0)] * 4
    fleet.balancer.enqueue_many([chain(ok.s(1), ok.s()), ok.s(), ok.s().set(queue="elsewhere")])
    assert fleet.total() == (10, 0)


def test_foreign_queues_and_routes_are_left_alone(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, conf={"task_routes": {"fail": {"queue": "mine"}}})
    fleet.task("fail").delay()
    fleet.task("ok").apply_async(queue="elsewhere")
    fleet.task("ok").apply_async(queue="on the fly")
    assert fleet.total() == (0, 0)
    assert "elsewhere" in fleet.app.amqp.queues
    # Balancing on request overrides the route.
    fleet.balancer.enqueue(fleet.task("fail"))
    assert fleet.total() == (1, 0)


def test_eager_tasks_are_not_counted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, conf={"task_always_eager": True})
    ok = fleet.task("ok")
    assert ok.delay(1).get() == 1
    assert fleet.balancer.enqueue(ok, 1, 2).get() == 2
    assert [each.get() for each in fleet.balancer.enqueue_many([ok.s(1), ok.s()]).results] == [1, 0]
    assert ok.apply((1,)).get() == 1
    assert ok(1) == 1
    assert fleet.total() == (0, 0)


def test_many_processes_enqueue_at_once(make_fleet: MakeFleet) -> None:
    """H0.2: choosing and counting are one step."""
    processes, tasks = sized((8, 400), (16, 2_000))
    fleet = make_fleet(20)
    run(fleet, CROWD.format(processes, tasks // processes))
    totals = [load.total for load in fleet.balancer.loads().values()]
    assert sum(totals) == tasks
    assert max(totals) - min(totals) <= 1
    assert [len(ids) for ids in fleet.waiting()] == totals


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("queues", {"queues": 0}),
        ("queues", {"queues": True}),
        ("queues", {"queues": 2_000}),
        ("url", {"url": "http://host"}),
        ("url", {"url": "redis://user:secret@host:port"}),
        ("namespace", {"namespace": "a b"}),
        ("heartbeat", {"heartbeat": 0}),
    ],
)
def test_invalid_arguments_are_rejected_by_name(
    make_fleet: MakeFleet, field: str, arguments: dict[str, object]
) -> None:
    given: dict[str, object] = {"url": "redis://localhost", **arguments}
    with pytest.raises(InvalidInput) as rejected:
        LoadBalancer(Celery("other"), **given)  # type: ignore[arg-type]  # the mistake
    assert rejected.value.field == field
    assert "secret" not in str(rejected.value)


def test_what_cannot_be_enqueued_is_refused_before_anything_is_counted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    ok = fleet.task("ok")
    for call in (fleet.balancer.enqueue, lambda name: fleet.balancer.enqueue_for_user(name, "alice")):
        with pytest.raises(InvalidInput, match="task: must be a task or a signature of Celery, not a str"):
            call("ok")
    with pytest.raises(InvalidInput, match="signatures: must be signatures, such as"):
        fleet.balancer.enqueue_many([ok.s(), ok])
    for one in (ok.s(), group(ok.s(), ok.s())):
        with pytest.raises(InvalidInput, match="signatures: must be a list of signatures, not a single one"):
            fleet.balancer.enqueue_many(one)
    assert fleet.total() == (0, 0)


def test_an_application_has_one_balancer_and_only_its_queues_have_loads(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    with pytest.raises(InvalidInput):
        LoadBalancer(fleet.app, "redis://localhost")
    with pytest.raises(InvalidInput):
        LoadBalancer("app", "redis://localhost")
    with pytest.raises(NotFound, match="queue_1"):
        fleet.balancer.load("queue_2")


@pytest.mark.parametrize("first", ["fair", "balancer"])
def test_fair_mode_may_have_other_queues_only(tmp_path: Path, first: str) -> None:
    def make(name: str, queues: list[str] | None) -> LoadBalancer:
        app = Celery(name, broker="memory://")
        fairlane = Fairlane(f"sqlite:///{tmp_path}/{name}.db")
        if first == "fair":
            Fair(app, fairlane, queues=queues)
        balancer = LoadBalancer(app, server().url, queues=2, namespace=f"test-{secrets.token_hex(5)}")
        if first == "balancer":
            Fair(app, fairlane, queues=queues)
        app.send_task("anything")
        app.send_task("anything", queue="reports")
        fairlane.blocking.close()
        return balancer

    for queues in (None, ["queue_1"]):
        with pytest.raises(InvalidInput, match=r"Fair\(queues="):
            make(f"both{len(queues or ())}", queues)
    balancer = make("apart", ["reports"])
    assert list(balancer.loads().values()) == [load(1, 0), load(0, 0)]
    with closing(sqlite3.connect(tmp_path / "apart.db")) as rows:
        assert rows.execute("SELECT count(*) FROM fairlane_jobs").fetchone() == (1,)
    balancer.close()


def test_every_way_to_publish_sets_the_id_that_a_worker_requires(make_fleet: MakeFleet) -> None:
    """A message with a task and without an id blocks its queue: the worker takes it for a lost connection."""
    fleet = make_fleet(3)
    ok = fleet.task("ok")
    results = [
        *(ok.delay(), ok.apply_async(), fleet.app.send_task("ok"), fleet.balancer.enqueue(ok)),
        *(fleet.balancer.enqueue_for_user(ok, "alice"), *fleet.balancer.enqueue_many([ok.s(), ok.s()])),
        *group(ok.s(), ok.s()).apply_async(),
    ]
    waiting = [id for queue in fleet.waiting() for id in queue]
    assert sorted(waiting) == sorted(result.id for result in results)
    assert fleet.total() == (len(results), 0)
