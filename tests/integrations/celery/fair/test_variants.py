"""Other pools and stores: the solo pool, an SQLite store, and a worker that claims ahead."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import chain
from celery.exceptions import WorkerLostError

from fairlane.model.job import JobState
from tests.integrations.celery.kit import eventually

from .site import Site


@pytest.fixture
def solo(tmp_path: Path) -> Iterator[Site]:
    """A shop with a store in a file, and one worker that runs its tasks in its main thread."""
    made = Site(tmp_path, store=f"sqlite:///{tmp_path / 'fairlane.db'}")
    try:
        made.worker("-P", "solo", "-c", "4")
        yield made
    finally:
        made.close()


def test_the_solo_pool_and_sqlite(solo: Site) -> None:
    add = solo.task("add")
    [session] = solo.shop.fairlane.blocking.sessions()
    assert session.slots is not None
    assert session.slots.total == 1, "the pool has one place, whatever -c says"
    assert chain(add.s(1, 2), add.s(3)).apply_async().get(timeout=30) == 6
    assert solo.task("again").delay(1).get(timeout=30) == [0, 1]
    with pytest.raises(WorkerLostError):
        solo.task("leave").delay().get(timeout=30)
    late = solo.task("late").delay("solo", 1.0)
    eventually(lambda: solo.shop.lines("begin solo"))
    assert solo.workers[0].stop() == 0, solo.workers[0].log()
    assert solo.ended(late.id).state is JobState.COMPLETED


@pytest.fixture
def eager(tmp_path: Path) -> Iterator[Site]:
    """A shop with one worker that claims two jobs more than it runs."""
    made = Site(tmp_path, ahead=2)
    try:
        made.worker("-P", "prefork", "-c", "2")
        yield made
    finally:
        made.close()


def test_claiming_ahead(eager: Site) -> None:
    results = [eager.task("wait").delay(f"n{n}") for n in range(6)]
    eventually(lambda: sum(eager.job(result.id).state is JobState.RUNNING for result in results) == 4)
    eventually(lambda: len(eager.shop.lines("begin")) == 2)
    eager.workers[0].process.terminate()
    eventually(lambda: "Warm shutdown" in eager.workers[0].log())
    eager.shop.open_gate()
    assert eager.workers[0].ended() == 0, eager.workers[0].log()
    # What has not begun is returned uncharged.
    jobs = [eager.job(result.id) for result in results]
    begun = {line.rpartition(" ")[2] for line in eager.shop.lines("begin")}
    assert begun == {f"n{n}" for n, job in enumerate(jobs) if job.state is JobState.COMPLETED}
    assert {(job.state, job.attempt) for n, job in enumerate(jobs) if f"n{n}" not in begun} == {(JobState.PENDING, 0)}
