"""Jobs that end without Celery have results all the same."""

import pytest
from celery import chain, chord, states
from celery.exceptions import ChordError, NotRegistered, TaskRevokedError, WorkerLostError
from celery.result import AsyncResult

from fairlane.model.job import JobState, Reason
from tests.integrations.celery.kit import eventually

from .site import Site

QUIET = "quiet"
"""A fair queue that no worker of the shared site serves."""


def quiet(site: Site) -> set[str]:
    """The jobs that wait in the quiet queue."""
    return {job.id for job in site.shop.fairlane.blocking.find(queue=QUIET, state=JobState.PENDING).jobs}


def fails(chord: AsyncResult) -> None:
    """Wait until Celery has failed a chord, whose `get()` may raise the error of a part before that."""
    with pytest.raises((ChordError, TaskRevokedError)):
        chord.get(timeout=30)
    eventually(lambda: chord.state == states.FAILURE)
    assert isinstance(chord.result, ChordError)


def test_expired_in_the_queue(site: Site) -> None:
    result = site.task("add").apply_async((1, 2), queue=QUIET, expires=0.3)
    with pytest.raises(TaskRevokedError, match="expired"):
        result.get(timeout=30)
    assert result.state == states.REVOKED
    assert site.job(result.id).reason is Reason.EXPIRED


def test_cancelled_while_waiting(site: Site) -> None:
    cancelled = site.task("add").apply_async((1, 2), queue=QUIET)
    site.shop.fairlane.blocking.cancel([cancelled.id])
    revoked = site.task("add").apply_async((1, 2), queue=QUIET)
    revoked.revoke()
    for result in (cancelled, revoked):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)


def test_a_chord_with_a_cancelled_member_raises(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    held = add.signature((1, 1)).set(queue=QUIET)
    result = chord([add.s(2, 2), held], total.s()).apply_async()
    waiting = next(each.id for each in result.parent.results if site.job(each.id).queue == QUIET)
    site.shop.fairlane.blocking.cancel([waiting])
    fails(result)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # by Celery
def test_a_chord_with_a_duplicate_of_a_unique_job_raises(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    holder = add.apply_async((1, 1), queue=QUIET, fairlane_unique="held")
    fails(chord([add.s(2, 2), add.signature((1, 1)).set(fairlane_unique="held")], total.s()).apply_async())
    behind = chain(add.signature((1, 1)).set(fairlane_unique="held"), add.s(1)).apply_async()
    with pytest.raises(TaskRevokedError, match=holder.id):
        behind.get(timeout=30)
    site.shop.fairlane.blocking.cancel([holder.id])


def test_a_chord_of_chains_with_a_cancelled_link_raises(site: Site) -> None:
    add, total = site.task("add"), site.task("total")
    header = [chain(add.signature((1, 1)).set(queue=QUIET), add.s(1)), add.s(2, 2)]
    before = quiet(site)
    result = chord(header, total.s()).apply_async()
    [waiting] = quiet(site) - before
    site.shop.fairlane.blocking.cancel([waiting])
    fails(result)


def test_a_chain_behind_a_cancelled_task_raises(site: Site) -> None:
    add = site.task("add")
    result = chain(add.signature((1, 1)).set(queue=QUIET), add.s(1), add.s(2)).apply_async()
    site.shop.fairlane.blocking.cancel([result.parent.parent.id])
    with pytest.raises(TaskRevokedError):
        result.get(timeout=30)


def test_a_result_that_a_worker_has_written_stays(site: Site) -> None:
    failed = site.task("fail").delay("mine")
    later = site.task("add").apply_async((1, 2), queue=QUIET, expires=0.2)
    with pytest.raises(TaskRevokedError):
        later.get(timeout=30)
    # The end of the first is behind the recorder now.
    with pytest.raises(ValueError, match="mine"):
        failed.get(timeout=30)


def test_a_caller_decides_whether_the_result_is_ignored(site: Site) -> None:
    note = site.task("note")
    site.task("fail").apply_async(("x",), ignore_result=True, link_error=note.si("ignored"))
    eventually(lambda: site.shop.lines("end ignored"))
    later = site.task("silent").apply_async(queue=QUIET, expires=0.2, ignore_result=False)
    with pytest.raises(TaskRevokedError):
        later.get(timeout=30)
    # The end of the first is behind the recorder now, and this is behind a second call of its error callback.
    assert note.delay("behind").get(timeout=30) == "behind"
    assert site.shop.lines("begin ignored") == ["begin ignored"]


@pytest.mark.parametrize("pool", ["prefork"], indirect=True)
def test_content_that_is_not_accepted_has_a_result(site: Site) -> None:
    result = site.task("add").apply_async((1, 2), serializer="pickle")
    eventually(lambda: result.state == states.FAILURE)
    assert site.job(result.id).reason is Reason.BAD_PAYLOAD


def test_crashed_out_and_unknown(own_site: Site) -> None:
    """A worker is killed, and the next one writes what became of its tasks."""
    site = own_site
    first = site.worker("-P", "prefork", "-c", "2", FAIRLANE_UNKNOWN_TASK="1")
    seen = site.task("note")
    lost = seen.apply_async(("lost", 60), link_error=site.task("note").si("callback"))
    site.running(lost.id)
    eventually(lambda: site.shop.lines("begin lost"))
    first.kill()
    unknown = site.shop.app.send_task("shop.unknown")
    site.worker("-P", "prefork", "-c", "2", FAIRLANE_UNKNOWN_TASK="1")
    with pytest.raises(WorkerLostError):
        lost.get(timeout=120)
    job = site.job(lost.id)
    assert (job.state, job.reason, len(site.shop.lines("begin lost"))) == (JobState.FAILED, Reason.CRASHED, 1)
    eventually(lambda: site.shop.lines("end callback"))
    with pytest.raises(NotRegistered):
        unknown.get(timeout=120)
    assert site.shop.lines("end callback") == ["end callback"]


def test_what_ends_while_no_worker_runs_is_recorded_by_the_next(own_site: Site) -> None:
    site = own_site
    first = site.worker("-P", "threads", "-c", "1")
    assert site.task("add").delay(1, 1).get(timeout=30) == 2
    eventually(lambda: site.shop.server.keys(f"{site.prefix}*fairlane-results*"))
    assert first.stop() == 0
    result = site.task("add").delay(1, 1)
    site.shop.fairlane.blocking.cancel([result.id])
    assert result.state == states.PENDING
    site.worker("-P", "threads", "-c", "1")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=30)
