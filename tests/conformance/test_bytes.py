"""A claim is limited by bytes as well as by number: an answer that arrives after its deadline is useless."""

from __future__ import annotations

import msgspec
import pytest

from fairlane.model.job import Priority
from fairlane.model.session import Claim
from fairlane.model.settings import LaneRule
from fairlane.model.states import complete

from .kit import Kit, Worker

pytestmark = pytest.mark.anyio
KILO = 1_000


def payload(size: int) -> bytes:
    """JSON of that many bytes."""
    return b'["' + b"x" * (size - 4) + b'"]'


def bounded(worker: Worker, total: int, most: int, *, notified: bool = False) -> Claim:
    call = worker.everything(total)
    return Claim(number=call.number, asks=call.asks, total=total, notified=notified, most_bytes=most)


async def ids_of(worker: Worker, total: int, most: int, *, notified: bool = False) -> list[str]:
    return [job.id for job in await worker.kit.store.claim(worker.id, bounded(worker, total, most, notified=notified))]


@pytest.mark.parametrize("lane", [None, "a"])
async def test_jobs_are_added_while_they_fit(kit: Kit, lane: str | None) -> None:
    worker = await kit.worker(slots=10)
    ids = [await kit.enqueue(payload=payload(100 * KILO), lane=lane) for _ in range(5)]
    assert await ids_of(worker, 10, 250 * KILO) == ids[:2]
    assert await ids_of(worker, 10, 201 * KILO) == ids[2:4]
    assert await ids_of(worker, 10, 250 * KILO) == ids[4:]
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("notified", [False, True])
async def test_one_job_is_always_answered(kit: Kit, notified: bool) -> None:
    worker = await kit.worker(slots=10)
    ids = [await kit.enqueue(payload=payload(100 * KILO)) for _ in range(2)]
    assert await ids_of(worker, 10, 1, notified=notified) == ids[:1]
    assert await ids_of(worker, 10, 1, notified=notified) == ids[1:]
    assert await ids_of(worker, 10, 1, notified=notified) == []


async def test_the_first_that_does_not_fit_ends_the_claim(kit: Kit) -> None:
    worker = await kit.worker(slots=10)
    sizes = [1, 200, 1, 1]
    ids = [await kit.enqueue(payload=payload(size * KILO)) for size in sizes]
    assert await ids_of(worker, 10, 100 * KILO) == ids[:1]
    assert await ids_of(worker, 10, 100 * KILO) == ids[1:2]
    assert await ids_of(worker, 10, 100 * KILO) == ids[2:]


async def test_headers_count(kit: Kit) -> None:
    worker = await kit.worker(slots=10)
    ids = [await kit.enqueue(headers=payload(10 * KILO)) for _ in range(3)]
    assert await ids_of(worker, 10, 25 * KILO) == ids[:2]


async def test_one_bound_holds_for_all_sources_and_classes(kit: Kit) -> None:
    worker = await kit.worker("one", "two", slots=10)
    high = await kit.enqueue(queue="two", priority=Priority.HIGH, payload=payload(100 * KILO))
    first = await kit.enqueue(queue="one", payload=payload(100 * KILO))
    second = await kit.enqueue(queue="two", payload=payload(100 * KILO))
    assert await ids_of(worker, 10, 250 * KILO) == [high, first]
    assert await ids_of(worker, 10, 250 * KILO) == [second]
    assert (await kit.store.recount()).differences == ()


@pytest.mark.parametrize("rule", [(), (LaneRule(pattern="*", limit=1),), (LaneRule(pattern="*", weight=2.0),)])
async def test_lanes_take_turns_within_the_bound(kit: Kit, rule: tuple[LaneRule, ...]) -> None:
    await kit.settings("default", *rule)
    worker = await kit.worker(slots=10)
    ids = [await kit.enqueue(lane=f"lane-{n}", payload=payload(100 * KILO)) for n in range(4)]
    assert await ids_of(worker, 4, 250 * KILO) == ids[:2]
    assert await ids_of(worker, 4, 250 * KILO) == ids[2:]
    assert (await kit.store.recount()).differences == ()


async def test_a_repeated_claim_answers_the_same_jobs(kit: Kit) -> None:
    worker = await kit.worker(slots=10)
    ids = [await kit.enqueue(payload=payload(100 * KILO)) for _ in range(5)]
    call = bounded(worker, 10, 250 * KILO)
    first = await kit.store.claim(worker.id, call)
    assert await kit.store.claim(worker.id, call) == first
    assert [job.id for job in first] == ids[:2]
    following = bounded(worker, 10, 250 * KILO)
    finished = await kit.store.finish(worker.id, [complete(job.held, b"1") for job in first], claim=following)
    assert [job.id for job in finished.claimed] == ids[2:4]
    repeated = await kit.store.finish(worker.id, [complete(job.held, b"1") for job in first], claim=following)
    assert repeated.claimed == finished.claimed


@pytest.mark.parametrize("lanes", [0, 1, 40])
@pytest.mark.parametrize("count", [1, 16, 17, 20, 64, 65, 100, 200])
async def test_each_job_of_an_answer_has_its_own_content(kit: Kit, count: int, lanes: int) -> None:
    worker = await kit.worker(slots=count)
    new = [
        kit.new(payload=f"[{number}]".encode(), headers=f'"{number}"'.encode() if number % 3 == 0 else None)
        for number in range(count)
    ]
    for number, job in enumerate(new):
        if lanes:
            new[number] = msgspec.structs.replace(job, lane=f"lane:{number % lanes}")
    sent = {job.id: (job.payload, job.headers) for job in new}
    await kit.enqueue_all(new)
    call = worker.everything(count)
    claimed = await kit.store.claim(worker.id, call)
    assert {job.id: (job.payload, job.headers) for job in claimed} == sent
    # The answer to a repeated call is made in another way.
    again = await kit.store.claim(worker.id, call)
    assert {job.id: (job.payload, job.headers) for job in again} == sent
