"""Reading jobs: by id, by each filter, and page by page while the store changes."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.errors import InvalidInput, NotFound
from fairlane.model.job import Job, JobState, Priority, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.states import fail, retry
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.sizes import sized

from .kit import Kit

EVERYTHING = Filter()
BEHIND = sized(1_200, 40_000)


async def pages(store: Store, where: Filter = EVERYTHING, *, limit: int = 50) -> list[list[Job]]:
    """Every page there is."""
    found: list[list[Job]] = []
    cursor: str | None = None
    for _ in range(1_000):
        page = await store.find(where, limit=limit, cursor=cursor)
        found.append(list(page.jobs))
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the pages do not come to an end")


async def ids(store: Store, where: Filter = EVERYTHING, *, limit: int = 50) -> list[str]:
    """The ids of all that is found, in order."""
    return [job.id for page in await pages(store, where, limit=limit) for job in page]


# -- by id -----------------------------------------------------------------------------------------


async def test_unknown_ids_are_none_in_their_place(kit: Kit, store: Store) -> None:
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])

    found = await store.get(["two", "unknown", "one", "two"])

    assert [job.id if job else None for job in found] == ["two", None, "one", "two"]
    assert await store.get([]) == []


# No job can have these ids, but a shell or a browser can still send them; an undecodable argument has surrogates.
IMPOSSIBLE = ["", "\x00", "a\x00b", "\udcff", "x" * 10_000]


@pytest.mark.parametrize("id", IMPOSSIBLE, ids=ascii)
async def test_an_id_that_cannot_be_is_unknown(kit: Kit, store: Store, id: str) -> None:
    await kit.enqueue(id="job")

    [job, nothing] = await store.get(["job", id])

    assert job is not None
    assert nothing is None
    assert await store.positions([id]) == [None]
    with pytest.raises(NotFound):
        await store.cancel(["job", id])


async def test_get_and_find_tell_the_same(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id=f"job-{n}", lane="ann", headers=b"{}") for n in range(3)])
    done, failed, _ = await worker.claim(3)
    await worker.complete(done)
    await worker.fail(failed)

    page = await store.find(EVERYTHING)

    assert list(page.jobs) == await store.get([job.id for job in page.jobs])
    assert len(page.jobs) == 3


# -- filters ---------------------------------------------------------------------------------------


async def test_nothing_is_an_empty_page(store: Store) -> None:
    page = await store.find(EVERYTHING)

    assert (page.jobs, page.cursor) == ((), None)


async def test_by_state(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    for id in ("completed", "failed", "running"):
        await kit.enqueue(id=id)
    completed, failed, _ = await worker.claim(3)
    await worker.complete(completed)
    await worker.fail(failed)
    await kit.enqueue(id="pending")
    await kit.enqueue(id="scheduled", delay=60)
    await kit.enqueue(id="cancelled")
    await store.cancel(["cancelled"])

    for state in JobState:
        assert await ids(store, Filter(state=state)) == [state.value]


async def test_completed_jobs_are_found_behind_many_that_are_not(kit: Kit, store: Store) -> None:
    """Page by page, whatever lies before, between and behind them, with and without other filters."""
    worker = await kit.worker(slots=3)
    expected: dict[str, list[str]] = {"mail": [], "print": []}
    for part in range(3):
        for task in expected:
            for n in range(3):
                await kit.enqueue(task, id=f"{task}-{part}-{n}", priority=Priority.HIGH)
            done, failed, running = await worker.claim(3)
            await worker.complete(done)
            await worker.fail(failed)
            await worker.complete(running)
            expected[task] += [done.id, running.id]
        backlog = [kit.new(("mail", "print")[n % 2], id=f"{part}-waits-{n}") for n in range(BEHIND)]
        later = [kit.new("mail", id=f"{part}-later-{n}", delay=60) for n in range(BEHIND // 4)]
        for first in range(0, BEHIND, 1_000):
            await store.enqueue(backlog[first : first + 1_000])
            await store.enqueue(later[first : first + 1_000])
        gone = [job.id for job in backlog[: BEHIND // 4]]
        await store.cancel(gone)

    completed = Filter(state=JobState.COMPLETED)
    both = sorted(expected["mail"] + expected["print"])
    for limit in (1, 5, 50):
        assert sorted(await ids(store, completed, limit=limit)) == both
    for task, wanted in expected.items():
        assert sorted(await ids(store, Filter(state=JobState.COMPLETED, task=task), limit=2)) == sorted(wanted)
    assert sorted(await ids(store, Filter(state=JobState.COMPLETED, queue="default"), limit=4)) == both
    assert await ids(store, Filter(state=JobState.COMPLETED, queue="default"), limit=4) == await ids(store, completed)


async def test_completed_jobs_of_many_tasks_are_found_page_by_page(kit: Kit, store: Store) -> None:
    worker = await kit.worker(slots=1_000)
    await kit.enqueue_all([kit.new(f"task-{n % 40}") for n in range(2_000)])
    ended = await worker.claim(600)
    for each in ended:
        await worker.complete(each)

    found = await ids(store, Filter(state=JobState.COMPLETED), limit=50)

    assert sorted(found) == sorted(each.id for each in ended)
    assert len(found) == 600


async def test_by_queue_and_by_lane_in_a_queue(kit: Kit, store: Store) -> None:
    await kit.enqueue(id="a-ann", queue="a", lane="ann")
    await kit.enqueue(id="a-bob", queue="a", lane="bob")
    await kit.enqueue(id="b-ann", queue="b", lane="ann")
    await kit.enqueue(id="a-none", queue="a")

    assert set(await ids(store, Filter(queue="a"))) == {"a-ann", "a-bob", "a-none"}
    assert await ids(store, Filter(queue="a", lane="ann")) == ["a-ann"]
    assert await ids(store, Filter(queue="b", lane="bob")) == []
    assert await ids(store, Filter(queue="c")) == []


async def test_a_lane_is_matched_as_text_and_not_as_a_pattern(kit: Kit, store: Store) -> None:
    for lane in ("%", "_", "*", "a%", "ab", "'; --", "A"):
        await kit.enqueue(id=f"in {lane}", lane=lane)

    for lane in ("%", "_", "*", "a%", "'; --", "A"):
        assert await ids(store, Filter(queue="default", lane=lane)) == [f"in {lane}"]
    assert await ids(store, Filter(queue="default", lane="a")) == []


async def test_by_task(kit: Kit, store: Store) -> None:
    await kit.enqueue("mail", id="mail")
    await kit.enqueue("mailer", id="mailer")

    assert await ids(store, Filter(task="mail")) == ["mail"]


async def test_by_sticky_key(kit: Kit, store: Store) -> None:
    await kit.worker()
    await kit.enqueue(id="one", sticky="plan-1")
    await kit.enqueue(id="two", sticky="plan-2")
    await kit.enqueue(id="none")

    assert await ids(store, Filter(sticky="plan-1")) == ["one"]


async def test_by_the_worker_a_job_is_bound_to_runs_on_or_ran_on_last(kit: Kit, store: Store) -> None:
    first, second = await kit.worker(), await kit.worker()
    await kit.enqueue(id="ran on first")
    await first.complete(*await first.claim())
    await kit.enqueue(id="runs on second")
    await second.claim()
    await kit.enqueue(id="bound to second", worker=second.session.index)
    await kit.enqueue(id="nowhere yet")

    assert await ids(store, Filter(worker=first.name)) == ["ran on first"]
    assert set(await ids(store, Filter(worker=second.name))) == {"runs on second", "bound to second"}


async def test_the_worker_of_a_job_is_known_however_long_ago_its_session_ended(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await worker.complete(*await worker.claim())
    before = await kit.job("job")
    await worker.leave()
    clock.advance(60)
    await store.prune(Retention(history_seconds=0.0))

    assert await kit.job("job") == before
    assert before.worker == worker.name
    assert await ids(store, Filter(worker=worker.name)) == ["job"]


@pytest.mark.parametrize("value", IMPOSSIBLE, ids=ascii)
@pytest.mark.parametrize("field", ["queue", "task", "sticky", "worker", "error_group"])
def test_what_no_job_can_have_is_refused_as_a_filter(field: str, value: str) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(InvalidInput) as refused:
        Filter(**given)
    assert refused.value.field == field


@pytest.mark.parametrize("worker", ["default", "default/", "/0", "default/²", f"default/{10**30}"], ids=ascii)
async def test_a_worker_that_cannot_be_has_no_jobs(kit: Kit, store: Store, worker: str) -> None:
    await (await kit.worker()).claim()
    await kit.enqueue()

    assert await ids(store, Filter(worker=worker)) == []


async def test_by_error_group(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    for group in ("ValueError in f", "KeyError in g"):
        await kit.enqueue(id=f"failed by {group}")
        [job] = await worker.claim()
        await worker.finish(fail(job.held, Reason.ERROR, "boom", group=group))
    await kit.enqueue(id="retried")
    [job] = await worker.claim()
    await worker.finish(retry(job.held, 60.0, Reason.ERROR, "boom", group="KeyError in g"))
    await kit.enqueue(id="fine")

    assert await ids(store, Filter(error_group="ValueError in f")) == ["failed by ValueError in f"]
    assert "failed by KeyError in g" in await ids(store, Filter(error_group="KeyError in g"))
    assert "fine" not in await ids(store, Filter(error_group="KeyError in g"))


async def test_all_filters_hold_together(kit: Kit, store: Store) -> None:
    worker = await kit.worker("a")
    match = {"queue": "a", "lane": "ann", "sticky": "plan"}
    await kit.enqueue("mail", id="match", **match)
    await kit.enqueue("render", id="other task", **match)
    await kit.enqueue("mail", id="other lane", **match | {"lane": "bob"})
    await kit.enqueue("mail", id="other key", **match | {"sticky": "another"})
    await kit.enqueue("mail", id="other queue", **match | {"queue": "b"})
    where = Filter(state=JobState.PENDING, queue="a", lane="ann", task="mail", sticky="plan", worker=worker.name)

    assert await ids(store, where) == ["match"]
    await store.cancel(["match"])
    assert await ids(store, where) == []


# -- pages -----------------------------------------------------------------------------------------


async def test_the_newest_job_comes_first(kit: Kit, store: Store, clock: ManualClock) -> None:
    # Ids sort against time, so that an order by id would be seen.
    sent = []
    for n in range(5):
        sent.append(await kit.enqueue(id=f"{9 - n}", delay=100.0 - n))
        clock.advance(1)

    assert await ids(store) == sent[::-1]
    assert await ids(store, Filter(state=JobState.SCHEDULED)) == sent[::-1]


@pytest.mark.parametrize("limit", [1, 3, 4, 12, 13])
async def test_pages_have_no_gap_and_no_duplicate(kit: Kit, store: Store, clock: ManualClock, limit: int) -> None:
    sent = []
    for _ in range(4):
        # Three jobs of one moment: a cursor made of times alone would lose or repeat some of them.
        sent += [answer.id for answer in await kit.enqueue_all([kit.new() for _ in range(3)])]
        clock.advance(1)

    found = await pages(store, limit=limit)

    assert all(len(page) <= limit for page in found)
    listed = [job.id for page in found for job in page]
    assert len(listed) == 12
    assert set(listed) == set(sent)


@pytest.mark.parametrize(
    "where",
    [EVERYTHING, Filter(queue="default"), Filter(state=JobState.PENDING), Filter(task="task")],
    ids=["all", "queue", "state", "task"],
)
async def test_jobs_that_come_between_two_pages_shift_nothing(
    kit: Kit, store: Store, clock: ManualClock, where: Filter
) -> None:
    before = [await kit.enqueue() for _ in range(10)]
    clock.advance(1)

    listed: list[str] = []
    cursor: str | None = None
    for _ in range(20):
        page = await store.find(where, limit=3, cursor=cursor)
        listed += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break
        await kit.enqueue()
        clock.advance(1)

    assert sorted(listed) == sorted(before)


async def test_jobs_that_change_between_two_pages_stay_in_their_place(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    worker = await kit.worker(slots=20)
    sent = [await kit.enqueue() for _ in range(9)]
    first = await store.find(EVERYTHING, limit=3)
    await worker.complete(*await worker.claim(5))

    rest: list[str] = []
    cursor = first.cursor
    while cursor is not None:
        page = await store.find(EVERYTHING, limit=3, cursor=cursor)
        rest += [job.id for job in page.jobs]
        cursor = page.cursor

    listed = [job.id for job in first.jobs] + rest
    assert len(listed) == 9
    assert set(listed) == set(sent)


@pytest.mark.parametrize("limit", [0, -1, 501])
async def test_a_page_has_between_one_and_five_hundred_jobs(store: Store, limit: int) -> None:
    with pytest.raises(InvalidInput) as refusal:
        await store.find(EVERYTHING, limit=limit)

    assert refusal.value.field == "limit"


@pytest.mark.parametrize("cursor", ["nonsense", "", "1' OR '1'='1", "ü", "-", "9" * 400])
async def test_a_cursor_that_no_page_gave_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        await store.find(EVERYTHING, cursor=cursor)

    assert refusal.value.field == "cursor"
