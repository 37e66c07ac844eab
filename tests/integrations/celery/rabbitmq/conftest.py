"""RabbitMQ as the broker. Where it is not installed, there is nothing to test."""

from collections.abc import Iterator

import pytest

from tests.integrations.celery.fair.site import Site
from tests.servers import rabbitmq

collect_ignore_glob = [] if rabbitmq.program() is not None else ["test_*.py"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A shop in fair mode with one worker; jobs and results are in Valkey."""
    made = Site(tmp_path_factory.mktemp("rabbitmq"), broker=rabbitmq.server().url)
    try:
        made.worker("-P", "prefork", "-c", "2", "-Q", "celery,other")
        yield made
    finally:
        made.close()
