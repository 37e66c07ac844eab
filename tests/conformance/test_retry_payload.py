"""A retry or a snooze may replace the payload of its job; the id still stands for what was enqueued."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fairlane.errors import Conflict, InvalidInput
from fairlane.model.job import Acceptance, Held, JobKind, JobState, Priority, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.names import PAYLOAD_BYTES
from fairlane.model.retry import Backoff
from fairlane.model.settings import LaneRule
from fairlane.model.states import Transition, complete, retry, snooze
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .kit import Kit

OLD, NEW, NEWER = b'[["old"],{}]', b'[["new"],{"times":1}]', b"[[2],{}]"
LARGEST = b'["' + b"x" * (PAYLOAD_BYTES - 4) + b'"]'
Change = Callable[[Held, bytes], Transition]


def _retry(held: Held, payload: bytes) -> Transition:
    return retry(held, 0.0, Reason.ERROR, "boom", payload=payload)


def _retry_later(held: Held, payload: bytes) -> Transition:
    return retry(held, 3.0, Reason.ERROR, "boom", payload=payload)


def _snooze(held: Held, payload: bytes) -> Transition:
    return snooze(held, 0.0, payload=payload)


def _snooze_later(held: Held, payload: bytes) -> Transition:
    return snooze(held, 3.0, payload=payload)


CHANGES = pytest.mark.parametrize("change", [_retry, _retry_later, _snooze, _snooze_later])
CONTENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every_field": {
        "lane": "user:ann",
        "priority": Priority.HIGH,
        "cost": 2.5,
        "expires": 60.0,
        "retries": 7,
        "backoff": Backoff(base=2.0),
        "timeout": 30.0,
        "unique": "once",
        "unique_for": 600.0,
        "sticky": "key",
        "headers": b'{"trace":"1"}',
    },
    "delayed": {"delay": 1.0},
    "a_retry": {"retry_of": "another"},
    "direct": {"worker": 0},
    "long_payload": {"payload": b'["' + b"o" * 70_000 + b'"]'},
    "middling_payload": {"payload": b'["' + b"o" * 300 + b'"]'},
}


@CHANGES
async def test_later_attempts_and_readers_see_the_new_payload(kit: Kit, clock: ManualClock, change: Change) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", payload=OLD, headers=b'{"trace":"1"}')
    [job] = await worker.claim()

    finished = await worker.finish(change(job.held, NEW))

    assert finished.verdicts[0].acceptance is Acceptance.APPLIED
    assert (await kit.job("job")).payload == NEW
    clock.advance(4)
    await kit.store.promote()
    [again] = await worker.claim()
    assert (again.payload, again.headers, again.task) == (NEW, b'{"trace":"1"}', "task")
    await worker.retry(again)
    [third] = await worker.claim()
    assert third.payload == NEW
    await worker.complete(third)
    seen = await kit.job("job")
    assert (seen.payload, seen.state) == (NEW, JobState.COMPLETED)
    assert seen.as_new("again").payload == NEW
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("fields", CONTENTS.values(), ids=CONTENTS.keys())
async def test_nothing_else_of_the_job_changes(kit: Kit, clock: ManualClock, fields: dict[str, Any]) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="plain", payload=OLD)
    await kit.enqueue(id="job", **fields)
    clock.advance(2)
    await kit.store.promote()
    held = {job.id: job.held for job in await worker.claim(2)}
    before = await kit.job("job")

    await worker.finish(_retry_later(held["job"], LARGEST))

    after = await kit.job("job")
    assert after.payload == LARGEST
    for field in ("task", "queue", "kind", "lane", "priority", "cost", "headers", "retries", "backoff", "timeout"):
        assert getattr(after, field) == getattr(before, field), field
    for field in ("unique", "pool", "sticky", "direct", "retry_of", "enqueued_at", "attempt", "fence"):
        assert getattr(after, field) == getattr(before, field), field
    assert (await kit.job("plain")).payload == OLD


@pytest.mark.parametrize("fields", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("times", [1, 2])
async def test_the_same_enqueue_is_still_a_duplicate(
    kit: Kit, clock: ManualClock, fields: dict[str, Any], times: int
) -> None:
    worker = await kit.worker()
    new = kit.new(id="job", **fields)
    await kit.store.enqueue([new])
    clock.advance(2)
    await kit.store.promote()
    for payload in (NEW, NEWER)[:times]:
        [job] = await worker.claim()
        await worker.finish(_retry(job.held, payload))

    for together in ([new], [new, kit.new()]):
        answers = await kit.store.enqueue(together)
        assert (answers[0].id, answers[0].created, answers[0].state) == ("job", False, JobState.PENDING)


async def test_the_new_content_under_the_id_is_a_conflict(kit: Kit, store: Store) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", payload=OLD)
    [job] = await worker.claim()
    await worker.finish(_retry(job.held, NEW))

    for payload in (NEW, NEWER):
        with pytest.raises(Conflict):
            await store.enqueue([kit.new(id="job", payload=payload)])
    with pytest.raises(Conflict):
        await store.enqueue([kit.new(id="job", payload=OLD, retries=5)])


@pytest.mark.parametrize("by_retention", [True, False])
async def test_a_reserved_id_stands_for_what_was_enqueued(kit: Kit, clock: ManualClock, by_retention: bool) -> None:
    keep = Retention(completed_seconds=60.0, id_seconds=3_600.0)
    worker = await kit.worker()
    await kit.enqueue(id="job", payload=OLD)
    [job] = await worker.claim()
    await worker.finish(_retry(job.held, NEW))
    await worker.complete(*await worker.claim())
    if by_retention:
        clock.advance(120)
        assert (await kit.store.prune(keep)).jobs == 1
    else:
        assert await kit.store.forget(["job"], keep) == [True]

    [answer] = await kit.store.enqueue([kit.new(id="job", payload=OLD)])

    assert (answer.created, answer.state) == (False, JobState.COMPLETED)
    with pytest.raises(Conflict):
        await kit.enqueue(id="job", payload=NEW)


async def test_an_id_that_is_used_anew_stands_for_its_new_job(kit: Kit, clock: ManualClock) -> None:
    keep = Retention(completed_seconds=0.0, id_seconds=0.0)
    worker = await kit.worker(lease=1_000.0)
    await kit.enqueue(id="job", payload=OLD)
    [job] = await worker.claim()
    await worker.finish(_retry(job.held, NEW))
    await worker.complete(*await worker.claim())
    clock.advance(1)
    await kit.store.prune(keep)

    [first] = await kit.store.enqueue([kit.new(id="job", payload=NEWER)])
    [second] = await kit.store.enqueue([kit.new(id="job", payload=NEWER)])

    assert (first.created, second.created) == (True, False)
    assert (await kit.job("job")).payload == NEWER


async def test_a_retry_without_a_payload_leaves_it(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", payload=OLD)
    [job] = await worker.claim()

    await worker.retry(job)

    assert (await kit.job("job")).payload == OLD


@CHANGES
async def test_a_repeated_write_changes_nothing(kit: Kit, change: Change) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", payload=OLD)
    [job] = await worker.claim()
    await worker.finish(change(job.held, NEW))

    finished = await worker.finish(change(job.held, NEWER))

    assert finished.verdicts[0].acceptance is Acceptance.REPEATED
    assert (await kit.job("job")).payload == NEW


@CHANGES
async def test_a_stale_write_changes_nothing(kit: Kit, change: Change) -> None:
    worker, other = await kit.worker(), await kit.worker()
    await kit.enqueue(id="job", payload=OLD)
    [job] = await worker.claim()

    for writer, held in ((other, job.held), (worker, Held("job", job.fence + 1)), (worker, Held("none", 1))):
        finished = await writer.finish(change(held, NEW))
        assert finished.verdicts[0].acceptance is Acceptance.STALE

    seen = await kit.job("job")
    assert (seen.payload, seen.state) == (OLD, JobState.RUNNING)


@CHANGES
async def test_a_requested_cancel_keeps_the_payload(kit: Kit, change: Change) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="job", payload=OLD)
    [job] = await worker.claim()
    await kit.store.cancel(["job"])

    finished = await worker.finish(change(job.held, NEW))

    assert finished.verdicts[0].state is JobState.CANCELLED
    assert (await kit.job("job")).payload == OLD


@CHANGES
async def test_a_turn_keeps_its_payload(kit: Kit, change: Change) -> None:
    await kit.settings("default", LaneRule(pattern="door", limit=1))
    waiter = await kit.waiter()
    await kit.enqueue(id="turn", lane="door", kind=JobKind.TURN, waiter=waiter.id, payload=OLD)

    await waiter.finish(change(Held("turn", (await kit.job("turn")).fence), NEW))

    seen = await kit.job("turn")
    assert seen.state.final
    assert seen.payload == OLD


async def test_a_call_may_carry_everything_at_once(kit: Kit) -> None:
    """Completions, retries with and without a payload, a stale one, and the claim that gets them back."""
    worker = await kit.worker(slots=20)
    for number in range(6):
        await kit.enqueue(id=f"job-{number}", payload=OLD)
    jobs = await worker.claim(6)
    transitions = [
        complete(jobs[0].held, b"1"),
        _retry(jobs[1].held, NEW),
        retry(jobs[2].held, 0.0, Reason.ERROR, "boom"),
        _snooze(jobs[3].held, NEWER),
        _retry(Held(jobs[4].id, 9), NEW),
        complete(jobs[5].held, b"2"),
    ]

    finished = await kit.store.finish(worker.id, transitions, claim=worker.everything(10))

    assert {job.id: job.payload for job in finished.claimed} == {"job-1": NEW, "job-2": OLD, "job-3": NEWER}
    seen = [(await kit.job(f"job-{number}")) for number in (0, 4, 5)]
    assert [(job.payload, job.result) for job in seen] == [(OLD, b"1"), (OLD, None), (OLD, b"2")]


async def test_the_largest_payload_counts_in_the_next_claim(kit: Kit) -> None:
    worker = await kit.worker()
    for number in range(6):
        await kit.enqueue(id=f"job-{number}")
    jobs = await worker.claim(6)
    for job in jobs:
        await worker.finish(_retry(job.held, LARGEST))

    first = await worker.claim(6)

    assert 1 <= len(first) < 6, "a claim contains at most 1 MiB"
    assert all(job.payload == LARGEST for job in first)


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b'"' + b"x" * PAYLOAD_BYTES + b'"', "text"])
def test_what_is_no_payload_is_refused(payload: Any) -> None:
    for refused in (_retry, _snooze):
        with pytest.raises(InvalidInput, match="payload"):
            refused(Held("job", 1), payload)
