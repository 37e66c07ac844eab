"""Workers come, stop and die; stores vanish; messages are purged: counts and choices follow."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kombu.entity import Exchange
from kombu.exceptions import OperationalError

from fairlane.errors import StoreUnavailable
from fairlane.store.diagnosis import Level
from tests.servers.valkey import own_server, server
from tests.sizes import sized

from .fleet import Fleet, fleet_of, load, until

MakeFleet = Callable[..., Fleet]
QUICK = 1.0
"""The heartbeat where a worker is killed: it is considered dead five of them later."""


def test_waiting_and_running_count_alike(make_fleet: MakeFleet) -> None:
    """SC-02, and SC-07: a reset recounts."""
    fleet = make_fleet(2, heartbeat=QUICK)
    worker = fleet.worker("-Q", "queue_0", pool="threads", concurrency=3, ready=False)
    # It consumes queue_1, and is busy with a task of another queue.
    second = fleet.worker("-Q", "queue_1,elsewhere", pool="threads", concurrency=1, ready=False)
    fleet.task("wait").apply_async(("busy",), queue="elsewhere")
    for _ in range(3):
        fleet.task("wait").apply_async(("gate",), queue="queue_0")
    until(lambda: fleet.pairs() == [(0, 3), (0, 0)] and "busy" in fleet.names(), fleet.pairs)
    until(lambda: fleet.balancer.diagnose()[2].level is Level.OK, fleet.balancer.diagnose)
    for _ in range(2):
        fleet.task("ok").apply_async(queue="queue_1")
    assert fleet.pairs() == [(0, 3), (2, 0)]
    for expected in ([(0, 3), (3, 0)], [(1, 3), (3, 0)], [(1, 3), (4, 0)], [(2, 3), (4, 0)]):
        fleet.task("wait").delay("gate")
        assert fleet.pairs() == expected
    assert fleet.balancer.reset("queue_0") == {"queue_0": load(2, 3), "queue_1": load(4, 0)}
    assert fleet.balancer.reset() == {"queue_0": load(2, 3), "queue_1": load(4, 0)}
    fleet.open("busy")
    until(lambda: fleet.pairs() == [(2, 3), (1, 1)], fleet.pairs)
    # A killed worker: its execution leaves the load, and its queue gets no task until another consumes it.
    second.kill()
    until(lambda: fleet.pairs()[1][1] == 0, fleet.pairs)
    waiting = fleet.pairs()[1]
    fleet.task("wait").delay("gate")
    assert fleet.pairs() == [(3, 3), waiting]
    fleet.open("gate")
    until(lambda: fleet.pairs() == [(0, 0), waiting], fleet.pairs)
    worker.stop()
    assert fleet.balancer.diagnose()[2].level is Level.WARN
    # Nothing was lost but what the killed worker had acknowledged.
    assert fleet.names().count("gate") == 6 + 1
    assert fleet.names().count("ok") == 2


def test_one_execution_is_one_decrement(make_fleet: MakeFleet) -> None:
    """SC-03."""
    fleet = make_fleet(1)
    fleet.worker(concurrency=3)
    for gate in ("a", "b", "c"):
        fleet.task("wait").delay(gate)
    fleet.until_total(0, 3)
    for gate, how, left in (("a", "fail", 2), ("b", "", 1), ("c", "fail", 0)):
        fleet.open(gate, how)
        fleet.until_total(0, left)
        end = time.monotonic() + sized(0.3, 2.5)
        while time.monotonic() < end:
            assert fleet.pairs() == [(0, left)]


def test_cancelled_and_expired_tasks_leave_the_load(make_fleet: MakeFleet) -> None:
    """SC-05: a worker of another queue remembers the revokes."""
    fleet = make_fleet(1)
    worker = fleet.worker("-Q", "elsewhere", concurrency=1)
    results = [fleet.task("ok").delay(k) for k in range(4)]
    results.append(fleet.task("ok").apply_async((4,), expires=1))
    for result in results[:2]:
        result.revoke()
    until(lambda: fleet.pairs() == [(2, 0)], fleet.pairs)
    results[0].revoke()
    assert fleet.pairs() == [(2, 0)]
    fleet.balancer.reset()
    assert fleet.pairs() == [(2, 0)]
    # The same worker: it remembers the revokes.
    fleet.app.control.add_consumer("queue_0", destination=[worker.name])
    until(lambda: len(fleet.executions()) == 2 and not fleet.waiting()[0], fleet.executions)
    fleet.until_total(0, 0)
    assert {execution[1] for execution in fleet.executions()} == {result.id for result in results[2:4]}
    # Each is final, for a reason of its own.
    until(lambda: all(result.ready() for result in results), [result.state for result in results].__repr__)
    assert [result.state for result in results] == ["REVOKED"] * 2 + ["SUCCESS"] * 2 + ["REVOKED"]
    assert [str(results[k].result) for k in (0, 1, 4)] == ["revoked", "revoked", "expired"]


def test_a_failed_publish_gives_its_lease_back(tmp_path: Path) -> None:
    elsewhere = server().url
    with own_server() as broker, fleet_of(broker, tmp_path, 2, url=elsewhere, backend=elsewhere) as fleet:
        fleet.task("ok").delay()
        broker.kill()
        for _ in range(2):
            with pytest.raises(OperationalError):
                fleet.task("ok").delay()
        with pytest.raises(OperationalError):
            fleet.balancer.enqueue_many(fleet.task("ok").s() for _ in range(10))
        assert fleet.total() == (1, 0)
        broker.start()


def test_a_store_that_goes_down_and_returns(tmp_path: Path) -> None:
    """SC-06: the broker and the counts are on one server, which is down in the middle of a stream."""
    tasks, seconds = sized((150, 1.5), (500, 5.0))
    with own_server(durable=True) as both, fleet_of(both, tmp_path, 3, backend=server().url) as fleet:
        ids, errors = [], 0
        returns = threading.Timer(seconds, both.start)
        for number in range(tasks):
            if number == tasks // 3:
                both.kill()
                returns.start()
            try:
                ids.append(fleet.task("ok").delay().id)
            except OperationalError:
                errors += 1
        returns.join()
        ids.append(fleet.task("ok").delay().id)
        assert errors, "the outage was not noticed"
        waiting = [id for queue in fleet.waiting() for id in queue]
        assert set(ids) <= set(waiting)
        assert len(waiting) == len(set(waiting))
        # At most the one that was on its way when the server died was stored and not confirmed.
        assert len(waiting) - len(ids) <= 1
        fleet.until_total(len(waiting), 0)
        assert [len(queue) for queue in fleet.waiting()] == [pair[0] for pair in fleet.pairs()]


def test_without_the_balancers_store_tasks_are_published_and_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server() as counts, fleet_of(server(), tmp_path, 3, url=counts.url) as fleet:
        worker = fleet.worker(pool="threads", concurrency=2)
        fleet.task("wait").delay("first")
        fleet.until_total(0, 1)
        counts.kill()
        for _ in range(6):
            fleet.task("wait").delay("second")
        assert [record.levelname for record in caplog.records if "cannot use" in record.message] == ["WARNING"]
        assert fleet.balancer.diagnose()[0].level is Level.ERROR
        with pytest.raises(StoreUnavailable):
            fleet.balancer.loads()
        fleet.open("first")
        until(lambda: "second" in fleet.names(), fleet.names)
        # It has forgotten everything: the worker and the broker know it.
        counts.start()
        fleet.until_total(4, 2)
        assert "Traceback" not in worker.log.read_text()
        fleet.open("second")
        fleet.until_total(0, 0)
        assert len(fleet.executions()) == 7


def test_a_purge_and_a_dead_worker_are_noticed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, heartbeat=QUICK, transport_options={"visibility_timeout": 3600})
    worker = fleet.worker(concurrency=1)
    fleet.task("wait").delay("early")
    fleet.until_total(0, 1)
    fleet.task("wait_late").delay("late")
    for _ in range(10):
        fleet.task("ok").delay()
    fleet.until_total(11, 1)
    fleet.purge()
    # What the worker has received stays.
    until(lambda: fleet.total() in ((0, 1), (1, 1), (2, 1)), fleet.pairs)
    held = fleet.total()[0]
    worker.signal(signal.SIGSTOP)
    worker.signal(signal.SIGCONT)
    worker.kill()
    fleet.worker(concurrency=1)
    # The message that the dead worker held is in the broker's list of unacknowledged ones: it waits.
    fleet.until_total(held, 0)
    fleet.open("early")
    fleet.open("late")


def test_a_message_of_a_dead_worker_is_counted_when_the_broker_delivers_it_again(make_fleet: MakeFleet) -> None:
    often = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    fleet = make_fleet(2, heartbeat=QUICK, transport_options=often)
    first = fleet.worker(concurrency=1)
    result = fleet.task("wait_late").delay("late")
    # The execution is counted before the task function begins.
    until(lambda: len(fleet.executions()) == 1, fleet.executions)
    fleet.until_total(0, 1)
    first.kill()
    # Its execution leaves the load although no other worker is there to notice.
    fleet.until_total(0, 0)
    fleet.worker(concurrency=1)
    fleet.until_total(0, 1)
    fleet.open("late")
    fleet.until_total(0, 0)
    assert [execution[1] for execution in fleet.executions()] == [result.id] * 2


def test_a_broadcast_is_not_counted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, broadcast="everyone")
    for _ in range(2):
        fleet.worker("-Q", "everyone,queue_0,queue_1", pool="threads", concurrency=2)
    fleet.task("wait").delay("counted")
    fleet.until_total(0, 1)
    # The same id runs once in each worker.
    fanout = Exchange("everyone", type="fanout")
    result = fleet.task("wait").apply_async(("broadcast",), queue="everyone", declare=[fanout])
    until(lambda: fleet.names().count("broadcast") == 2, fleet.executions)
    assert {execution[1] for execution in fleet.executions() if execution[0] == "broadcast"} == {result.id}
    assert fleet.total() == (0, 1)
    fleet.open("broadcast")
    fleet.task("ok").delay()
    until(lambda: "ok" in fleet.names(), fleet.names)
    fleet.until_total(0, 1)
    fleet.open("counted")
    fleet.until_total(0, 0)


def test_a_warm_stop_leaves_waiting_messages_counted(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    worker = fleet.worker(concurrency=1)
    fleet.task("wait").delay("gate")
    fleet.until_total(0, 1)
    for _ in range(4):
        fleet.task("ok").delay()
    worker.process.terminate()
    until(lambda: "no live worker" in fleet.balancer.diagnose()[2].what, fleet.balancer.diagnose)
    fleet.open("gate")
    worker.process.wait(60)
    fleet.until_total(4, 0)
    assert sum(map(len, fleet.waiting())) == 4
    fleet.worker(pool="solo", concurrency=1)
    fleet.until_total(0, 0)
    assert len(fleet.executions()) == 5
