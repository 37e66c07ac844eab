"""Fair mode on the stores that are not Redis: the same endings, lanes and rescues, from processes that are forked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import chord, states
from celery.exceptions import TaskRevokedError, WorkerLostError

from fairlane.model.job import JobState, Reason
from tests.integrations.celery.kit import eventually
from tests.servers import postgresql

from .site import Site


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A shop with a worker of one process, whose jobs are in the store of the parameter."""
    server = None if request.param == "sqlite" else postgresql.server()
    url = f"sqlite:///{tmp_path / 'fairlane.db'}" if server is None else server.fresh_database()
    made = Site(tmp_path, store=url)
    try:
        made.worker("-P", "prefork", "-c", "1")
        yield made
    finally:
        made.close()
        if server is not None:
            server.done(url)


def test_endings_lanes_and_rescues(site: Site) -> None:
    add, wait, shop = site.task("add"), site.task("wait"), site.shop
    result = chord([add.s(i, 1) for i in range(3)], site.task("total").s()).apply_async()
    assert result.get(timeout=120) == 6
    assert site.task("again").delay(1).get(timeout=120) == [0, 1]
    lane = site.app_result(site.task("publish").apply_async(headers={"tenant": "ann"}).get(timeout=120))
    assert lane == "ann"
    with pytest.raises(ValueError, match="broken"):
        site.task("fail").delay("broken").get(timeout=120)

    # The one process is taken: tenants take turns behind it, and what waits can be revoked.
    first = wait.delay("first")
    eventually(lambda: shop.lines("begin first"))
    crowd = [site.task("note").apply_async((f"crowd{n}",), headers={"tenant": "crowd"}) for n in range(4)]
    newcomer = site.task("note").apply_async(("newcomer",), headers={"tenant": "newcomer"})
    revoked = add.delay(1, 1)
    revoked.revoke()
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=120)
    shop.open_gate()
    for each in (first, *crowd, newcomer):
        each.get(timeout=120)
    order = [line for line in shop.lines("begin") if "crowd" in line or "newcomer" in line]
    assert order.index("begin newcomer") <= 1, order

    # A worker is killed; the next one runs what may run again.
    late = site.task("late").delay("late", 3)
    eventually(lambda: shop.lines("begin late"))
    site.workers[0].kill()
    site.worker("-P", "prefork", "-c", "1")
    assert late.get(timeout=120) == "late"
    assert [attempt.outcome for attempt in site.ended(late.id).attempts] == ["crashed", "completed"]
    recount = shop.fairlane.blocking.recount()
    assert (recount.jobs, recount.differences) == (0, ())


def test_a_process_that_survived_a_stop_and_dies_later_has_crashed(site: Site) -> None:
    """billiard remembers that a process was to be terminated, and reports its later death as that."""
    survivor = site.task("deaf").delay("deaf")
    eventually(lambda: site.shop.lines("begin deaf"))
    survivor.revoke(terminate=True)
    eventually(lambda: survivor.state == states.REVOKED)
    # The signal is sent after the state was written.
    eventually(lambda: site.shop.lines("ignores deaf"))
    site.shop.open_gate()
    assert site.ended(survivor.id).state is JobState.COMPLETED
    # It runs in the same process, and nobody has asked to stop it.
    killed = site.task("suicide").delay("killed")
    with pytest.raises(WorkerLostError):
        killed.get(timeout=120)
    job = site.ended(killed.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    assert site.task("add").delay(1, 2).get(timeout=120) == 3
