"""One pass of the promoter, the admitter and the pruner, and what all passes leave alone."""

from __future__ import annotations

import asyncio

import pytest

from fairlane import Fairlane
from fairlane.errors import StoreUnavailable, TermLost
from fairlane.manager.admitter import Admitter
from fairlane.manager.leader_context import LeaderContext, log
from fairlane.manager.promoter import Promoter
from fairlane.manager.pruner import Pruner
from fairlane.manager.rescuer import Rescuer
from fairlane.manager.scheduler import Scheduler
from fairlane.manager.service import Loop, Service
from fairlane.model.job import JobState, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.schedule import Schedule, Timetable, template_of
from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.client.ledger import ledger_in, task_of
from tests.conformance.kit import Kit
from tests.servers.stores import TRANSACTIONAL

from .conftest import MakeContext
from .faults import faulty
from .waiting import running, until
from .witness import content


def every_service(context: LeaderContext) -> list[Service]:
    """All that a leader runs."""
    return [Promoter(context), Admitter(context), Rescuer(context), Scheduler(context), Pruner(context, Retention())]


# -- the promoter ----------------------------------------------------------------------------------------------------


async def test_the_promoter_lets_due_jobs_arrive_and_counts_them(
    kit: Kit, context: LeaderContext, clock: ManualClock
) -> None:
    id = await kit.enqueue(delay=5.0)
    await kit.enqueue(id="too-late", delay=60.0, expires=4.0)
    clock.advance(5.0)

    await Promoter(context).run_once()

    assert await kit.state(id) is JobState.PENDING
    assert await kit.state("too-late") is JobState.CANCELLED
    assert (context.counts["promoted"], context.counts["expired"]) == (1, 1)


async def test_the_promoter_comes_back_when_the_next_job_is_due_and_at_least_every_second(
    kit: Kit, context: LeaderContext, clock: ManualClock
) -> None:
    promoter = Promoter(context)
    assert await promoter.run_once() == 1.0
    await kit.enqueue(delay=100.0)
    assert await promoter.run_once() == 1.0
    clock.advance(99.75)
    assert await promoter.run_once() == pytest.approx(0.25, abs=0.001)


async def test_the_promoter_never_asks_for_a_pass_at_once_unless_the_last_was_full(
    kit: Kit, context: LeaderContext, clock: ManualClock
) -> None:
    await kit.enqueue(delay=1.0)
    clock.advance(0.999_999)

    assert await Promoter(context).run_once() >= 0.001


async def test_ten_thousand_due_jobs_arrive_without_a_rest_and_high_ones_first(
    kit: Kit, store: Store, make_context: MakeContext, clock: ManualClock
) -> None:
    through, faults = faulty(store)
    context = await make_context(through=through)
    await kit.enqueue_all([kit.new(delay=1.0, priority=Priority.LOW) for _ in range(9_500)])
    high = [job.id for job in await kit.enqueue_all([kit.new(delay=2.0, priority=Priority.HIGH) for _ in range(500)])]
    clock.advance(3.0)
    promoter = Promoter(context)

    delay = await promoter.run_once()

    assert delay == 0.0
    assert {await kit.state(id) for id in high} == {JobState.PENDING}
    while delay == 0.0:
        delay = await promoter.run_once()
    assert context.counts["promoted"] == 10_000
    assert faults.calls["promote"] == 11, "ten full passes, and one that finds nothing"


# -- the admitter and the pruner --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store_kind", TRANSACTIONAL, indirect=True)
async def test_the_granter_admits_what_was_committed_elsewhere(
    kit: Kit, context: LeaderContext, clock: ManualClock, store_url: str
) -> None:
    ledger = await ledger_in(store_url)
    async with Fairlane(store_url, clock=clock) as app:
        own = await ledger.begin()
        await app.enqueue_on(own, task_of(app, ledger).options(id="mine").call(1))
        await ledger.end(own, commit=True)
    await ledger.close()
    admitter = Admitter(context)

    assert await admitter.run_once() == context.intervals.admit

    assert context.counts["admitted"] == 1
    assert await (await kit.worker()).claim_ids() == ["mine"]
    assert await admitter.run_once() == context.intervals.admit
    assert (context.counts["admitted"], context.counts["repaired"]) == (1, 0)


async def test_the_pruner_forgets_in_full_passes_until_nothing_is_left(
    kit: Kit, context: LeaderContext, clock: ManualClock
) -> None:
    worker = await kit.worker(slots=2_500)
    await kit.enqueue_all([kit.new() for _ in range(2_500)])
    await worker.complete(*await worker.claim(2_500))
    clock.advance(Retention().completed_seconds + 1)
    pruner = Pruner(context, Retention())

    delays = [await pruner.run_once()]
    while delays[-1] == 0.0:
        delays.append(await pruner.run_once())

    assert context.counts["pruned"] == 2_500
    assert len(delays) >= 3
    assert delays[-1] == context.intervals.prune
    [queue] = await context.store.queues()
    assert queue.counts.completed == 2_500, "the sum outlives the jobs"


