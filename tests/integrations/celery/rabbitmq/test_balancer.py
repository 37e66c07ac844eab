"""Balanced mode on RabbitMQ: tasks go to the least loaded queue, run, and leave the counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.celery.balancer.fleet import Fleet, load
from tests.servers import rabbitmq, valkey

pytestmark = pytest.mark.timeout(300)  # the server takes its time to start on a busy machine


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Three queues in RabbitMQ; counts and results are in Valkey."""
    server = valkey.server()
    made = Fleet(server, tmp_path, 3, broker=rabbitmq.server().url, backend=server.url)
    try:
        yield made
    finally:
        made.close()


def test_tasks_go_to_the_least_loaded_queue_and_leave_the_counts(fleet: Fleet) -> None:
    results = [fleet.balancer.enqueue(fleet.task("ok"), number) for number in range(4)]
    assert list(fleet.balancer.loads().values()) == [load(2, 0), load(1, 0), load(1, 0)]
    fleet.worker(concurrency=2)
    assert [result.get(timeout=120) for result in results] == [1] * 4
    fleet.until_total(0, 0)

    results = [fleet.balancer.enqueue(fleet.task("wait"), "gate") for _ in range(2)]
    fleet.until_total(0, 2)
    fleet.open("gate")
    for result in results:
        result.get(timeout=120)
    fleet.until_total(0, 0)
