"""The store of the jobs goes down while tasks are published, and returns."""

import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest
from kombu.exceptions import OperationalError

from fairlane.model.job import Job, JobState
from tests.servers.valkey import ValkeyServer, own_server
from tests.sizes import sized

from .site import Site

TASKS = sized(150, 500)
SECONDS = sized(1.0, 5.0)
"""How long the store is gone."""
QUIET = "quiet"
"""A fair queue without a worker."""


def test_sc_06_a_failed_submission_leaves_nothing_behind(tmp_path: Path) -> None:
    with own_server(durable=True) as store:
        site = Site(tmp_path, store=store.url)
        try:
            _outage(site, store)
        finally:
            site.close()


def test_a_publish_is_repeated_as_the_policy_of_celery_says(tmp_path: Path) -> None:
    with own_server(durable=True) as store:
        site = Site(tmp_path, store=store.url)
        try:
            add = site.task("add")
            add.apply_async((1, 1), queue=QUIET)
            store.kill()
            with pytest.raises(OperationalError):
                add.apply_async((1, 2), queue=QUIET, retry=True, retry_policy={"max_retries": 1, "interval_start": 0})
            threading.Timer(0.5, store.start).start()
            patient = {"max_retries": None, "interval_start": 0.1, "interval_step": 0.1, "interval_max": 0.5}
            result = add.apply_async((1, 3), queue=QUIET, retry=True, retry_policy=patient)
            assert site.job(result.id).state is JobState.PENDING
        finally:
            site.close()


def _outage(site: Site, store: ValkeyServer) -> None:
    add = site.task("add")
    sent: list[str] = []
    failed: list[str] = []

    def publish(id: str) -> bool:
        try:
            add.apply_async((len(id), 1), task_id=id, queue=QUIET, retry=False)
        except OperationalError:
            return False
        return True

    returns = threading.Timer(SECONDS, store.start)
    for number in range(TASKS):
        if number == TASKS // 3:
            store.kill()
            returns.start()
        id = str(uuid4())
        (sent if publish(id) else failed).append(id)
    returns.join()
    assert failed, "the outage was not noticed"
    until = time.monotonic() + 60
    while not publish(failed[0]):
        assert time.monotonic() < until
    # Each id that was returned is there once, and of the others only one that was on its way at that moment may be.
    client = site.shop.fairlane.blocking
    stored = {job.id for job in _all(site)}
    assert set(sent) <= stored
    assert len(stored - set(sent) - {failed[0]}) <= 1
    [queue] = [each for each in client.queues() if each.name == QUIET]
    assert sum(each.pending for each in queue.classes) == len(stored)
    # Repeating them creates each once.
    for id in failed:
        assert publish(id)
    jobs = _all(site)
    assert sorted(job.id for job in jobs) == sorted([*sent, *failed])
    assert {job.state for job in jobs} == {JobState.PENDING}
    assert client.recount().differences == ()


def _all(site: Site) -> list[Job]:
    found: list[Job] = []
    cursor: str | None = None
    while True:
        page = site.shop.fairlane.blocking.find(queue=QUIET, limit=200, cursor=cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found
