"""Concurrent calls, and processes that die between them: queue locks lose nothing, block nothing and never deadlock."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from fairlane.model.job import Claimed, Job, JobState, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter, Gate
from fairlane.model.session import Claim
from fairlane.model.slots import Ask
from fairlane.model.states import complete
from fairlane.store.postgresql.statements import placed
from tests.conformance.kit import Kit

pytestmark = pytest.mark.anyio


async def test_what_a_sender_left_unadmitted_when_it_died_is_admitted_by_the_next_claim(
    kit: Kit, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        return None

    worker = await kit.worker()
    await kit.enqueue(id="known")  # the queue is there
    assert await worker.claim_ids() == ["known"]
    monkeypatch.setattr(kit.store, "_admit", dies)
    async with other.transaction():
        await other.execute(placed("SELECT fairlane.lock_alone()", "fairlane"))
        begun = time.monotonic()
        await kit.enqueue(id="left")
        await kit.store.enqueue([kit.new(id="left-too"), kit.new(id="later", delay=3_600)])
        assert time.monotonic() - begun < 10, "a plain enqueue waits for nobody's lock"
        position = await kit.positions("left")
        assert position is not None
        assert position.gate is Gate.ARRIVING

    assert await worker.claim_ids(10) == ["left", "left-too"]

    assert await kit.state("later") is JobState.SCHEDULED
    assert (await kit.store.recount()).differences == ()


async def test_what_is_admitted_beside_what_was_claimable_already_counts_once(
    kit: Kit, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        return None

    worker = await kit.worker()
    for priority in Priority:
        await kit.enqueue(id=f"known-{priority.name}", priority=priority)
    monkeypatch.setattr(kit.store, "_admit", dies)
    async with other.transaction():
        await other.execute(placed("SELECT fairlane.lock_alone()", "fairlane"))
        await kit.enqueue(id="left")

    assert set(await worker.claim_ids(10)) == {"left", "known-HIGH", "known-NORMAL", "known-LOW"}

    assert (await kit.store.recount()).differences == ()


async def test_cancelling_what_others_finish_neither_tangles_nor_fails(kit: Kit, other: Any) -> None:
    workers = [await kit.worker(slots=50) for _ in range(2)]
    ids = [f"job-{n}" for n in range(400)]
    await kit.store.enqueue([kit.new(id=id, lane=f"lane-{n % 7}") for n, id in enumerate(ids)])
    done = asyncio.Event()

    async def work(index: int) -> None:
        worker = workers[index]
        held: list[Claimed] = []
        while True:
            claim = Claim(number=kit.number(), asks=(Ask("default", Priority.NORMAL, 20),), total=20)
            answer = await kit.store.finish(worker.id, [complete(job.held) for job in held], claim=claim)
            held = list(answer.claimed)
            if not held:
                return

    async def cancel() -> None:
        while not done.is_set():
            for start in range(0, len(ids), 40):
                await kit.store.cancel(ids[start : start + 40])

    cancelling = asyncio.create_task(cancel())
    await asyncio.gather(work(0), work(1))
    done.set()
    await cancelling

    states = {await kit.state(id) for id in ids}
    assert states <= {JobState.COMPLETED, JobState.CANCELLED}
    assert (await kit.store.recount()).differences == ()
    await other.execute("SELECT pg_stat_clear_snapshot()")
    assert await other.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0


async def test_a_recount_repairs_fair_order_after_a_lane_was_lost_or_doubled(kit: Kit, other: Any) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first", lane="a")
    await kit.enqueue(id="second", lane="b")
    await other.execute(
        "DELETE FROM fairlane.ready_lane WHERE flow = (SELECT flow FROM fairlane.active_job ORDER BY seq LIMIT 1)"
    )
    await other.execute("INSERT INTO fairlane.ready_lane SELECT domain, tag + 5, head, flow FROM fairlane.ready_lane")

    differences = (await kit.store.recount()).differences

    assert len(differences) == 2
    assert (await kit.store.recount()).differences == ()
    assert sorted(await worker.claim_ids(10)) == ["first", "second"]


async def test_what_a_session_runs_is_counted_right_when_its_calls_meet(kit: Kit) -> None:
    """A call that waited for another call of the session must read its load again, because the row has moved."""
    worker = await kit.worker(slots=40)
    await kit.enqueue_all([kit.new() for _ in range(40)])
    claimed = await worker.claim(40)
    answers = await asyncio.gather(*(kit.store.finish(worker.id, [complete(job.held, b"1")]) for job in claimed))

    assert all(verdict.accepted for answer in answers for verdict in answer.verdicts)
    [session] = await kit.store.sessions()
    assert session.running == (0, 0, 0)
    assert (await kit.store.recount()).differences == ()


async def test_a_claim_of_the_only_job_is_repeated_when_something_else_changes_the_load_of_its_session(
    kit: Kit, other: Any
) -> None:
    worker = await kit.worker(slots=3)
    await kit.enqueue(id="first")
    [first] = await worker.claim()
    await kit.enqueue(id="second")
    claim = Claim(number=kit.number(), asks=(Ask("default", Priority.NORMAL, 3),), total=3, notified=True)
    async with other.transaction():
        # A call that ends a job of the session locks its load after the claim has read it.
        await other.execute("UPDATE fairlane.session_load SET running_normal = running_normal - 1")
        claiming = asyncio.create_task(kit.store.claim(worker.id, claim))
        await waits_for_somebody(other)
    assert [job.id for job in await claiming] == ["second"]
    assert await other.fetchval("SELECT running_normal FROM fairlane.session_load") == 1
    await other.execute("UPDATE fairlane.session_load SET running_normal = running_normal + 1")
    await worker.complete(first)
    assert (await kit.store.recount()).differences == ()


async def test_two_sessions_that_are_notified_of_one_job_start_it_once(kit: Kit) -> None:
    workers = [await kit.worker(slots=3) for _ in range(6)]
    for number in range(30):
        id = await kit.enqueue()
        claims = [
            kit.store.claim(worker.id, msgspec.structs.replace(worker.everything(3), notified=True))
            for worker in workers
        ]
        claimed = [job for jobs in await asyncio.gather(*claims) for job in jobs]
        assert [job.id for job in claimed] == [id], number
        await kit.store.finish(holder(await kit.job(id)), [complete(claimed[0].held)])
    assert (await kit.store.recount()).differences == ()


def holder(job: Job) -> str:
    """The session that runs a job."""
    assert job.session is not None
    return job.session


async def waits_for_somebody(connection: Any) -> None:
    """Wait until some session of the database waits for a lock."""
    async with asyncio.timeout(10):
        while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.01)


async def test_jobs_that_end_beside_a_pass_of_the_pruner_do_not_stop_it(kit: Kit) -> None:
    """The pass runs several statements, and sees more ended jobs each time."""
    keep = Retention(completed_count=5)
    worker = await kit.worker(slots=200)
    await kit.enqueue_all([kit.new() for _ in range(1_000)])
    ending = True

    async def prune() -> None:
        while ending:
            await kit.store.prune(keep)

    async with asyncio.TaskGroup() as both:
        both.create_task(prune())
        for _ in range(10):
            for each in await worker.claim(100):
                kit.clock.advance(0.001)
                await worker.complete(each)
        ending = False
    while (await kit.store.prune(keep)).more:
        pass
    [left] = await kit.store.queues()
    assert left.counts.completed == 1_000
    assert len((await kit.store.find(Filter(state=JobState.COMPLETED))).jobs) == 5
    assert (await kit.store.recount()).differences == ()
