"""Names that are taken: a unique value admits one unfinished job; an id stays taken after its job was deleted."""

from __future__ import annotations

import pytest

from fairlane.errors import Conflict
from fairlane.model.job import Acceptance, Enqueued, JobState, Verdict
from fairlane.model.maintenance import DAY, Retention
from fairlane.store.clock import ManualClock

from .death import survivor
from .kit import Kit
from .reopening import open_again

PENDING = JobState.PENDING


async def prune(kit: Kit, retention: Retention) -> int:
    """Prune until a pass was not limited. Returns how many jobs were deleted."""
    gone = 0
    for _ in range(100):
        pruned = await kit.store.prune(retention)
        gone += pruned.jobs
        if not pruned.more:
            return gone
    raise AssertionError("pruning does not come to an end")


async def test_a_unique_value_answers_with_the_job_that_has_it(kit: Kit) -> None:
    await kit.enqueue(id="first", unique="value", payload=b"[[1],{}]")

    answers = await kit.store.enqueue([kit.new(id="second", unique="value", payload=b"[[2],{}]")])

    assert answers == [Enqueued("first", False, PENDING)]
    assert await kit.store.get(["second"]) == [None]
    assert (await kit.job("first")).payload == b"[[1],{}]"


async def test_a_unique_value_belongs_to_its_task(kit: Kit) -> None:
    await kit.enqueue("mail", id="first", unique="value")

    answers = await kit.store.enqueue([kit.new("render", id="second", unique="value")])

    assert answers == [Enqueued("second", True, PENDING)]


async def test_a_unique_value_holds_across_queues_and_lanes(kit: Kit) -> None:
    await kit.enqueue(id="first", unique="value", queue="one", lane="a")

    answers = await kit.store.enqueue([kit.new(unique="value", queue="two", lane="b")])

    assert answers == [Enqueued("first", False, PENDING)]


async def test_an_id_twice_in_one_batch_whose_value_is_taken_is_answered_twice_with_its_holder(kit: Kit) -> None:
    await kit.enqueue(id="holder", unique="once")

    answers = await kit.store.enqueue([kit.new(id="twice", unique="once"), kit.new(id="twice", unique="once")])

    assert [(answer.id, answer.created) for answer in answers] == [("holder", False), ("holder", False)]


async def test_a_unique_value_twice_in_one_batch_is_one_job(kit: Kit) -> None:
    answers = await kit.store.enqueue([kit.new(id="first", unique="v"), kit.new(id="second", unique="v")])

    assert answers == [Enqueued("first", True, PENDING), Enqueued("first", False, PENDING)]
    assert await kit.store.get(["second"]) == [None]


