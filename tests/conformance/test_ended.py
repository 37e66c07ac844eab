"""The feed of jobs that failed or were cancelled: every way to end appears, and nothing is ever left out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.model.ended import MOST_ENDED, EndedJob
from fairlane.model.job import JobKind, JobState, NewJob, Reason
from fairlane.model.maintenance import DAY, Retention
from fairlane.model.settings import LaneRule
from fairlane.model.states import cancel, fail, take_back
from fairlane.store.port import Store
from tests.sizes import sized

from .death import die, survivor
from .kit import Kit

FAILED, CANCELLED = JobState.FAILED, JobState.CANCELLED


async def present(store: Store) -> str:
    """The cursor of a reader that begins now."""
    page = await store.ended(None)
    assert (page.jobs, page.more) == ((), False)
    return page.cursor


class Reader:
    """Reads the feed to its end, again and again."""

    def __init__(self, store: Store, cursor: str, limit: int = MOST_ENDED) -> None:
        self.store = store
        self.cursor = cursor
        self.limit = limit

    async def read(self) -> list[EndedJob]:
        """All new jobs; a job may be returned more than once, and is counted once."""
        found: dict[str, EndedJob] = {}
        more = True
        while more:
            page = await self.store.ended(self.cursor, limit=self.limit)
            assert len(page.jobs) <= self.limit
            found |= {job.id: job for job in page.jobs}
            self.cursor, more = page.cursor, page.more
        return list(found.values())

    async def ids(self) -> set[str]:
        """The ids of all new jobs."""
        return {job.id for job in await self.read()}


async def reader(kit: Kit, limit: int = MOST_ENDED) -> Reader:
    """A reader that begins now."""
    return Reader(kit.store, await present(kit.store), limit)


async def test_what_fails_is_reported_with_its_error(kit: Kit) -> None:
    feed = await reader(kit)
    worker = await survivor(kit, "default", "mail")
    await kit.enqueue("paint", id="failed", queue="mail")
    await kit.enqueue(id="completed")
    claimed = {job.id: job for job in await worker.claim(2)}
    kit.clock.advance(5)
    await worker.complete(claimed["completed"])
    await worker.finish(fail(claimed["failed"].held, Reason.TIMEOUT, "Traceback\nToo slow: \N{SNOWMAN}"))

    assert await feed.read() == [
        EndedJob(
            id="failed",
            task="paint",
            queue="mail",
            kind=JobKind.JOB,
            state=FAILED,
            reason=Reason.TIMEOUT,
            error="Traceback\nToo slow: \N{SNOWMAN}",
            finished_at=kit.clock.now(),
        )
    ]
    assert await feed.ids() == set()


async def test_what_ends_while_it_waits_is_reported(kit: Kit) -> None:
    feed = await reader(kit)
    worker = await survivor(kit)
    waiting: dict[str, dict[str, Any]] = {
        "pending": {},
        "scheduled": {"delay": 600.0},
        "met by a claim": {"expires": 5.0},
        "met by the promoter": {"expires": 5.0, "delay": 600.0},
    }
    for id, fields in waiting.items():
        await kit.enqueue(id=id.replace(" ", "-"), **fields)
    await kit.store.cancel(["pending", "scheduled"])
    kit.clock.advance(6)
    assert await worker.claim(10) == []
    await kit.store.promote()

    assert {job.id: (job.state, job.reason) for job in await feed.read()} == {
        "pending": (CANCELLED, Reason.BY_USER),
        "scheduled": (CANCELLED, Reason.BY_USER),
        "met-by-a-claim": (CANCELLED, Reason.EXPIRED),
        "met-by-the-promoter": (CANCELLED, Reason.EXPIRED),
    }


async def test_what_ends_while_it_runs_is_reported_when_it_has_ended(kit: Kit) -> None:
    feed = await reader(kit)
    worker, other = await survivor(kit), await kit.worker(lease=5)
    for id in ("stopped", "returned", "refused"):
        await kit.enqueue(id=id)
    jobs = {job.id: job for job in await worker.claim(3)}
    await kit.store.cancel(["stopped", "returned"])
    assert await feed.ids() == set()
    await worker.finish(cancel(jobs["stopped"].held))
    await worker.finish(take_back(jobs["returned"].held))
    await worker.decline(jobs["refused"], patience=0)
    await kit.enqueue(id="crashed", retries=0)
    await kit.enqueue(id="retried", retries=1)
    assert len(await other.claim(2)) == 2
    await die(kit, other)

    found = {job.id: (job.state, job.reason) for job in await feed.read()}

    assert found == {
        "stopped": (CANCELLED, Reason.BY_USER),
        "returned": (CANCELLED, Reason.BY_USER),
        "refused": (FAILED, Reason.UNKNOWN_TASK),
        "crashed": (FAILED, Reason.CRASHED),
    }


@pytest.mark.parametrize("reason", [Reason.ERROR, Reason.BAD_PAYLOAD, Reason.UNKNOWN_TASK, Reason.CRASHED])
async def test_the_reason_is_that_of_the_job(kit: Kit, reason: Reason) -> None:
    feed = await reader(kit)
    worker = await survivor(kit)
    await kit.enqueue(id="job")
    [job] = await worker.claim()
    await worker.finish(fail(job.held, reason, "boom"))

    assert [(each.id, each.reason, each.error) for each in await feed.read()] == [("job", reason, "boom")]


async def test_jobs_of_every_kind_are_reported(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="door", limit=1))
    feed = await reader(kit)
    worker = await kit.worker(index=3, lease=1e6)
    waiter = await kit.waiter()
    await kit.enqueue(id="turn", kind=JobKind.TURN, lane="door", waiter=waiter.id)
    await kit.enqueue("purge", kind=JobKind.BROADCAST)
    [copy] = await worker.claim()
    await worker.fail(copy)
    await kit.enqueue("purge", id="parent", kind=JobKind.BROADCAST)
    await kit.store.cancel(["parent"])
    await waiter.leave()

    found = {job.id: (job.kind, job.state, job.reason) for job in await feed.read()}

    assert found == {
        "turn": (JobKind.TURN, CANCELLED, Reason.WAITER_GONE),
        copy.id: (JobKind.JOB, FAILED, Reason.ERROR),
        "parent": (JobKind.BROADCAST, CANCELLED, Reason.BY_USER),
        "parent/3": (JobKind.JOB, CANCELLED, Reason.BY_USER),
    }


async def test_a_clean_up_that_is_cancelled_is_reported(kit: Kit) -> None:
    feed = await reader(kit)
    worker = await survivor(kit)
    await kit.enqueue(id="first", sticky="key")
    await worker.complete(*await worker.claim())
    await kit.store.release("default", "key", NewJob(id="tidy", task="tidy", kind=JobKind.CLEANUP))
    await kit.enqueue(id="second", sticky="key")

    assert {job.id: (job.kind, job.state) for job in await feed.read()} == {"tidy": (JobKind.CLEANUP, CANCELLED)}


async def test_the_oldest_end_comes_first(kit: Kit) -> None:
    feed = await reader(kit)
    ids = [await kit.enqueue(queue=f"queue-{number % 3}") for number in range(12)]
    order = ids[6:] + ids[:6]
    for id in order:
        kit.clock.advance(1)
        await kit.store.cancel([id])

    assert [job.id for job in await feed.read()] == order


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_pages_have_everything_once_also_of_one_moment(kit: Kit, limit: int) -> None:
    cursor = await present(kit.store)
    ids = [await kit.enqueue(queue=f"queue-{number % 2}") for number in range(14)]
    await kit.store.cancel(ids[:7])
    await kit.store.cancel(ids[7:])
    found: list[str] = []
    more = True
    while more:
        page = await kit.store.ended(cursor, limit=limit)
        # Every page but the last is full, so that reading ends.
        assert len(page.jobs) == limit or not page.more
        found += [job.id for job in page.jobs]
        cursor, more = page.cursor, page.more

    assert sorted(found) == sorted(ids)
    assert (await kit.store.ended(cursor)).jobs == ()


async def test_what_ends_between_two_pages_is_not_lost(kit: Kit) -> None:
    feed = await reader(kit)
    ids = [await kit.enqueue() for _ in range(9)]
    await kit.store.cancel(ids[3:6])
    first = await kit.store.ended(feed.cursor, limit=2)
    # These end at the same moment but have lower numbers; those below end at an earlier time.
    await kit.store.cancel(ids[:3])
    second = await kit.store.ended(first.cursor, limit=2)
    kit.clock.step_wall(-20)
    await kit.store.cancel(ids[6:])
    feed.cursor = second.cursor

    assert {job.id for job in (*first.jobs, *second.jobs)} | await feed.ids() == set(ids)


async def test_a_page_can_be_read_again(kit: Kit) -> None:
    cursor = await present(kit.store)
    id = await kit.enqueue()
    await kit.store.cancel([id])
    first, second = await kit.store.ended(cursor), await kit.store.ended(cursor)

    assert [job.id for job in first.jobs] == [id]
    assert second.jobs == first.jobs


async def test_what_ended_in_the_same_moment_as_the_last_page_comes_on_the_next(kit: Kit) -> None:
    feed = await reader(kit)
    early, late = await kit.enqueue(), await kit.enqueue()
    await kit.store.cancel([late])
    assert await feed.ids() == {late}
    await kit.store.cancel([early])

    assert early in await feed.ids()


async def test_a_clock_that_was_set_back_hides_nothing(kit: Kit) -> None:
    feed = await reader(kit)
    first, second = await kit.enqueue(), await kit.enqueue()
    await kit.store.cancel([first])
    assert await feed.ids() == {first}
    kit.clock.step_wall(-50)
    await kit.store.cancel([second])

    assert second in await feed.ids()


async def test_a_reader_that_was_away_finds_everything(kit: Kit) -> None:
    feed = await reader(kit)
    for _ in range(3):
        await kit.store.cancel([await kit.enqueue()])
        kit.clock.advance(3_600)

    assert len(await feed.ids()) == 3


async def test_a_reader_begins_at_the_present(kit: Kit) -> None:
    await kit.store.cancel([await kit.enqueue()])
    feed = await reader(kit)
    assert await feed.ids() == set()
    new = await kit.enqueue()
    await kit.store.cancel([new])

    assert await feed.ids() == {new}


async def test_what_was_pruned_or_forgotten_is_left_out(kit: Kit) -> None:
    feed = await reader(kit)
    pruned, forgotten, kept = [await kit.enqueue() for _ in range(3)]
    await kit.store.cancel([pruned])
    kit.clock.advance(2 * DAY)
    await kit.store.cancel([forgotten])
    keep = Retention(failed_seconds=DAY)
    assert (await kit.store.prune(keep)).jobs == 1
    assert await kit.store.forget([forgotten], keep) == [True]
    await kit.store.cancel([kept])

    assert await feed.ids() == {kept}
    kit.clock.advance(2 * DAY)
    await kit.store.prune(keep)
    assert await feed.ids() == set()
    # What ends after all before it was pruned still has its place behind the cursor.
    last = await kit.enqueue()
    await kit.store.cancel([last])
    assert await feed.ids() == {last}


async def test_many_that_end_at_once_are_all_found(kit: Kit) -> None:
    feed = await reader(kit, limit=5)
    size = sized(40, 400)
    workers = [await survivor(kit, slots=size) for _ in range(4)]
    await kit.enqueue_all([kit.new() for _ in range(2 * size)])
    claims = [await worker.claim(size // 4) for worker in workers]
    waiting = [f"job-{number}" for number in range(size + 1, 2 * size + 1)]
    seen: set[str] = set()

    async def read(until: asyncio.Event) -> None:
        while not until.is_set():
            seen.update(await feed.ids())

    done = asyncio.Event()
    reading = asyncio.create_task(read(done))
    ends: list[Any] = [kit.store.cancel([id]) for id in waiting[: size // 2]]
    ends += [worker.fail(job) for worker, jobs in zip(workers, claims, strict=True) for job in jobs]
    await asyncio.gather(*ends)
    done.set()
    await reading
    seen |= await feed.ids()

    assert seen == {*waiting[: size // 2], *(job.id for jobs in claims for job in jobs)}


async def test_reading_writes_nothing_and_waits_for_nothing(kit: Kit) -> None:
    cursor = await present(kit.store)
    before = await kit.store.ended(cursor)
    after = await kit.store.ended(before.cursor)

    assert (before.jobs, after.jobs, after.more) == ((), (), False)


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1.5", "9" * 30, "\N{DIGIT ONE}\N{ARABIC-INDIC DIGIT TWO}", "e30="])
async def test_a_cursor_of_no_page_is_rejected(kit: Kit, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        await kit.store.ended(cursor)


@pytest.mark.parametrize("limit", [0, MOST_ENDED + 1])
async def test_a_limit_out_of_range_is_rejected(kit: Kit, limit: int) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        await kit.store.ended(None, limit=limit)
