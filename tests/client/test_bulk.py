"""Many jobs at once: what is selected, what changes, and that an interruption and a repetition change nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from fairlane import Fairlane, InvalidInput, JobState, ManualClock, NewJob, QueueFull, StoreUnavailable
from fairlane.bulk import Bulk, Unchanged
from fairlane.client import Client
from fairlane.model.ids import retry_id
from fairlane.model.job import Enqueued, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter, Page
from fairlane.model.states import fail
from tests.conformance.kit import Kit

from .conftest import kit_of


@pytest.fixture
async def kit(still_app: Fairlane, clock: ManualClock) -> Kit:
    """The store of the application, as a worker sees it."""
    return await kit_of(still_app, clock)


@pytest.fixture
def client(still_app: Fairlane) -> Client:
    """The client under test."""
    return still_app.client


async def failed(kit: Kit, count: int, *, queue: str = "default", group: str = "boom", **fields: Any) -> list[str]:
    """Jobs that failed, the oldest first."""
    worker = await kit.worker(queue, slots=1_000, lease=1e6)
    ids = [answer.id for answer in await kit.enqueue_all([kit.new(queue=queue, **fields) for _ in range(count)])]
    # Several claims: the answer to one is bounded by bytes.
    while claimed := await worker.claim(count):
        await worker.finish(*[fail(job.held, Reason.ERROR, "boom", group=group) for job in claimed])
    await worker.leave()
    return ids


async def states(kit: Kit, ids: Sequence[str]) -> list[str | None]:
    """The states of jobs; None for deleted ones."""
    return [None if job is None else job.state.value for job in await kit.store.get(ids)]


async def everything(kit: Kit, **where: Any) -> list[str]:
    """The ids of the jobs that a filter finds, newest first."""
    found: list[str] = []
    cursor = None
    while True:
        page = await kit.store.find(Filter(**where), limit=500, cursor=cursor)
        found += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            return found


async def test_failed_jobs_are_retried_each_once_however_often_it_is_asked(kit: Kit, client: Client) -> None:
    ids = await failed(kit, 120)
    told = await client.retry_all()
    assert (told.matched, told.changed, told.unchanged) == (120, 120, {})
    assert {job.id for job in told.sample} == set(ids[-10:])
    assert set(await everything(kit, state=JobState.PENDING)) == {retry_id(id) for id in ids}
    again = await client.retry_all()
    assert (again.matched, again.changed, again.unchanged) == (120, 0, {Unchanged.ALREADY_RETRIED: 120})


async def test_a_dry_run_counts_what_was_already_retried(kit: Kit, client: Client) -> None:
    await failed(kit, 70)
    assert (await client.retry_all(dry_run=True)).unchanged == {}
    await client.retry_all(most=60)
    told = await client.retry_all(dry_run=True)
    assert (told.matched, told.changed, told.unchanged) == (70, 0, {Unchanged.ALREADY_RETRIED: 60})


async def test_a_retry_that_failed_is_retried_and_the_first_job_is_not(kit: Kit, client: Client) -> None:
    [id] = await failed(kit, 1)
    await client.retry_all()
    worker = await kit.worker()
    await worker.fail(*await worker.claim())
    told = await client.retry_all()
    assert (told.matched, told.changed) == (2, 1)
    assert await everything(kit, state=JobState.PENDING) == [retry_id(retry_id(id))]


async def test_a_job_that_was_retried_alone_is_not_retried_again(kit: Kit, client: Client) -> None:
    ids = await failed(kit, 3)
    alone = await client.retry(ids[0])
    assert (alone.id, alone.created) == (retry_id(ids[0]), True)
    assert (await client.retry_all(dry_run=True)).unchanged == {Unchanged.ALREADY_RETRIED: 1}
    told = await client.retry_all()
    assert (told.matched, told.changed, told.unchanged) == (3, 2, {Unchanged.ALREADY_RETRIED: 1})


async def test_asking_for_a_job_again_makes_another_retry(kit: Kit, client: Client) -> None:
    [id] = await failed(kit, 1)
    await client.retry_all()
    second, third = await client.retry(id), await client.retry(id)
    assert second.created
    assert third.created
    assert len({retry_id(id), second.id, third.id}) == 3
    assert {(await handle.job()).retry_of for handle in (second, third)} == {id}


async def test_a_job_whose_first_retry_was_deleted_is_retried_again(kit: Kit, client: Client) -> None:
    [id] = await failed(kit, 1)
    first = await client.retry(id)
    await first.cancel()
    await client.purge(state=JobState.CANCELLED)
    second = await client.retry(id)
    assert second.created
    assert (await second.job()).state is JobState.PENDING


async def test_a_retry_whose_answer_was_lost_is_not_stored_twice(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    [id] = await failed(kit, 1)
    store = await client._connection.store()
    enqueue = store.enqueue

    async def repeated(jobs: Sequence[NewJob]) -> list[Enqueued]:
        """A store that repeats a call whose answer was lost."""
        await enqueue(jobs)
        return await enqueue(jobs)

    monkeypatch.setattr(store, "enqueue", repeated)
    assert (await client.retry(id)).id == retry_id(id)
    assert await everything(kit, state=JobState.PENDING) == [retry_id(id)]


async def test_an_interrupted_bulk_goes_on_where_it_was(kit: Kit, client: Client) -> None:
    ids = await failed(kit, 160)
    reports: list[Bulk] = []

    def break_off(told: Bulk) -> None:
        reports.append(told)
        if len(reports) == 1:
            raise StoreUnavailable("the server is gone")

    with pytest.raises(StoreUnavailable):
        await client.retry_all(progress=break_off)
    done = reports[0].changed
    assert 0 < done < 160
    told = await client.retry_all(progress=break_off)
    assert told.changed == 160 - done
    assert told.unchanged == {Unchanged.ALREADY_RETRIED: done}
    assert sorted(await everything(kit, state=JobState.PENDING)) == sorted(map(retry_id, ids))


async def test_a_completed_retry_that_was_pruned_is_not_made_again(
    kit: Kit, client: Client, clock: ManualClock
) -> None:
    await failed(kit, 1)
    await client.retry_all()
    worker = await kit.worker(lease=1e6)
    await worker.complete(*await worker.claim())
    clock.advance(3 * 86_400)
    await kit.store.prune(Retention())
    told = await client.retry_all()
    assert (told.matched, told.changed) == (1, 0)


@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        ({"queue": "images"}, {"images", "images-ann"}),
        ({"queue": "images", "lane": "user:ann"}, {"images-ann"}),
        ({"task": "other"}, {"other"}),
        ({"error_group": "KeyError in pay"}, {"pay"}),
        ({"queue": "images", "error_group": "boom"}, {"images", "images-ann"}),
        ({"older_than": 7_200}, {"old"}),
        ({"older_than": timedelta(hours=2)}, {"old"}),
        ({"newer_than": 7_200}, {"images", "images-ann", "other", "pay"}),
        ({"newer_than": 60, "queue": "images"}, {"images", "images-ann"}),
        ({"newer_than": 3 * 3_600, "older_than": 2 * 3_600}, set()),
        ({"queue": "nobody"}, set()),
    ],
)
async def test_a_selection_finds_what_it_names(
    kit: Kit, client: Client, clock: ManualClock, which: Any, wanted: set[str]
) -> None:
    await failed(kit, 1, id="old")
    clock.advance(4 * 3_600)
    await failed(kit, 1, id="images", queue="images")
    await failed(kit, 1, id="images-ann", queue="images", lane="user:ann")
    await failed(kit, 1, id="other", task="other")
    await failed(kit, 1, id="pay", group="KeyError in pay")
    clock.advance(10)
    told = await client.retry_all(dry_run=True, **which)
    assert {job.id for job in told.sample} == wanted
    assert (told.matched, told.changed, told.dry_run) == (len(wanted), 0, True)
    assert await everything(kit, state=JobState.PENDING) == []
    told = await client.purge(**which)
    assert told.changed == len(wanted)
    assert set(await everything(kit)) == {"old", "images", "images-ann", "other", "pay"} - wanted


async def test_what_is_newer_than_a_moment_is_found_without_reading_all_that_is_older(
    kit: Kit, client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed(kit, 900)
    clock.advance(3_600)
    await failed(kit, 3)
    clock.advance(1)
    read = 0
    find = kit.store.find

    async def counted(*args: Any, **options: Any) -> Page:
        nonlocal read
        page = await find(*args, **options)
        read += len(page.jobs)
        return page

    monkeypatch.setattr(type(kit.store), "find", lambda self, *args, **options: counted(*args, **options))
    told = await client.retry_all(newer_than=60)
    assert told.changed == 3
    assert read <= 200


async def test_waiting_and_running_jobs_are_cancelled_and_what_has_ended_is_not_looked_at(
    kit: Kit, client: Client
) -> None:
    await failed(kit, 2)
    worker = await kit.worker()
    runs = await kit.enqueue()
    [claimed] = await worker.claim()
    waits, later = await kit.enqueue(), await kit.enqueue(delay=60)
    told = await client.cancel_all()
    assert (told.matched, told.changed, told.requested, told.unchanged) == (3, 2, 1, {})
    assert await states(kit, [runs, waits, later]) == ["running", "cancelled", "cancelled"]
    again = await client.cancel_all()
    assert (again.matched, again.changed, again.requested) == (1, 0, 0)
    assert again.unchanged == {Unchanged.ALREADY_REQUESTED: 1}
    await worker.complete(claimed)


async def test_only_final_jobs_are_purged_unless_waiting_ones_are_to_be_cancelled(kit: Kit, client: Client) -> None:
    gone = await failed(kit, 3)
    worker = await kit.worker()
    runs = await kit.enqueue()
    await worker.claim()
    waits, later = await kit.enqueue(), await kit.enqueue(delay=60)
    told = await client.purge()
    assert (told.matched, told.changed) == (3, 3)
    assert await states(kit, [*gone, runs, waits, later]) == [None, None, None, "running", "pending", "scheduled"]
    told = await client.purge(cancel_waiting=True)
    assert (told.matched, told.changed) == (2, 2)
    assert await states(kit, [runs, waits, later]) == ["running", None, None]


@pytest.mark.parametrize(
    ("verb", "which"),
    [
        ("retry_all", {"state": JobState.PENDING}),
        ("cancel_all", {"state": JobState.FAILED}),
        ("purge", {"state": JobState.PENDING}),
        ("purge", {"state": JobState.RUNNING, "cancel_waiting": True}),
        ("purge", {"lane": "user:ann"}),
        ("cancel_all", {"older_than": -1}),
        ("cancel_all", {"older_than": 60, "newer_than": 30}),
        ("purge", {"most": 0}),
    ],
)
async def test_a_selection_that_makes_no_sense_is_refused(kit: Kit, client: Client, verb: str, which: Any) -> None:
    await kit.enqueue(lane="user:ann")
    with pytest.raises(InvalidInput):
        await getattr(client, verb)(**which)
    assert len(await everything(kit, state=JobState.PENDING)) == 1


async def test_the_number_of_jobs_can_be_bounded(kit: Kit, client: Client) -> None:
    await failed(kit, 9)
    told = await client.retry_all(most=4)
    assert (told.matched, told.changed, told.more) == (4, 4, True)
    told = await client.retry_all(dry_run=True, most=9)
    assert (told.matched, told.more) == (9, False)


async def test_one_job_that_cannot_be_retried_does_not_stop_the_others(kit: Kit, client: Client) -> None:
    await failed(kit, 2, lane="open")
    await failed(kit, 1, lane="gone")
    await kit.settings("default", closed=("open",), version=1)
    told = await client.retry_all()
    assert (told.matched, told.changed, told.unchanged) == (3, 2, {Unchanged.REFUSED: 1})
    assert told.refusal is not None
    assert "gone" in told.refusal


async def test_a_unique_value_that_is_taken_is_counted_separately(kit: Kit, client: Client) -> None:
    await failed(kit, 1, unique="order-7")
    await kit.enqueue(unique="order-7")
    told = await client.retry_all()
    assert told.unchanged == {Unchanged.UNIQUE_TAKEN: 1}


async def test_a_full_queue_ends_a_retry_which_may_be_repeated(kit: Kit, client: Client) -> None:
    await failed(kit, 3)
    await kit.settings("default", max_pending=2, version=1)
    with pytest.raises(QueueFull):
        await client.retry_all()
    await kit.settings("default", version=2)
    assert (await client.retry_all()).changed == 3


async def test_a_job_that_vanishes_meanwhile_is_counted_as_gone(kit: Kit, client: Client) -> None:
    ids = [await kit.enqueue() for _ in range(3)]
    find: Callable[..., Any] = kit.store.find

    async def late(*args: Any, **options: Any) -> Page:
        page: Page = await find(*args, **options)
        if any(job.id == ids[1] for job in page.jobs):
            await kit.store.cancel(ids[1:2])
            await kit.store.forget(ids[1:2], Retention())
        return page

    patched = pytest.MonkeyPatch()
    patched.setattr(type(kit.store), "find", lambda self, *args, **options: late(*args, **options))
    try:
        told = await client.cancel_all()
    finally:
        patched.undo()
    assert (told.matched, told.changed, told.unchanged) == (3, 2, {Unchanged.GONE: 1})


async def test_pages_of_large_jobs_are_short(kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    large = b'[["' + b"x" * 200_000 + b'"],{}]'
    await failed(kit, 60, payload=large)
    sizes: list[int] = []

    async def sent(jobs: Sequence[NewJob]) -> list[Enqueued]:
        sizes.append(len(jobs))
        return [Enqueued(job.id, True, JobState.PENDING) for job in jobs]

    monkeypatch.setattr(client, "send", sent)
    assert (await client.retry_all()).changed == 60
    assert sum(sizes) == 60
    assert sizes[-1] <= 25


def test_code_without_a_loop_has_the_same_verbs(url: str) -> None:
    with Fairlane(url).blocking as client:
        client.send([NewJob(id=f"job-{n}", task="task", lane="user:ann") for n in range(3)])
        reports: list[Bulk] = []
        assert client.cancel_all(dry_run=True).matched == 3
        assert client.cancel_all(queue="default", lane="user:ann", progress=reports.append).changed == 3
        assert reports[-1].changed == 3
        assert client.retry_all(state=JobState.CANCELLED).changed == 3
        assert client.purge(cancel_waiting=True).changed == 6
        assert client.schedules() == []
