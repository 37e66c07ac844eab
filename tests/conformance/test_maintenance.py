"""Retention, counts and recounts: what is forgotten when, and that counts agree with the jobs."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from fairlane.errors import Conflict
from fairlane.model.binding import BindingState
from fairlane.model.job import Claimed, JobKind, JobState, Priority, Reason
from fairlane.model.maintenance import DAY, Retention
from fairlane.model.reading import Counts, QueueReading
from fairlane.model.session import SessionState
from fairlane.model.settings import LaneRule
from fairlane.model.states import complete, fail, hand_back, retry, snooze
from tests.sizes import sized

from .kit import Kit, Worker
from .runs import bulk, drain, everything


async def _completed(kit: Kit, count: int, **fields: Any) -> list[str]:
    """Ids of jobs that completed one second after the other."""
    worker = await kit.worker(fields.get("queue", "default"), lease=1e6)
    ids = []
    for _ in range(count):
        ids.append(await kit.enqueue(**fields))
        await worker.complete(*await worker.claim())
        kit.clock.advance(1)
    await worker.leave()
    return ids


async def _known(kit: Kit, ids: list[str]) -> list[str]:
    return [job.id for job in await kit.store.get(ids) if job is not None]


async def _reading(kit: Kit, queue: str = "default") -> QueueReading:
    [reading] = [each for each in await kit.store.queues() if each.name == queue]
    return reading


async def test_completed_jobs_are_kept_for_a_day(kit: Kit) -> None:
    ids = await _completed(kit, 1)
    kit.clock.advance(DAY - 10)
    assert (await kit.store.prune(Retention())).jobs == 0
    assert await _known(kit, ids) == ids
    kit.clock.advance(20)
    assert (await kit.store.prune(Retention())).jobs == 1
    assert await _known(kit, ids) == []


async def test_failed_and_cancelled_jobs_are_kept_for_a_week(kit: Kit) -> None:
    worker = await kit.worker()
    ids = [await kit.enqueue() for _ in range(2)]
    await worker.fail(*await worker.claim())
    await kit.store.cancel(ids[1:])
    kit.clock.advance(7 * DAY - 10)
    await kit.store.prune(Retention())
    assert await _known(kit, ids) == ids
    kit.clock.advance(20)
    assert (await kit.store.prune(Retention())).jobs == 2
    assert await _known(kit, ids) == []


async def test_what_is_not_final_is_never_pruned(kit: Kit) -> None:
    worker = await kit.worker()
    runs, waits = await kit.enqueue(), await kit.enqueue()
    assert await worker.claim_ids() == [runs]
    later = await kit.enqueue(delay=100 * DAY)
    kit.clock.advance(60 * DAY)
    await kit.store.prune(Retention(completed_count=0, failed_count=0))
    assert await _known(kit, [runs, waits, later]) == [runs, waits, later]


async def test_only_the_newest_completed_jobs_of_each_queue_are_kept(kit: Kit) -> None:
    images = await _completed(kit, 5, queue="images")
    mail = await _completed(kit, 2, queue="mail")
    assert (await kit.store.prune(Retention(completed_count=2))).jobs == 3
    assert await _known(kit, images) == images[3:]
    assert await _known(kit, mail) == mail


async def test_only_the_newest_failed_jobs_are_kept_and_completed_ones_do_not_count_among_them(
    kit: Kit,
) -> None:
    worker = await kit.worker()
    failed = []
    for _ in range(4):
        failed.append(await kit.enqueue())
        await worker.fail(*await worker.claim())
        kit.clock.advance(1)
    done = await _completed(kit, 3)
    assert (await kit.store.prune(Retention(failed_count=1))).jobs == 3
    assert await _known(kit, failed + done) == failed[3:] + done


async def test_a_pass_prunes_at_most_its_limit_and_says_that_there_is_more(kit: Kit) -> None:
    ids = await _completed(kit, 5)
    kit.clock.advance(2 * DAY)
    pruned = await kit.store.prune(Retention(), limit=2)
    assert (pruned.jobs, pruned.more) == (2, True)
    passes = 1
    while pruned.more:
        pruned = await kit.store.prune(Retention(), limit=2)
        passes += 1
    assert await _known(kit, ids) == []
    assert passes <= 4


async def test_an_id_stays_taken_for_a_day_although_its_job_went_by_number(kit: Kit) -> None:
    [id] = await _completed(kit, 1, id="once")
    await kit.store.prune(Retention(completed_count=0))
    assert await _known(kit, [id]) == []
    kit.clock.advance(DAY - 60)
    await kit.store.prune(Retention(completed_count=0))
    [again] = await kit.store.enqueue([kit.new(id=id)])
    assert not again.created
    with pytest.raises(Conflict):
        await kit.enqueue(id=id, payload=b'[["other"],{}]')
    kit.clock.advance(120)
    await kit.store.prune(Retention(completed_count=0))
    [anew] = await kit.store.enqueue([kit.new(id=id)])
    assert anew.created


async def test_an_id_is_free_again_once_its_job_went_by_age(kit: Kit) -> None:
    [id] = await _completed(kit, 1, id="once")
    kit.clock.advance(DAY + 1)
    while (await kit.store.prune(Retention())).more:
        pass
    [anew] = await kit.store.enqueue([kit.new(id=id)])
    assert anew.created


async def test_ended_sessions_and_closed_bindings_are_forgotten_after_their_time(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(sticky="plan")
    await worker.complete(*await worker.claim())
    await kit.store.release("default", "plan")
    await worker.leave()
    kit.clock.advance(29 * DAY)
    await kit.store.prune(Retention())
    [session] = await kit.store.sessions()
    [binding] = await kit.store.bindings()
    assert (session.state, binding.state) == (SessionState.ENDED, BindingState.RELEASED)
    kit.clock.advance(2 * DAY)
    assert (await kit.store.prune(Retention())).other >= 2
    assert await kit.store.sessions() == []
    assert await kit.store.bindings() == []


async def test_a_live_session_and_an_open_binding_are_kept_however_old(kit: Kit) -> None:
    worker = await kit.worker(lease=1e7)
    await kit.enqueue(sticky="plan")
    kit.clock.advance(60 * DAY)
    await kit.store.prune(Retention())
    assert [session.id for session in await kit.store.sessions()] == [worker.id]
    assert [binding.state for binding in await kit.store.bindings()] == [BindingState.OPEN]


async def test_queues_count_jobs_by_state_and_class(kit: Kit) -> None:
    worker = await kit.worker()
    for priority, count in zip(Priority, (1, 2, 3), strict=True):
        await kit.enqueue_all(bulk(kit, None, count, priority=priority))
    await kit.enqueue(delay=60, priority=Priority.LOW)
    claimed = await worker.claim(3)
    assert [job.priority for job in claimed] == [Priority.HIGH, Priority.NORMAL, Priority.NORMAL]
    await worker.complete(claimed[0])
    await worker.fail(claimed[1])
    [low] = [job.id for job in (await everything(kit, state=JobState.SCHEDULED))]
    await kit.store.cancel([low])
    reading = await _reading(kit)
    assert reading.classes == (
        Counts(completed=1),
        Counts(running=1, failed=1),
        Counts(pending=3, cancelled=1),
    )
    assert reading.counts == Counts(pending=3, running=1, completed=1, failed=1, cancelled=1)
    assert reading.workers == 1


async def test_the_counts_of_ended_jobs_outlive_the_jobs(kit: Kit) -> None:
    await _completed(kit, 3)
    await kit.store.prune(Retention(completed_count=0))
    assert (await _reading(kit)).counts == Counts(completed=3)
    assert (await kit.store.recount()).differences == ()


async def test_only_live_workers_that_serve_a_queue_are_counted(kit: Kit) -> None:
    await kit.settings("images")
    await kit.worker("images", "mail")
    await kit.worker("mail")
    gone = await kit.worker("images")
    await gone.leave()
    assert (await _reading(kit, "images")).workers == 1


async def _random_steps(kit: Kit, rng: Random, steps: int) -> None:
    """Let a small fleet do everything that can happen to jobs, in an arbitrary order."""
    held: dict[str, tuple[Worker, list[Claimed]]] = {}
    queues = ("default", "limited")
    waiter = await kit.waiter(lease=1e6)
    for _ in range(steps):
        if len(held) < 2:
            worker = await kit.worker(*queues, slots=4, lease=1e6)
            held[worker.id] = (worker, [])
        worker, claimed = held[rng.choice(list(held))]
        match rng.randrange(10):
            case 0 | 1 | 2:
                await _random_enqueue(kit, rng, waiter)
            case 3 | 4:
                claimed += await worker.claim(rng.randrange(1, 4))
            case 5 | 6 if claimed:
                held_job = claimed.pop(rng.randrange(len(claimed))).held
                ends = (
                    complete(held_job),
                    fail(held_job, Reason.ERROR, "boom"),
                    retry(held_job, rng.choice((0.0, 3.0)), Reason.ERROR, "boom"),
                    snooze(held_job, 3.0),
                    hand_back(held_job),
                )
                await worker.finish(rng.choice(ends))
            case 7:
                waiting = [job.id for job in await everything(kit) if not job.state.final]
                await kit.store.cancel(rng.sample(waiting, min(2, len(waiting))))
            case 8 if rng.random() < 0.4:
                await kit.store.leave(worker.id, begun=None if rng.random() < 0.5 else ())
                del held[worker.id]
            case _:
                kit.clock.advance(2)
                await kit.store.promote()
                await kit.store.rescue()
                await kit.store.release("default", rng.choice("ab"))
                assert (await kit.store.admit()).repaired == 0


async def _random_enqueue(kit: Kit, rng: Random, waiter: Worker) -> None:
    queue, priority = rng.choice(("default", "limited")), rng.choice(list(Priority))
    lane = rng.choice((None, "ordered", "open", "free"))
    kind = rng.choice(("plain", "plain", "sticky", "later", "expiring", "turn", "broadcast"))
    if kind == "turn":
        await kit.enqueue(queue="default", lane="ordered", kind=JobKind.TURN, waiter=waiter.id)
    elif kind == "broadcast":
        await kit.enqueue(queue=queue, kind=JobKind.BROADCAST, priority=priority, ttl=rng.choice((0.0, 4.0)))
    else:
        extra: dict[str, dict[str, Any]] = {
            "plain": {},
            "sticky": {"sticky": rng.choice("ab")},
            "later": {"delay": 3.0},
            "expiring": {"expires": 3.0},
        }
        await kit.enqueue(queue=queue, lane=lane, priority=priority, **extra[kind])


@pytest.mark.parametrize("seed", sized([1, 2], [1, 2, 3, 4]))
async def test_after_any_run_a_recount_finds_nothing_and_the_counts_agree_with_the_jobs(kit: Kit, seed: int) -> None:
    rng = Random(seed)
    rules = (LaneRule(pattern="ordered", limit=1), LaneRule(pattern="open", limit=2, weight=3))
    await kit.settings("default", *rules)
    await kit.settings("limited", *rules, limit=3)
    await _random_steps(kit, rng, 150)
    recount = await kit.store.recount()
    jobs = await everything(kit)
    assert recount.differences == ()
    assert recount.jobs >= sum(not job.state.final for job in jobs)
    counted = Counter((job.queue, job.priority, job.state) for job in jobs)
    for reading in await kit.store.queues():
        for priority, counts in zip(Priority, reading.classes, strict=True):
            for state in JobState:
                told = getattr(counts, state.value)
                assert told == counted[reading.name, priority, state], (reading.name, priority, state)
    running = Counter((job.queue, job.lane) for job in jobs if job.state is JobState.RUNNING)
    for queue in ("default", "limited"):
        for lane in await kit.store.lanes(queue):
            assert lane.running == running[queue, lane.lane]
    for session in await kit.store.sessions():
        owned = Counter(job.priority for job in jobs if job.session == session.id and job.state is JobState.RUNNING)
        if session.slots is not None:
            assert session.running == tuple(owned[priority] for priority in Priority)


async def test_a_recount_changes_nothing_when_there_is_nothing_to_correct(kit: Kit) -> None:
    await kit.settings("default", LaneRule(pattern="user", limit=1))
    worker = await kit.worker()
    ids = [await kit.enqueue(lane="user") for _ in range(3)]
    await kit.store.recount()
    assert await drain(worker) == ids
