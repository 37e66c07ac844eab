"""Enqueueing: batches are atomic, an id stands for one job for ever, and rejected input leaves no trace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairlane.errors import Conflict, InvalidInput, QueueFull
from fairlane.model.job import Enqueued, Job, JobKind, JobState, NewJob, Priority
from fairlane.model.retry import Backoff
from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .kit import Kit

PENDING, SCHEDULED = JobState.PENDING, JobState.SCHEDULED


async def test_answers_come_in_the_order_of_the_arguments(kit: Kit) -> None:
    known = kit.new(id="known")
    await kit.store.enqueue([known])

    answers = await kit.store.enqueue([kit.new(id="z"), known, kit.new(id="a", delay=60)])

    assert answers == [
        Enqueued("z", True, PENDING),
        Enqueued("known", False, PENDING),
        Enqueued("a", True, SCHEDULED),
    ]


async def test_no_jobs_are_a_batch_too(kit: Kit) -> None:
    assert await kit.store.enqueue([]) == []


async def test_a_reader_sees_every_field_that_was_sent(kit: Kit, clock: ManualClock) -> None:
    new = NewJob(
        id="job with spaces, ümläute and 🚃",
        task="images.render",
        queue="images",
        payload=b'[["a",1],{"k":null}]',
        lane="user:ann/übung",
        priority=Priority.LOW,
        cost=2.5,
        expires=600.0,
        retries=7,
        backoff=Backoff(base=3.0, factor=1.5, most=50.0, jitter=False),
        timeout=12.5,
        unique="once only",
        pool="gpu",
        sticky="plan 7",
        retry_of="an older job",
        headers=b'{"traceparent":"00-1"}',
    )

    await kit.store.enqueue([new])

    job = await kit.job(new.id)
    carried = set(NewJob.__struct_fields__) & set(Job.__struct_fields__) - {"worker"}
    assert carried >= {
        "payload",
        "lane",
        "cost",
        "backoff",
        "timeout",
        "unique",
        "pool",
        "sticky",
        "retry_of",
    }
    assert {name: getattr(job, name) for name in carried} == {name: getattr(new, name) for name in carried}
    assert (job.state, job.reason) == (PENDING, None)
    assert job.enqueued_at == clock.now()
    assert job.expires_at == clock.now() + 600
    assert (job.fence, job.started_at, job.finished_at, job.session) == (0, None, None, None)
    assert (job.result, job.error, job.progress, job.parent, job.attempts) == (None, None, None, None, ())
    assert not job.cancel_requested
    assert not job.suspect


async def test_jobs_of_one_batch_arrive_in_its_order(kit: Kit) -> None:
    ids = ["c", "a", "b"]

    await kit.store.enqueue([kit.new(id=id) for id in ids])

    arrivals = [(await kit.job(id)).arrival for id in ids]
    assert None not in arrivals
    assert arrivals == sorted(set(arrivals), key=lambda number: number or 0)


async def test_jobs_of_several_classes_in_one_batch_arrive_in_its_order(kit: Kit) -> None:
    lanes = ("user:1", None, None, "user:2", None)
    classes = (Priority.NORMAL, Priority.HIGH, Priority.NORMAL, Priority.LOW, Priority.HIGH)
    jobs = [kit.new(lane=lane, priority=priority) for lane, priority in zip(lanes, classes, strict=True)]
    await kit.store.enqueue(jobs)
    arrivals = [(await kit.job(job.id)).arrival or 0 for job in jobs]
    assert arrivals == sorted(set(arrivals))


async def test_a_thousand_jobs_fit_into_a_call_and_one_more_is_refused_whole(kit: Kit) -> None:
    most = [kit.new(id=f"fits-{n}") for n in range(1_000)]
    more = [kit.new(id=f"more-{n}") for n in range(1_001)]

    answers = await kit.store.enqueue(most)
    with pytest.raises(InvalidInput):
        await kit.store.enqueue(more)

    assert [answer.id for answer in answers] == [job.id for job in most]
    assert all(answer.created for answer in answers)
    assert await kit.store.get([job.id for job in more]) == [None] * 1_001


# -- ids -------------------------------------------------------------------------------------------


async def test_the_same_request_again_is_the_same_job(kit: Kit) -> None:
    new = kit.new(id="twice", payload=b"[[1],{}]")
    await kit.store.enqueue([new])

    again = await kit.store.enqueue([new])

    assert again == [Enqueued("twice", False, PENDING)]
    worker = await kit.worker()
    assert await worker.claim_ids(10) == ["twice"]


@pytest.mark.parametrize(
    "other",
    [
        {"payload": b"[[2],{}]"},
        {"task": "another"},
        {"queue": "another"},
        {"lane": "another"},
        {"lane": None},
        {"priority": Priority.HIGH},
        {"cost": 2.0},
        {"retries": 9},
        {"backoff": Backoff(base=9.0)},
        {"timeout": 9.0},
        {"sticky": "key"},
        {"worker": 9},
        {"pool": "another"},
        {"unique": "value"},
        {"retry_of": "another"},
    ],
    ids="-".join,
)
async def test_other_content_under_a_known_id_conflicts(kit: Kit, other: dict[str, Any]) -> None:
    first: dict[str, Any] = {"id": "taken", "lane": "ann", "payload": b"[[1],{}]"}
    await kit.enqueue(**first)

    with pytest.raises(Conflict):
        await kit.enqueue(**first | other)

    job = await kit.job("taken")
    assert (job.payload, job.task, job.queue, job.lane) == (b"[[1],{}]", "task", "default", "ann")


@pytest.mark.parametrize("when", [{"delay": 9.0}, {"run_at": 1.0}, {"expires": 9.0}], ids=str)
async def test_another_time_under_a_known_id_conflicts(kit: Kit, when: dict[str, Any]) -> None:
    await kit.enqueue(id="taken")

    with pytest.raises(Conflict):
        await kit.enqueue(id="taken", **when)


async def test_a_refused_call_takes_nothing_from_those_beside_it(kit: Kit) -> None:
    await kit.enqueue(id="taken")

    answers = await asyncio.gather(
        *(kit.store.enqueue([kit.new("other" if n % 2 else "task", id="taken"), kit.new(id=f"{n}")]) for n in range(8)),
        return_exceptions=True,
    )

    assert [isinstance(answer, Conflict) for answer in answers] == [False, True] * 4
    stored = await kit.store.get([f"{n}" for n in range(8)])
    assert [job is not None for job in stored] == [True, False] * 4


async def test_a_conflict_stores_nothing_of_its_batch(kit: Kit) -> None:
    await kit.enqueue(id="taken")

    with pytest.raises(Conflict):
        await kit.store.enqueue([kit.new(id="before"), kit.new("other", id="taken"), kit.new(id="after")])

    assert await kit.store.get(["before", "after"]) == [None, None]
    assert await (await kit.worker()).claim_ids(10) == ["taken"]


async def test_an_id_twice_in_one_batch_is_one_job(kit: Kit) -> None:
    new = kit.new(id="twin")

    answers = await kit.store.enqueue([new, new])

    assert [(answer.id, answer.created) for answer in answers] == [("twin", True), ("twin", False)]
    assert await (await kit.worker()).claim_ids(10) == ["twin"]


async def test_an_id_with_two_contents_in_one_batch_conflicts(kit: Kit) -> None:
    with pytest.raises(Conflict):
        await kit.store.enqueue([kit.new("one", id="twin"), kit.new("two", id="twin")])

    assert await kit.store.get(["twin"]) == [None]


async def test_of_many_callers_with_the_same_id_one_makes_the_job(kit: Kit) -> None:
    new = kit.new(id="contested")

    answers = await asyncio.gather(*(kit.store.enqueue([new]) for _ in range(8)))

    assert [answer.id for [answer] in answers] == ["contested"] * 8
    assert sum(answer.created for [answer] in answers) == 1
    assert await (await kit.worker()).claim_ids(10) == ["contested"]


async def test_a_repeated_request_answers_the_present_state_and_never_runs_again(kit: Kit) -> None:
    new = kit.new(id="long gone")
    await kit.store.enqueue([new])
    worker = await kit.worker()
    [job] = await worker.claim()
    assert await kit.store.enqueue([new]) == [Enqueued("long gone", False, JobState.RUNNING)]

    await worker.complete(job)

    assert await kit.store.enqueue([new]) == [Enqueued("long gone", False, JobState.COMPLETED)]
    assert await worker.claim() == []
    with pytest.raises(Conflict):
        await kit.enqueue("other", id="long gone")


async def test_a_repeated_delay_does_not_start_again(kit: Kit, clock: ManualClock) -> None:
    new = kit.new(id="later", delay=60)
    await kit.store.enqueue([new])
    due = (await kit.job("later")).due_at
    clock.advance(30)

    assert await kit.store.enqueue([new]) == [Enqueued("later", False, SCHEDULED)]

    assert (await kit.job("later")).due_at == due


# -- when ------------------------------------------------------------------------------------------


async def test_a_delay_counts_from_the_enqueue(kit: Kit, clock: ManualClock) -> None:
    [answer] = await kit.store.enqueue([kit.new(id="later", delay=90)])

    job = await kit.job("later")
    assert answer.state is job.state is SCHEDULED
    assert job.due_at == clock.now() + 90
    assert job.arrival is None


async def test_run_at_is_an_instant_on_the_wall_clock(kit: Kit, clock: ManualClock) -> None:
    await kit.store.enqueue([kit.new(id="future", run_at=clock.now() + 90)])

    job = await kit.job("future")
    assert (job.state, job.due_at, job.arrival) == (SCHEDULED, clock.now() + 90, None)


@pytest.mark.parametrize("ago", [0.0, 3_600.0])
async def test_a_run_at_that_has_come_is_due_at_once(kit: Kit, clock: ManualClock, ago: float) -> None:
    [answer] = await kit.store.enqueue([kit.new(id="past", run_at=clock.now() - ago)])

    assert answer.state is PENDING
    assert await (await kit.worker()).claim_ids() == ["past"]


async def test_expiry_counts_from_the_enqueue_and_not_from_the_due_time(kit: Kit, clock: ManualClock) -> None:
    await kit.enqueue(id="brief", delay=60, expires=90)

    assert (await kit.job("brief")).expires_at == clock.now() + 90


# -- refused ---------------------------------------------------------------------------------------


async def test_a_lane_outside_a_closed_set_is_refused_and_nothing_of_the_batch_is_stored(kit: Kit) -> None:
    await kit.settings(closed=("a", "b"))

    with pytest.raises(InvalidInput) as refusal:
        await kit.store.enqueue([kit.new(id="good", lane="a"), kit.new(id="bad", lane="c")])

    assert refusal.value.field == "lane"
    assert await kit.store.get(["good", "bad"]) == [None, None]


async def test_a_closed_set_takes_its_lanes_and_refuses_jobs_without_one(kit: Kit) -> None:
    await kit.settings(closed=("a", "b"))

    await kit.enqueue(id="in a", lane="a")
    await kit.enqueue(id="elsewhere", queue="open", lane="c")
    with pytest.raises(InvalidInput):
        await kit.enqueue(id="laneless")

    assert await kit.state("in a") is await kit.state("elsewhere") is PENDING
    assert await kit.store.get(["laneless"]) == [None]


async def test_a_closed_set_stays_closed_to_a_lane_that_only_a_rule_names(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="c", weight=2.0), closed=("a",))

    with pytest.raises(InvalidInput):
        await kit.enqueue(lane="c")


async def test_a_turn_in_a_lane_without_a_limit_stores_nothing(kit: Kit, store: Store) -> None:
    waiter = await kit.waiter()
    turn = kit.new(id="turn", kind=JobKind.TURN, lane="free", waiter=waiter.id)

    with pytest.raises(InvalidInput):
        await store.enqueue([kit.new(id="beside"), turn])

    assert await store.get(["turn", "beside"]) == [None, None]


async def test_a_turn_of_a_session_that_is_not_live_stores_nothing(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="*", limit=1))
    gone = await kit.waiter()
    await gone.leave()

    for waiter in (gone.id, "never registered"):
        turn = kit.new(id=f"turn of {waiter}", kind=JobKind.TURN, lane="narrow", waiter=waiter)
        with pytest.raises(InvalidInput):
            await store.enqueue([kit.new(id=f"beside {waiter}"), turn])
        assert await store.get([turn.id, f"beside {waiter}"]) == [None, None]


# -- full ------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_the_whole_batch(kit: Kit) -> None:
    await kit.settings(max_pending=3)
    await kit.store.enqueue([kit.new(id="one"), kit.new(id="two")])

    with pytest.raises(QueueFull):
        await kit.store.enqueue([kit.new(id="three"), kit.new(id="four")])

    assert await kit.store.get(["three", "four"]) == [None, None]
    assert (await kit.store.enqueue([kit.new(id="three")]))[0].created


async def test_a_full_queue_fills_no_other_queue(kit: Kit) -> None:
    await kit.settings(max_pending=1)
    await kit.enqueue()

    assert (await kit.store.enqueue([kit.new(queue="other"), kit.new(queue="other")]))[1].created


async def test_a_full_lane_refuses_only_its_own_jobs(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="small*", max_pending=1))
    await kit.enqueue(lane="small-1")

    with pytest.raises(QueueFull):
        await kit.enqueue(id="too much", lane="small-1")

    await kit.enqueue(lane="small-2")
    await kit.enqueue(lane="large")
    await kit.enqueue()
    assert await kit.store.get(["too much"]) == [None]


async def test_a_duplicate_is_answered_even_when_the_queue_is_full(kit: Kit) -> None:
    await kit.settings(max_pending=1)
    new = kit.new(id="known", unique="value")
    await kit.store.enqueue([new])

    assert await kit.store.enqueue([new]) == [Enqueued("known", False, PENDING)]
    assert await kit.store.enqueue([kit.new(unique="value")]) == [Enqueued("known", False, PENDING)]


async def test_a_job_that_starts_makes_room_in_a_full_queue(kit: Kit) -> None:
    await kit.settings(max_pending=1)
    worker = await kit.worker()
    await kit.enqueue()
    assert len(await worker.claim()) == 1

    await kit.enqueue(id="next")

    assert await kit.state("next") is PENDING


async def test_lifting_the_bound_opens_a_full_queue(kit: Kit) -> None:
    await kit.settings(max_pending=1, version=1)
    await kit.enqueue()
    await kit.settings(max_pending=None, version=2)

    await kit.enqueue(id="next")

    assert await kit.state("next") is PENDING
