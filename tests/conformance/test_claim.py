"""Claiming: which jobs a session gets, in which order, and what a repeated or a late claim answers."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from fairlane.errors import SessionLost, Stale
from fairlane.model.job import Claimed, JobKind, JobState, Priority, Reason
from fairlane.model.retry import Backoff
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Ask
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .death import die, survivor
from .kit import Kit

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


async def test_a_claimed_job_carries_all_a_worker_needs(kit: Kit, clock: ManualClock) -> None:
    backoff = Backoff(base=2.0, jitter=False)
    await kit.enqueue(
        "render",
        id="job",
        payload=b'[[1],{"a":2}]',
        lane="ann",
        retries=5,
        backoff=backoff,
        timeout=7.0,
        headers=b"{}",
    )
    worker = await kit.worker()

    claimed = await worker.claim()

    assert claimed == [
        Claimed(
            id="job",
            fence=1,
            attempt=1,
            task="render",
            queue="default",
            lane="ann",
            priority=NORMAL,
            payload=b'[[1],{"a":2}]',
            retries=5,
            backoff=backoff,
            timeout=7.0,
            kind=JobKind.JOB,
            sticky=None,
            suspect=False,
            limited=False,
            headers=b"{}",
            waited=0.0,
        )
    ]
    job = await kit.job("job")
    assert (job.state, job.session, job.worker) == (JobState.RUNNING, worker.id, worker.name)
    assert (job.fence, job.attempt, job.started_at) == (1, 1, clock.now())
    [attempt] = job.attempts
    assert (attempt.fence, attempt.attempt, attempt.session, attempt.worker) == (1, 1, worker.id, worker.name)
    assert (attempt.started_at, attempt.ended_at, attempt.outcome) == (clock.now(), None, None)


async def test_nothing_to_do_is_an_empty_answer(kit: Kit) -> None:
    assert await (await kit.worker()).claim(5) == []


# -- order -----------------------------------------------------------------------------------------


async def test_jobs_of_one_lane_start_in_order_of_arrival(kit: Kit) -> None:
    # Ids sort against arrival, so that an order by id would be seen.
    ids = [f"{9 - n}" for n in range(8)]
    for id in ids:
        await kit.enqueue(id=id, lane="ann")

    assert await (await kit.worker()).claim_ids(8) == ids


async def test_jobs_without_a_lane_share_one_lane(kit: Kit) -> None:
    await kit.store.enqueue([kit.new(f"task-{n % 3}", id=f"free-{n}") for n in range(6)])
    await kit.store.enqueue([kit.new(id=f"ann-{n}", lane="ann") for n in range(3)])

    started = await (await kit.worker()).claim_ids(9)

    assert [id for id in started if id.startswith("free")] == [f"free-{n}" for n in range(6)]
    # Whatever their task, they are one lane beside ann's: the two take turns while both have work.
    assert all(a.split("-")[0] != b.split("-")[0] for a, b in pairwise(started[:6]))


async def test_asks_are_answered_in_their_order(kit: Kit) -> None:
    for id, queue, priority in [
        ("a-high", "a", HIGH),
        ("a-low", "a", LOW),
        ("b-high", "b", HIGH),
        ("b-low", "b", LOW),
    ]:
        await kit.enqueue(id=id, queue=queue, priority=priority)
    worker = await kit.worker("a", "b")

    started = await worker.claim_ids(10, Ask("b", LOW, 5), Ask("a", HIGH, 5), Ask("b", HIGH, 5), Ask("a", LOW, 5))

    assert started == ["b-low", "a-high", "b-high", "a-low"]


async def test_an_ask_takes_no_more_than_it_says_and_the_next_one_goes_on(kit: Kit) -> None:
    await kit.store.enqueue([kit.new(id=f"{queue}{n}", queue=queue) for queue in "ab" for n in range(3)])
    worker = await kit.worker("a", "b")

    started = await worker.claim_ids(10, Ask("a", NORMAL, 1), Ask("b", NORMAL, 1), Ask("a", NORMAL, 5))

    assert started == ["a0", "b0", "a1", "a2"]


async def test_the_total_ends_a_claim(kit: Kit) -> None:
    await kit.store.enqueue([kit.new(id=f"{queue}{n}", queue=queue) for queue in "ab" for n in range(3)])
    worker = await kit.worker("a", "b")

    assert await worker.claim_ids(4, Ask("a", NORMAL, 9), Ask("b", NORMAL, 9)) == ["a0", "a1", "a2", "b0"]


async def test_a_total_of_nothing_starts_nothing(kit: Kit) -> None:
    await kit.enqueue(id="job")

    assert await (await kit.worker()).claim_ids(0, Ask("default", NORMAL, 5)) == []
    assert await kit.state("job") is JobState.PENDING


async def test_an_ask_sees_its_own_class_and_queue_alone(kit: Kit) -> None:
    await kit.enqueue(queue="a", priority=NORMAL)
    worker = await kit.worker("a", "b")

    assert await worker.claim_ids(9, Ask("a", HIGH, 9), Ask("a", LOW, 9), Ask("b", NORMAL, 9)) == []


async def test_class_comes_before_source(kit: Kit) -> None:
    await kit.enqueue(id="a-low", queue="a", priority=LOW)
    await kit.enqueue(id="a-normal", queue="a", priority=NORMAL)
    await kit.enqueue(id="b-normal", queue="b", priority=NORMAL)
    await kit.enqueue(id="b-high", queue="b", priority=HIGH)
    worker = await kit.worker("a", "b")
    await kit.enqueue(id="inbox-low", queue="c", priority=LOW, worker=worker.session.index)

    started = await worker.claim_ids(9)

    assert started == ["b-high", "a-normal", "b-normal", "inbox-low", "a-low"]


async def test_an_inbox_holds_jobs_of_any_queue_for_this_worker_alone(kit: Kit) -> None:
    first, second = await kit.worker("a"), await kit.worker("a")
    await kit.enqueue(id="for-second", queue="elsewhere", worker=second.session.index)

    assert await first.claim_ids(9, Ask(None, NORMAL, 9), Ask("a", NORMAL, 9), Ask("elsewhere", NORMAL, 9)) == []
    assert await second.claim_ids(9, Ask(None, NORMAL, 9)) == ["for-second"]


async def test_a_scheduled_job_is_not_claimed(kit: Kit) -> None:
    await kit.enqueue(id="later", delay=5)

    assert await (await kit.worker()).claim(9) == []


async def test_no_two_workers_get_the_same_job(kit: Kit) -> None:
    ids = {f"job-{n}" for n in range(40)}
    await kit.store.enqueue([kit.new(id=id, lane=f"lane-{id[-1]}") for id in sorted(ids)])
    workers = [await kit.worker(slots=20) for _ in range(4)]

    answers = await asyncio.gather(*(worker.claim(7) for worker in workers for _ in range(2)))

    started = [job.id for answer in answers for job in answer]
    assert len(started) == len(set(started)) == 40
    assert set(started) == ids


# -- numbers ---------------------------------------------------------------------------------------


async def test_a_repeated_number_returns_the_same_jobs_and_starts_no_others(kit: Kit, store: Store) -> None:
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(5)])
    worker = await kit.worker()
    call = worker.everything(2)
    first = await store.claim(worker.id, call)

    again = await store.claim(worker.id, call)

    assert again == first
    assert [job.id for job in first] == ["job-0", "job-1"]
    assert (await kit.job("job-0")).fence == 1
    assert await kit.state("job-2") is JobState.PENDING


async def test_a_repeated_number_leaves_out_what_is_not_held_any_more(kit: Kit, store: Store) -> None:
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(3)])
    worker, other = await kit.worker(), await kit.worker()
    call = worker.everything(3)
    completed, handed_back, held = await store.claim(worker.id, call)
    await worker.complete(completed)
    await worker.hand_back(handed_back)
    assert [job.id for job in await other.claim(3)] == [handed_back.id]

    assert await store.claim(worker.id, call) == [held]


async def test_a_number_that_started_nothing_may_be_used_again(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    call = worker.everything(1)
    assert await store.claim(worker.id, call) == []
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])

    first = await store.claim(worker.id, call)

    assert [job.id for job in first] == ["one"]
    assert await store.claim(worker.id, call) == first
    assert await kit.state("two") is JobState.PENDING


async def test_a_late_claim_under_a_number_before_an_empty_one_strands_nothing(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    late, empty = worker.everything(1), worker.everything(1)
    assert await store.claim(worker.id, empty) == []
    await kit.enqueue(id="job")
    await store.claim(worker.id, late)

    # The reply is ignored: the session has made a later claim, whose number it names when it renews.
    renewal = await worker.renew(claim=empty.number)

    assert await kit.state("job") is JobState.PENDING
    assert renewal.taken_back == ("job",)
    [job] = await worker.claim()
    assert job.attempt == 1


async def test_a_claim_from_an_unknown_queue_does_not_create_it(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    assert await worker.claim(1, Ask("never-heard-of", NORMAL, 1)) == []
    assert "never-heard-of" not in {queue.name for queue in await store.queues()}


async def test_a_lower_number_is_stale_and_starts_nothing(kit: Kit, store: Store) -> None:
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(3)])
    worker = await kit.worker()
    asks = (Ask("default", NORMAL, 1),)
    await store.claim(worker.id, Claim(number=7, asks=asks, total=1))

    with pytest.raises(Stale) as refusal:
        await store.claim(worker.id, Claim(number=6, asks=asks, total=1))

    # The session is alive: only its call came too late.
    assert not isinstance(refusal.value, SessionLost)
    assert await kit.state("job-1") is JobState.PENDING
    assert len(await store.claim(worker.id, Claim(number=8, asks=asks, total=1))) == 1


async def test_numbers_belong_to_a_session(kit: Kit, store: Store) -> None:
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(2)])
    first, second = await kit.worker(), await kit.worker()
    asks = (Ask("default", NORMAL, 1),)

    [one] = await store.claim(first.id, Claim(number=5, asks=asks, total=1))
    [two] = await store.claim(second.id, Claim(number=1, asks=asks, total=1))

    assert {one.id, two.id} == {"job-0", "job-1"}


async def test_a_repeated_number_in_a_finish_answers_like_a_repeated_claim(kit: Kit, store: Store) -> None:
    await kit.store.enqueue([kit.new(id=f"job-{n}") for n in range(3)])
    worker = await kit.worker()
    call = worker.everything(2)
    first = await store.claim(worker.id, call)

    finished = await store.finish(worker.id, [], claim=call)

    assert list(finished.claimed) == first


# -- expiry ----------------------------------------------------------------------------------------


async def test_a_claim_cancels_an_expired_job_instead_of_starting_it(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="expired", expires=5)
    await kit.enqueue(id="good")
    clock.advance(6)

    assert await worker.claim_ids(5) == ["good"]

    job = await kit.job("expired")
    assert (job.state, job.reason, job.fence, job.attempts) == (JobState.CANCELLED, Reason.EXPIRED, 0, ())
    assert job.finished_at == clock.now()


async def test_an_expired_job_takes_no_place_of_the_total(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker(slots=1)
    await kit.store.enqueue([kit.new(id=f"expired-{n}", expires=5) for n in range(3)])
    await kit.enqueue(id="good")
    clock.advance(6)

    assert await worker.claim_ids(1) == ["good"]


async def test_a_job_that_started_in_time_does_not_expire(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker(lease=600)
    await kit.enqueue(id="job", expires=5)
    clock.advance(4)
    [job] = await worker.claim()
    clock.advance(60)

    assert await worker.claim(5) == []
    assert (await worker.complete(job)).verdicts[0].state is JobState.COMPLETED


# -- sessions --------------------------------------------------------------------------------------


async def test_a_dead_session_cannot_claim(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await die(kit, worker)

    with pytest.raises(SessionLost):
        await worker.claim()

    assert await kit.state("job") is JobState.PENDING


async def test_a_dead_session_is_rejected_even_when_it_repeats_its_last_claim_number(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    call = worker.everything(1)
    await store.claim(worker.id, call)
    await die(kit, worker)

    with pytest.raises(SessionLost):
        await store.claim(worker.id, call)


async def test_a_session_that_left_cannot_claim(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job")
    await worker.leave()

    with pytest.raises(SessionLost):
        await worker.claim()


async def test_a_stopping_session_gets_nothing(kit: Kit) -> None:
    worker, other = await kit.worker(), await survivor(kit)
    await kit.enqueue(id="job")
    await kit.enqueue(id="direct", worker=worker.session.index)
    await worker.renew(stopping=True)

    assert await worker.claim(5) == []

    assert await other.claim_ids(5) == ["job"]


async def test_a_stopping_session_gets_nothing_from_a_finish_either(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])
    [job] = await worker.claim()
    await worker.renew(job, stopping=True)

    await worker.complete(job)
    finished = await store.finish(worker.id, [], claim=worker.everything(5))

    assert finished.claimed == ()
    assert await kit.state("one") is JobState.COMPLETED
    assert await kit.state("two") is JobState.PENDING


async def test_a_claim_shows_whether_the_job_holds_a_place_of_a_limited_lane(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="one", limit=1), LaneRule(pattern="two", limit=2))
    for lane in ("one", "two", "free", None):
        await kit.enqueue(lane=lane)
    claimed = await (await kit.worker()).claim(10)
    assert {job.lane: job.limited for job in claimed} == {"one": True, "two": True, "free": False, None: False}