# -- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(5))
async def test_every_pass_names_the_term_and_a_lost_one_is_refused(
    kit: Kit, context: LeaderContext, position: int
) -> None:
    service = every_service(context)[position]
    await kit.store.resign(context.term)
    newer = await kit.store.lead("another", lease=10.0)
    assert newer is not None
    assert newer.number > context.term

    if isinstance(service, Scheduler):
        # It only reads, and enqueues by ids that name the slot: the id makes a repetition harmless.
        await service.run_once()
        return
    with pytest.raises(TermLost):
        await service.run_once()


async def test_a_stale_leader_changes_nothing(kit: Kit, context: LeaderContext, clock: ManualClock) -> None:
    worker = await kit.worker()
    running_job = await kit.enqueue()
    await worker.claim()
    due = await kit.enqueue(delay=5.0)
    clock.advance(20.0)
    await kit.store.resign(context.term)
    assert await kit.store.lead("another", lease=10.0) is not None

    for verb in (
        kit.store.promote(term=context.term),
        kit.store.admit(term=context.term),
        kit.store.rescue(term=context.term),
        kit.store.prune(Retention(), term=context.term),
    ):
        with pytest.raises(TermLost):
            await verb

    assert await kit.state(running_job) is JobState.RUNNING
    assert await kit.state(due) is JobState.SCHEDULED


async def test_passes_over_an_idle_store_write_nothing(
    kit: Kit, store: Store, context: LeaderContext, clock: ManualClock, store_url: str
) -> None:
    await kit.settings("default", LaneRule(pattern="one:*", limit=1))
    worker = await kit.worker()
    await kit.enqueue(lane="one:a")
    await kit.enqueue(lane="one:a", delay=3_600.0)
    await kit.enqueue(sticky="plan")
    await worker.complete(*await worker.claim(2))
    template = template_of(kit.new())
    await store.declare([Schedule(name="hourly", timetable=Timetable(cron="0 * * * *"), job=template)])
    services = every_service(context)
    for service in services:
        await service.run_once()

    before = content(store_url)
    for _ in range(5):
        clock.advance(1.0)
        for service in services:
            await service.run_once()
        assert await store.lead("standby", lease=10.0) == await store.leader()
    assert content(store_url) == before

    await kit.enqueue()
    assert content(store_url) != before, "a write would have been seen"


async def test_two_leaders_at_once_are_harmless(
    kit: Kit, store: Store, context: LeaderContext, clock: ManualClock
) -> None:
    """The store never grants one term to two leaders; the fences make even that harmless."""
    worker = await kit.worker()
    await kit.enqueue_all([kit.new(delay=1.0) for _ in range(300)])
    await kit.enqueue_all([kit.new() for _ in range(5)])
    await worker.claim(5)
    template = template_of(kit.new())
    await store.declare([Schedule(name="each", timetable=Timetable(every=1.0), job=template)])
    for _ in range(8):
        clock.advance(1.0)
        both = [*every_service(context), *every_service(context)]
        await asyncio.gather(*(service.run_once() for service in both))

    assert context.counts["promoted"] == 300
    assert context.counts["fired"] == 8
    [queue] = await store.queues()
    assert (queue.counts.pending, queue.counts.running) == (308, 5)
    assert (await store.recount()).differences == ()


async def test_services_survive_an_outage_with_few_words(
    kit: Kit, store: Store, make_context: MakeContext, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    through, faults = faulty(store)
    context = await make_context(through=through)
    faults.down()
    due = await kit.enqueue(delay=1.0)
    clock.advance(1.0)
    with caplog.at_level("INFO"):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(Loop(service, log).run()) for service in every_service(context)]
            await until(lambda: faults.calls.total() >= 30)
            assert len(caplog.messages) == len(tasks), "each logs once, however often it tries"
            faults.up()
            await until(lambda: sum("works again" in message for message in caplog.messages) == len(tasks))
            for task in tasks:
                task.cancel()

    assert len(caplog.messages) == 2 * len(tasks)
    assert await kit.state(due) is JobState.PENDING


async def test_a_pass_that_fails_spoils_the_contact(
    store: Store, make_context: MakeContext, clock: ManualClock
) -> None:
    through, faults = faulty(store)
    context = await make_context(through=through)
    for service in every_service(context):
        await service.run_once()
        clock.advance(1.0)
        assert context.contact.clean_seconds > 0
        faults.down()
        with pytest.raises(StoreUnavailable):
            await service.run_once()
        assert context.contact.clean_seconds == 0.0
        faults.up()
        await service.run_once()


async def test_the_loop_drains_a_backlog_of_due_jobs_at_once(
    kit: Kit, context: LeaderContext, clock: ManualClock
) -> None:
    await kit.enqueue_all([kit.new(delay=1.0) for _ in range(3_000)])
    clock.advance(1.0)
    async with running(Loop(Promoter(context), log).run()):
        await until(lambda: context.counts["promoted"] == 3_000)
