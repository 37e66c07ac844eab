"""Every way an execution begins and ends leaves exact counts, on real workers that all tests of this file share.

One task runs all the time beside the others: an end that is counted twice would take it off the load.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from fairlane.integrations.celery.balancer.leases import Lease
from fairlane.integrations.celery.balancer.publishing import LEASE_HEADER
from tests.servers.valkey import server
from tests.sizes import sized

from .fleet import Fleet, fleet_of, until

Publish = Callable[[Fleet], Any]
STEADY_SECONDS = sized(0.15, 2.5)


@pytest.fixture(scope="module")
def prefork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A worker with processes."""
    yield from _with_worker("prefork", tmp_path_factory.mktemp("prefork"))


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A worker with threads."""
    yield from _with_worker("threads", tmp_path_factory.mktemp("threads"))


def _with_worker(pool: str, folder: Path) -> Iterator[Fleet]:
    with fleet_of(server(), folder, 3, heartbeat=1.0) as fleet:
        fleet.worker(pool=pool, concurrency=3)
        fleet.task("wait").delay("the end")
        fleet.until_total(0, 1)
        try:
            yield fleet
        finally:
            fleet.open("the end")


def _runs(fleet: Fleet, name: str, publish: Publish, executions: int) -> None:
    """Publish, wait for the executions, and for the counts of the one task that runs all the time."""
    before = fleet.names().count(name)
    publish(fleet)
    until(lambda: fleet.names().count(name) == before + executions, fleet.names)
    fleet.until_total(0, 1)
    _stays(fleet)


def _stays(fleet: Fleet, running: int = 1) -> None:
    """The counts stay right: late signals, and in a full run heartbeats, change nothing."""
    end = time.monotonic() + STEADY_SECONDS
    while time.monotonic() < end:
        assert fleet.total() == (0, running), fleet.pairs()
        time.sleep(0.05)


def _sends(name: str, *args: Any) -> Publish:
    return lambda fleet: fleet.task(name).delay(*args)


def _foreign_publisher(fleet: Fleet) -> None:
    from celery import Celery

    app = Celery("other", broker=fleet.settings["broker"])
    app.conf.broker_transport_options = {"global_keyprefix": fleet.settings["prefix"]}
    app.send_task("ok", queue="queue_1")
    app.close()


BOTH: dict[str, tuple[str, Publish, int]] = {
    "success": ("ok", _sends("ok"), 1),
    "failure": ("fail", _sends("fail"), 1),
    "retry": ("retry", _sends("retry_twice", 1), 2),
    "retries used up": ("retry", _sends("retry_twice", 5), 3),
    "ignore": ("ignore", _sends("ignore"), 1),
    "replace": ("ok", _sends("replace"), 1),
    "reject": ("reject", _sends("reject", False), 1),
    "reject and requeue": ("reject", _sends("reject", True), 2),
    "sys.exit": ("leave", _sends("leave"), 1),
    "group": ("ok", lambda fleet: group(fleet.task("ok").s() for _ in range(5)).apply_async(), 5),
    "chain": ("ok", lambda fleet: chain(fleet.task("ok").s(), fleet.task("ok").s()).apply_async(), 2),
    "chain whose first link fails": (
        "fail",
        lambda fleet: chain(fleet.task("fail").s(), fleet.task("ok").s()).apply_async(),
        1,
    ),
    "chord": ("ok", lambda fleet: chord([fleet.task("ok").s(1)] * 3, fleet.task("tsum").s()).apply_async(), 3),
    "chord with a member that fails": (
        "fail",
        lambda fleet: chord([fleet.task("ok").s(1), fleet.task("fail").s()], fleet.task("tsum").s()).apply_async(),
        1,
    ),
    "countdown": ("ok", lambda fleet: fleet.task("ok").apply_async(countdown=0.5), 1),
    "foreign queue": ("ok", lambda fleet: fleet.task("ok").apply_async(queue="elsewhere"), 1),
    "publisher without a balancer": ("ok", _foreign_publisher, 1),
}
PREFORK: dict[str, tuple[str, Publish, int]] = {
    "soft time limit": ("soft_limit", _sends("soft_limit"), 1),
    "hard time limit": ("hard_limit", _sends("hard_limit"), 1),
    "killed child": ("die", _sends("die"), 1),
    "killed child with a late acknowledgement": ("die_late", _sends("die_late"), 1),
    "killed child whose task is repeated": ("die_once", _sends("die_once"), 2),
}


@pytest.mark.parametrize("case", BOTH)
def test_counts_are_exact_with_processes(prefork: Fleet, case: str) -> None:
    _runs(prefork, *BOTH[case])


@pytest.mark.parametrize("case", PREFORK)
def test_counts_are_exact_with_processes_that_end(prefork: Fleet, case: str) -> None:
    _runs(prefork, *PREFORK[case])


@pytest.mark.parametrize("case", BOTH)
def test_counts_are_exact_with_threads(threads: Fleet, case: str) -> None:
    _runs(threads, *BOTH[case])


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_terminated_task_leaves_the_load(prefork: Fleet, signal: str) -> None:
    gate = f"never {signal}"
    result = prefork.task("wait").delay(gate)
    prefork.until_total(0, 2)
    until(lambda: gate in prefork.names())
    result.revoke(terminate=True, signal=signal)
    prefork.until_total(0, 1)
    _stays(prefork)


def test_a_thread_that_cannot_be_terminated_stays_in_the_load(threads: Fleet) -> None:
    result = threads.task("wait").delay("deaf")
    threads.until_total(0, 2)
    until(lambda: "deaf" in threads.names())
    result.revoke(terminate=True)
    # A second command, so that the first one was obeyed: Celery's pool of threads refuses it.
    assert threads.app.control.ping(timeout=5, limit=1)
    _stays(threads, 2)
    threads.open("deaf")
    threads.until_total(0, 1)
    _stays(threads)


def test_a_revoked_task_leaves_the_load_at_once_and_does_not_run(prefork: Fleet) -> None:
    results = [prefork.task("wait").delay("fill") for _ in range(3)]
    prefork.until_total(1, 3)
    # One waits for the pool, the other, which the worker has received too, for its time.
    waiting = [prefork.task("ok").delay("revoked"), prefork.task("ok").apply_async(("revoked",), countdown=0.5)]
    assert prefork.total() == (3, 3)
    for result in waiting:
        result.revoke()
    assert prefork.total() == (1, 3)
    for result in waiting:
        result.revoke()
    assert prefork.total() == (1, 3)
    prefork.open("fill")
    prefork.until_total(0, 1)
    until(lambda: not any(prefork.waiting()), prefork.waiting)
    assert not {result.id for result in waiting} & {execution[1] for execution in prefork.executions()}
    assert len(results) == 3
    _stays(prefork)


def test_an_expired_task_leaves_the_load(prefork: Fleet) -> None:
    for _ in range(3):
        prefork.task("wait").delay("fill again")
    prefork.until_total(1, 3)
    ok = prefork.task("ok")
    # The second one is received before it expires, because of its countdown.
    expiring = [ok.apply_async(expires=0.3), ok.apply_async(countdown=0.4, expires=0.3)]
    prefork.until_total(1, 3)
    prefork.open("fill again")
    prefork.until_total(0, 1)
    until(lambda: all(result.state == "REVOKED" for result in expiring), [each.state for each in expiring].__repr__)
    assert not {result.id for result in expiring} & {execution[1] for execution in prefork.executions()}
    _stays(prefork)


@pytest.mark.parametrize("kind", ["prefork", "threads"])
def test_messages_that_no_task_takes_leave_the_load(kind: str, request: pytest.FixtureRequest) -> None:
    fleet: Fleet = request.getfixturevalue(kind)
    fleet.app.send_task("not registered anywhere")
    # A body that is no JSON: the worker drops it without a signal.
    lease = Lease.new("undecodable", 0)
    fleet.balancer._store.open([lease], 0)
    headers = {"task": "ok", "id": lease.id, "retries": 0, LEASE_HEADER: lease.name}
    fleet.push("queue_0", json.dumps({**MESSAGE, "body": "bm90IEpTT04=", "headers": headers}))
    fleet.push("queue_0", json.dumps({**MESSAGE, "body": "W10=", "headers": {}}))
    fleet.task("ok").delay()
    until(lambda: not any(fleet.waiting()), fleet.waiting)
    fleet.until_total(0, 1)


MESSAGE = {
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "properties": {
        "delivery_mode": 2,
        "delivery_tag": "0f6f8f6e-2d3f-4f6e-9a67-4a54a1f0a001",
        "delivery_info": {"exchange": "", "routing_key": "queue_0"},
        "body_encoding": "base64",
        "priority": 0,
    },
}


def test_what_runs_is_counted_while_it_runs(prefork: Fleet) -> None:
    first = prefork.task("wait").delay("open soon")
    prefork.until_total(0, 2)
    # The lease is opened before the task writes its line.
    until(lambda: "open soon" in prefork.names(), prefork.names)
    queue = next(execution[4]["routing_key"] for execution in prefork.executions() if execution[1] == first.id)
    assert prefork.balancer.load(queue).running >= 1
    prefork.open("open soon")
    assert AsyncResult(first.id, app=prefork.app).get(timeout=120) == "open soon"
    prefork.until_total(0, 1)
