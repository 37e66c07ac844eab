"""The scripts: each lease is opened and closed once, in whatever order reports arrive."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from fairlane.errors import StoreUnavailable
from fairlane.integrations.celery.balancer import connection, reconciler
from fairlane.integrations.celery.balancer.broker import RedisBroker, _lease
from fairlane.integrations.celery.balancer.connection import Address
from fairlane.integrations.celery.balancer.leases import Lease, LeaseStore, Run
from fairlane.integrations.celery.balancer.publishing import Publisher
from fairlane.integrations.celery.balancer.reconciler import Reconciler
from tests.servers.valkey import own_server, server

from .fleet import load, until


@pytest.fixture
def store() -> Iterator[LeaseStore]:
    """Three queues without leases."""
    made = LeaseStore(Address(server().url), f"test-{secrets.token_hex(5)}", 3, 1.0, lambda: None)
    yield made
    made.close()


def total(store: LeaseStore) -> tuple[int, int]:
    loads, _ = store.loads()
    return sum(each.pending for each in loads), sum(each.running for each in loads)


def opened(store: LeaseStore, host: str = "w", number: int = 1) -> Run:
    lease = Lease.new(secrets.token_hex(4), 0)
    return Run(store.open([lease])[0], lease, host, number)


def test_a_repeated_open_counts_once(store: LeaseStore) -> None:
    lease = Lease.new("id:with:colons", 0)
    assert store.open([lease]) == store.open([lease]) == [0]
    assert store.loads()[0] == [load(1, 0), load(0, 0), load(0, 0)]
    assert store.drop([(0, lease), (0, lease)]) == 1
    assert total(store) == (0, 0)


def test_two_messages_of_one_id_are_two_leases(store: LeaseStore) -> None:
    first, second = (Lease.new("id", 0) for _ in range(2))
    store.open([first, second], 1)
    assert total(store) == (2, 0)
    store.start(Run(1, first, "w", 1))
    assert total(store) == (1, 1)
    store.start(Run(1, second, "w", 2))
    store.finish(Run(1, first, "w", 1))
    assert total(store) == (0, 1)


def test_the_first_end_closes_and_a_late_start_opens_nothing(store: LeaseStore) -> None:
    run, other = opened(store), opened(store, number=2)
    store.start(other)
    store.start(run)
    store.finish(run)
    store.finish(run)
    assert total(store) == (0, 1)
    store.start(run)
    assert total(store) == (0, 1)
    late = opened(store, number=3)
    store.finish(late)
    store.start(late)
    assert total(store) == (0, 1)


def test_an_end_whose_start_was_lost_closes_the_pending_lease(store: LeaseStore) -> None:
    run = opened(store)
    store.finish(run)
    assert total(store) == (0, 0)
    # The message is redelivered, and waits: a second report of the same end leaves it alone.
    store.open([run.lease], run.queue)
    store.finish(run)
    assert total(store) == (1, 0)


def test_a_host_that_was_considered_dead_and_returns_reports_what_it_runs(store: LeaseStore) -> None:
    run = opened(store)
    store.start(run)
    store.beat("w", [0], 1, [run.name], [])
    until(lambda: store.reap("x", 0)[0] == 1)
    assert total(store) == (0, 0)
    assert store.loads()[1] == []
    assert store.beat("w", [0], 1, [run.name], []) == {run.name}
    store.start(run)
    assert total(store) == (0, 1)
    assert store.loads()[1] == [0]
    assert store.beat("w", [0], 1, [run.name], []) == set()


def test_a_start_after_its_lease_was_closed_is_counted_once(store: LeaseStore) -> None:
    run = opened(store)
    store.drop([(run.queue, run.lease)])
    store.start(run)
    assert total(store) == (0, 1)
    store.finish(run)
    assert total(store) == (0, 0)


def test_an_exception_of_a_signal_handler_mixes_up_no_replies(
    store: LeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(store), opened(store)
    write = connection.Channel.write

    def interrupted(channel: connection.Channel, words: tuple[str | int, ...]) -> None:
        write(channel, words)
        monkeypatch.undo()
        raise SoftTimeLimitExceeded

    store.start(first)
    monkeypatch.setattr(connection.Channel, "write", interrupted)
    with pytest.raises(SoftTimeLimitExceeded):
        store.start(second)
    assert total(store) == (0, 2)


def test_a_start_without_a_lease_takes_none_of_another(store: LeaseStore) -> None:
    opened(store)
    store.start(Run(0, Lease.of_message(None, "foreign", 0), "w", 1))
    assert total(store) == (1, 1)


def test_a_heartbeat_closes_what_is_over_and_reports_what_is_missing(store: LeaseStore) -> None:
    over, runs, newer, lost = (opened(store, number=number) for number in (1, 2, 9, 3))
    for run in (over, runs, newer):
        store.start(run)
    assert store.beat("w", [0, 2], 5, [runs.name, lost.name], []) == {lost.name}
    assert total(store) == (1, 2)
    assert store.loads()[1] == [0, 2]
    assert store.beat("other", [1], 0, [], []) == set()
    assert store.loads()[1] == [0, 1, 2]
    assert store.leave("w") == 2
    assert store.loads()[1] == [1]
    assert total(store) == (1, 0)


def test_only_queues_with_a_live_consumer_are_eligible(store: LeaseStore) -> None:
    store.beat("w", [1, 2], 0, [], [])
    assert store.open([Lease.new("a", 0), Lease.new("b", 0), Lease.new("c", 0)]) == [1, 2, 1]
    # It stops to consume one of them.
    store.beat("w", [1], 0, [], [])
    assert store.open([Lease.new("d", 0)]) == [1]
    store.leave("w")
    assert store.open([Lease.new("e", 0)]) == [0]


def test_a_silent_host_is_dead_even_without_a_heartbeat(store: LeaseStore) -> None:
    store.start(opened(store))
    assert total(store) == (0, 1)
    until(lambda: store.reap("x", 0)[0] == 1)
    assert total(store) == (0, 0)


def test_one_host_reconciles_at_a_time(store: LeaseStore) -> None:
    assert store.reap("a", 60) == (0, True)
    assert store.reap("b", 60) == (0, False)
    assert store.reap("a", 60) == (0, True)
    assert store.reap("", 0) == (0, False)


def test_expired_and_revoked_messages_leave_the_load(store: LeaseStore) -> None:
    leases = [Lease.new("soon", 0, 0.05), Lease.new("later", 0, 60.0), Lease.new("revoked", 0)]
    store.open(leases)
    until(lambda: total(store) == (2, 0))
    assert store.revoke(["revoked", "unknown"]) == 1
    assert store.revoke(["revoked"]) == 0
    assert total(store) == (1, 0)
    assert store.gone(leases) == {leases[2].name}


def test_without_a_list_of_messages_old_leases_of_an_empty_queue_are_closed(
    store: LeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("counting", broker="memory://")
    publisher = Publisher(store)
    with app.connection_for_write() as connection:
        for name in publisher.names:
            # All applications of this process share that broker, and another test may have left a message there.
            connection.default_channel.queue_purge(name)
    looking = Reconciler(app, publisher, 1.0)
    opened(store)
    for _ in range(2):
        assert looking.look(store) == 0
    assert total(store) == (1, 0)
    monkeypatch.setattr(reconciler, "STALE_SECONDS", 0.0)
    assert [looking.look(store), looking.look(store)] == [0, 1]
    assert total(store) == (0, 0)
    looking.close()
    app.close()


def test_scripts_are_loaded_again_after_a_flush(store: LeaseStore) -> None:
    run = opened(store)
    store.start(run)
    server().ask("SCRIPT", "FLUSH")
    store.finish(run)
    assert total(store) == (0, 0)


def test_a_first_report_reaches_a_server_that_does_not_know_the_scripts() -> None:
    with own_server() as mine:
        producer, worker = (LeaseStore(Address(mine.url), "n", 2, 60.0, lambda: None) for _ in range(2))
        run = opened(producer)
        worker.start(run)
        assert total(producer) == (0, 1)
        worker.finish(run)
        assert total(producer) == (0, 0)
        producer.close()
        worker.close()


def test_a_broken_server_is_left_alone_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    recoveries: list[float] = []
    monkeypatch.setattr(connection, "SHORTEST_PAUSE", 60.0)
    monkeypatch.setattr(connection, "LONGEST_PAUSE", 60.0)
    with own_server() as mine:
        store = LeaseStore(Address(mine.url), "n", 2, 1.0, lambda: recoveries.append(time.monotonic()))
        opened(store)
        mine.kill()
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                store.loads()
        mine.start()
        with pytest.raises(StoreUnavailable, match="recently"):
            store.loads()
        store._connections.get()._closed_until = 0.0
        assert total(store) == (0, 0)
        assert len(recoveries) == 1
        store.close()


def test_a_busy_queue_is_not_read_at_every_look(store: LeaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers differ by another amount each time. A difference that stays is read, confirmed and corrected."""
    app = Celery("looking", broker=server().url)
    app.conf.broker_transport_options = {"global_keyprefix": f"{secrets.token_hex(5)}:"}
    looking = Reconciler(app, Publisher(store), 1.0)
    reads: list[str] = []
    messages = RedisBroker.messages

    def read(broker: RedisBroker, queue: str) -> dict[str, Lease]:
        reads.append(queue)
        return messages(broker, queue)

    monkeypatch.setattr(RedisBroker, "messages", read)
    for _ in range(4):
        store.open([Lease.new(secrets.token_hex(4), 0)], 1)
        assert looking.look(store) == 0
    assert reads == []
    assert [looking.look(store) for _ in range(2)] == [0, 4]
    assert total(store) == (0, 0)
    looking.close()
    app.close()


def test_a_waiting_message_of_protocol_1_is_found() -> None:
    """Its id is in the body, which is not read. If it were not found, its lease would be closed."""
    assert _lease({"headers": {"fairlane_lease": "a:b:0:-"}}) == Lease("a:b:0:-", "a:b")
    assert _lease({"headers": {}}) is None


@pytest.mark.parametrize("expires", [60, "soon"])
def test_an_expiry_that_is_no_time_does_not_keep_the_queue_from_being_read(expires: object) -> None:
    assert _lease({"headers": {"id": "a", "fairlane_lease": "a:0:-", "expires": expires}}) == Lease("a:0:-", "a")
