"""A record that cannot be read fails alone: claims, endings and reads of other jobs are not affected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlane.model.job import JobState, Reason
from fairlane.model.reading import Filter
from fairlane.model.retry import Backoff
from fairlane.model.settings import LaneRule
from fairlane.model.states import complete
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from tests.conformance.kit import Kit
from tests.servers.stores import empty_stores
from tests.worker.yard import Yard, yard_at

from .damage import HARMLESS, KINDS, damage, redis_of

pytestmark = pytest.mark.anyio
ODD = Backoff(base=2)
"""A policy that is stored with its job."""
ways = pytest.mark.parametrize(("kind", "what"), KINDS, ids=[f"{k}-{w.replace(' ', '-')}" for k, w in KINDS])


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    with empty_stores(kind, tmp_path) as given:
        yield given.next()


@ways
async def test_a_worker_goes_on_beside_a_damaged_record(url: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    async with yard_at(url) as yard:
        _tasks(yard)
        first = [await yard.enqueue("body", n) for n in range(3)]
        bad = await yard.enqueue("body", 99, backoff=ODD)
        healthy = first + [await yard.enqueue("body", n) for n in range(3, 6)]
        await damage(url, what, bad)
        async with yard.worker(slots=2):
            for id in healthy:
                assert (await yard.until(id)).state is JobState.COMPLETED
            healthy.append(await yard.enqueue("body", 6))
            assert (await yard.until(healthy[-1])).state is JobState.COMPLETED
            if what in HARMLESS:
                assert (await yard.until(bad)).state is JobState.COMPLETED
                return
        [job] = [job for job in (await yard.store.find(Filter())).jobs if job.id not in healthy]
        assert (job.state, job.reason) == (JobState.FAILED, Reason.BAD_PAYLOAD)
        assert job.error
        assert (await yard.store.recount()).differences == ()
        if what != "payload":
            errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
            assert any("cannot be read" in error for error in errors), errors


def _tasks(yard: Yard) -> None:
    async def body(n: int) -> int:
        return n

    yard.task(body)


@ways
async def test_a_claim_answers_the_healthy_jobs_and_ends_the_damaged_one(url: str, what: str) -> None:
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    worker = await kit.worker(slots=4)
    ids = [await kit.enqueue(backoff=ODD if n == 1 else Backoff()) for n in range(4)]
    [running] = await worker.claim(1)
    await damage(url, what, ids[1])
    expected = [id for n, id in enumerate(ids) if n > 1 or (n == 1 and what in (*HARMLESS, "payload"))]
    call = worker.everything(3)
    finished = await store.finish(worker.id, [complete(running.held, b"1")], claim=call)
    assert [verdict.accepted for verdict in finished.verdicts] == [True]
    assert [job.id for job in finished.claimed] == expected
    # The answer was lost: the same call again has the same jobs, and nothing that is over.
    again = await store.claim(worker.id, call)
    assert [job.id for job in again] == expected
    await worker.complete(*again)
    assert await worker.claim(4) == []
    assert (await store.recount()).differences == ()
    await store.close()


@ways
async def test_a_burst_runs_what_stands_behind_damaged_records(
    url: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only SQLite looks behind damaged records in the step of the claim itself, so often.
    monkeypatch.setattr("fairlane.store.sqlite.claim.MOST_BROKEN_ROUNDS", 1)
    async with yard_at(url) as yard:
        _tasks(yard)
        bad = [await yard.enqueue("body", n, backoff=ODD) for n in range(5)]
        healthy = [await yard.enqueue("body", n) for n in range(2)]
        for id in bad:
            await damage(url, what, id)
        await yard.make(slots=2, burst=True).run()
        for id in healthy:
            assert (await yard.job(id)).state is JobState.COMPLETED


LOST = [("sqlite", "identity"), ("postgresql", "identity"), ("redis", "record"), ("redis", "no record")]
lost = pytest.mark.parametrize(("kind", "what"), LOST, ids=[f"{k}-{w.replace(' ', '-')}" for k, w in LOST])


@lost
async def test_what_is_due_beside_a_lost_record_arrives(url: str, what: str) -> None:
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    bad, good = [await kit.enqueue(delay=5) for _ in range(2)]
    await damage(url, what, bad)
    clock.advance(6)
    await store.promote()
    await store.promote()
    assert (await store.promote()).next_due is None, "a pass must not come back for what it cannot find"
    worker = await kit.worker()
    assert await worker.claim_ids(4) == [good]
    await worker.claim(4)
    assert (await store.find(Filter(state=JobState.FAILED))).jobs
    assert (await store.recount()).differences == ()
    await store.close()


@lost
async def test_a_recount_reports_lost_records_once(url: str, what: str) -> None:
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    ids = [await kit.enqueue(lane="a") for _ in range(3)]
    await damage(url, what, ids[1])
    differences = (await store.recount()).differences
    assert any("missing" in each or "cannot be read" in each for each in differences)
    assert (await store.recount()).differences == ()
    worker = await kit.worker()
    assert await worker.claim_ids(4) == [ids[0], ids[2]]
    await store.close()


POLICIES = [("sqlite", "backoff"), ("postgresql", "backoff"), ("sqlite", "history")]


@pytest.mark.parametrize(("kind", "what"), POLICIES, ids=[f"{k}-{w}" for k, w in POLICIES])
async def test_jobs_of_a_dead_session_are_rescued_beside_a_damaged_one(url: str, what: str) -> None:
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    ids = [await kit.enqueue(backoff=ODD) for _ in range(3)]
    for _ in range(2):
        worker = await kit.worker(lease=1)
        assert len(await worker.claim(3)) == 3
        if what == "history" or _ == 1:
            await damage(url, what, ids[1])
        clock.advance(2)
        assert (await store.rescue()).retried == 3
    assert {job.state for job in await store.get(ids) if job} <= {JobState.SCHEDULED, JobState.PENDING}
    await store.close()


@pytest.mark.parametrize("kind", ["redis"])
async def test_a_session_and_a_leader_that_cannot_be_read_stop_no_other(url: str) -> None:
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    first = await store.lead("first", lease=5)
    assert first is not None
    worker = await kit.worker(lease=1)
    id = await kit.enqueue()
    assert await worker.claim_ids(1) == [id]
    with redis_of(url) as (redis, prefix):
        redis.hset(prefix + "session", "ghost", b"\xc1")
        redis.zadd(prefix + "present", {"ghost": 0})
        redis.zadd(prefix + "sessions", {"ghost": 99})
        redis.set(prefix + "leader", b"\xc1")
    clock.advance(2)
    rescued = await store.rescue()
    assert (rescued.declared, rescued.retried) == ((worker.id,), 1)
    assert [session.id for session in await store.sessions()] == [worker.id]
    assert await store.leader() is None
    second = await store.lead("second", lease=5)
    assert second is not None
    assert second.number > first.number
    await store.close()


UNIQUE = [*LOST, ("redis", "short record"), ("redis", "content"), ("sqlite", "task"), ("postgresql", "task")]


@pytest.mark.parametrize(("kind", "what"), UNIQUE, ids=[f"{k}-{w.replace(' ', '-')}" for k, w in UNIQUE])
async def test_the_unique_value_of_a_damaged_job_is_free_when_it_has_failed(url: str, what: str) -> None:
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    worker = await kit.worker()
    bad = await kit.enqueue(unique="one", backoff=ODD, timeout=3.5, payload=b'["' + b"x" * 300 + b'"]')
    other = await kit.enqueue(unique="two")
    await damage(url, what, bad)
    for _ in range(3):
        claimed = await worker.claim(1)
        assert [job.id for job in claimed] in ([], [other])
        await worker.complete(*claimed)
    [answer] = await store.enqueue([kit.new(unique="one")])
    assert answer.created
    assert await worker.claim_ids(2) == [answer.id]
    assert (await store.recount()).differences == ()
    await store.close()


ENDS = ["finish", "rescue", "leave", "hand back", "take back", "cancel", "declare dead"]


@lost
@pytest.mark.parametrize("end", ENDS)
async def test_a_running_job_that_lost_its_record_stops_no_other(url: str, what: str, end: str) -> None:
    clock = ManualClock()
    store = await open_store(url, clock=clock)
    kit = Kit(store, clock)
    await kit.settings("default", LaneRule(pattern="b", limit=1))
    worker = await kit.worker(lease=15, index=1)
    ids = [await kit.enqueue(lane=lane) for lane in ("a", "b", "c", "b")]
    claimed = await worker.claim(3)
    assert [job.id for job in claimed] == ids[:3]
    await damage(url, what, ids[1])
    healthy = [job for job in claimed if job.id != ids[1]]
    if end == "finish":
        verdicts = (await worker.complete(*claimed)).verdicts
        assert [verdict.accepted for verdict in verdicts if verdict.id != ids[1]] == [True, True]
    elif end == "hand back":
        verdicts = (await worker.hand_back(*claimed)).verdicts
        assert [verdict.accepted for verdict in verdicts if verdict.id != ids[1]] == [True, True]
    elif end == "cancel":
        await store.cancel([job.id for job in healthy])
        assert set((await worker.renew(*claimed)).cancel) == {job.id for job in healthy}
        await worker.complete(*claimed)
    elif end == "take back":
        assert set((await worker.renew()).taken_back) >= {job.id for job in healthy}
    elif end == "leave":
        await worker.leave()
    elif end == "declare dead":
        await kit.worker(index=1, id="another")
    clock.advance(16)
    await store.rescue()
    assert {session.running for session in await store.sessions()} == {(0, 0, 0)}, "it is not held by the dead"
    await store.promote()
    other = await kit.worker(lease=60)
    while again := await other.claim(3):
        await other.complete(*again)
    clock.advance(301)
    await store.promote()
    last = await kit.worker(lease=60)
    while again := await last.claim(3):
        await last.complete(*again)
    assert {(await kit.job(id)).state for id in (ids[0], ids[2], ids[3])} == {JobState.COMPLETED}
    counts = (await store.queues())[0].counts
    assert (counts.scheduled, counts.pending, counts.running) == (0, 0, 0)
    assert counts.completed + counts.failed == 4
    await store.recount()
    assert (await store.recount()).differences == ()
    await store.close()