async def test_a_scheduled_a_running_and_a_retried_job_hold_their_unique_value(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first", unique="value", delay=10)
    duplicate = [kit.new(unique="value")]
    assert await kit.store.enqueue(duplicate) == [Enqueued("first", False, JobState.SCHEDULED)]

    clock.advance(10)
    await kit.store.promote()
    [job] = await worker.claim()
    assert await kit.store.enqueue(duplicate) == [Enqueued("first", False, JobState.RUNNING)]

    await worker.retry(job, delay=60)
    assert await kit.store.enqueue(duplicate) == [Enqueued("first", False, JobState.SCHEDULED)]


@pytest.mark.parametrize("end", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
async def test_a_job_that_ends_frees_its_unique_value(kit: Kit, end: JobState) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first", unique="value")
    if end is JobState.CANCELLED:
        await kit.store.cancel(["first"])
    else:
        [job] = await worker.claim()
        await (worker.complete(job) if end is JobState.COMPLETED else worker.fail(job))
    assert await kit.state("first") is end

    answers = await kit.store.enqueue([kit.new(id="second", unique="value")])

    assert answers == [Enqueued("second", True, PENDING)]


async def test_an_expired_job_frees_its_unique_value(kit: Kit, clock: ManualClock) -> None:
    await kit.enqueue(id="first", unique="value", expires=5)
    clock.advance(6)
    await kit.store.promote()

    answers = await kit.store.enqueue([kit.new(id="second", unique="value")])

    assert answers == [Enqueued("second", True, PENDING)]


async def test_unique_for_keeps_the_value_after_the_end(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first", unique="value", unique_for=60)
    await worker.complete(*await worker.claim())
    clock.advance(59)

    early = await kit.store.enqueue([kit.new(id="second", unique="value")])
    clock.advance(2)
    late = await kit.store.enqueue([kit.new(id="third", unique="value")])

    assert early == [Enqueued("first", False, JobState.COMPLETED)]
    assert late == [Enqueued("third", True, PENDING)]


async def test_unique_for_never_frees_the_value_of_an_unfinished_job(kit: Kit, clock: ManualClock) -> None:
    await kit.enqueue(id="first", unique="value", unique_for=60)
    clock.advance(1_000)

    answers = await kit.store.enqueue([kit.new(unique="value")])

    assert answers == [Enqueued("first", False, PENDING)]


async def test_the_value_passes_to_the_next_job_that_takes_it(kit: Kit) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first", unique="value")
    await worker.complete(*await worker.claim())
    await kit.enqueue(id="second", unique="value")

    answers = await kit.store.enqueue([kit.new(id="third", unique="value")])

    assert answers == [Enqueued("second", False, PENDING)]


async def test_a_known_id_counts_before_its_unique_value(kit: Kit) -> None:
    worker = await kit.worker()
    first = kit.new(id="first", unique="value")
    await kit.store.enqueue([first])
    await worker.complete(*await worker.claim())
    await kit.enqueue(id="second", unique="value")

    # A client whose reply was lost must get its own job, not the job of the value's new owner.
    assert await kit.store.enqueue([first]) == [Enqueued("first", False, JobState.COMPLETED)]


# -- ids outlive their jobs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "retention",
    [Retention(completed_count=0), Retention(completed_seconds=1.0)],
    ids=["by number", "by age"],
)
async def test_an_id_stays_taken_for_a_day_after_its_job_was_forgotten(
    kit: Kit, clock: ManualClock, retention: Retention
) -> None:
    worker = await kit.worker()
    new = kit.new(id="forgotten")
    await kit.store.enqueue([new])
    await worker.complete(*await worker.claim())
    clock.advance(2)
    assert await prune(kit, retention) == 1
    assert await kit.store.get(["forgotten"]) == [None]

    [again] = await kit.store.enqueue([new])

    assert (again.id, again.created) == ("forgotten", False)
    with pytest.raises(Conflict):
        await kit.enqueue("other", id="forgotten")
    await worker.renew()
    assert await worker.claim() == []


async def test_an_id_is_free_again_once_it_is_not_remembered_any_more(kit: Kit, clock: ManualClock) -> None:
    worker = await kit.worker()
    new = kit.new(id="forgotten")
    await kit.store.enqueue([new])
    await worker.complete(*await worker.claim())
    await prune(kit, Retention(completed_count=0))
    clock.advance(DAY + 1)
    await prune(kit, Retention(completed_count=0))

    assert await kit.store.enqueue([new]) == [Enqueued("forgotten", True, PENDING)]


async def test_an_id_that_is_used_again_is_a_new_job_to_every_process(
    kit: Kit, store_url: str, clock: ManualClock
) -> None:
    worker = await survivor(kit)
    new = kit.new(id="again")
    await kit.store.enqueue([new])
    [first] = await worker.claim()
    await kit.store.cancel(["again"])
    await worker.fail(first)
    clock.advance(DAY + 1)
    await prune(kit, Retention(failed_count=0))
    await prune(kit, Retention(failed_count=0))
    assert (await kit.store.enqueue([new]))[0].created

    # It was claimed through one store object and finished through another, which still remembers the old job.
    other = await open_again(store_url, clock)
    try:
        [second] = await other.claim(worker.id, worker.everything(1))
    finally:
        await other.close()

    assert (await worker.complete(second)).verdicts == (Verdict("again", Acceptance.APPLIED, JobState.COMPLETED),)
