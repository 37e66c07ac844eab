"""The scheduler: templates, one job for each slot, catching up, and rejections that stop no other schedule."""

from __future__ import annotations

import asyncio

import pytest

from fairlane.errors import InvalidInput, QueueFull, StoreUnavailable
from fairlane.manager.leader_context import LeaderContext
from fairlane.manager.scheduler import Scheduler
from fairlane.model.job import JobKind, JobState, NewJob, Priority
from fairlane.model.reading import Filter
from fairlane.model.retry import Backoff
from fairlane.model.schedule import FORGOTTEN_SECONDS, Schedule, Timetable, job_from, template_of
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.conformance.kit import Kit

from .conftest import MakeContext
from .faults import faulty

TIDY = NewJob(id="any", task="tidy")
EACH_SECOND = Timetable(every=1.0)
EACH_MINUTE = Timetable(every=60.0)


def schedule(name: str, timetable: Timetable, job: NewJob = TIDY) -> Schedule:
    return Schedule(name=name, timetable=timetable, job=template_of(job))


class Scene:
    """A scheduler without a rescuer beside it."""

    def __init__(self, kit: Kit, context: LeaderContext) -> None:
        self.kit = kit
        self.clock = kit.clock
        self.context = context
        self.scheduler = Scheduler(context)

    async def one_pass(self) -> float:
        return await self.scheduler.run_once()

    async def jobs(self) -> list[str]:
        """The ids of all jobs there are, in order."""
        found: list[str] = []
        cursor = None
        while True:
            page = await self.kit.store.find(Filter(), limit=500, cursor=cursor)
            found += [job.id for job in page.jobs]
            cursor = page.cursor
            if cursor is None:
                return sorted(found)

    def slots(self, name: str, *ago: float) -> list[str]:
        """The ids of slots this many seconds ago."""
        return sorted(f"cron:{name}:{self.clock.now() - seconds:.0f}" for seconds in ago)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that starts at a full minute."""
    return ManualClock(1_700_000_040.0)


@pytest.fixture
def scene(kit: Kit, context: LeaderContext) -> Scene:
    return Scene(kit, context)


# -- templates -------------------------------------------------------------------------------------------------------


def test_a_template_keeps_every_field_of_the_job() -> None:
    job = NewJob(
        id="template",
        task="mail.send",
        queue="mail",
        payload='[["ann"],{"text":"grüße"}]'.encode(),
        lane="user:ann",
        priority=Priority.HIGH,
        cost=2.5,
        delay=3.0,
        expires=60.0,
        retries=7,
        backoff=Backoff(base=2.0, factor=3.0, most=50.0, jitter=False),
        timeout=9.0,
        unique="ann",
        unique_for=5.0,
        pool="mailers",
        sticky="ann",
        headers=b'{"traceparent":"00"}',
    )

    made = job_from(template_of(job), "nightly", 1_700_000_000.0)

    assert made.id == "cron:nightly:1700000000"
    assert made.cron is not None
    assert (made.cron.schedule, made.cron.slot) == ("nightly", 1_700_000_000.0)
    for field in set(NewJob.__struct_fields__) - {"id", "cron"}:
        assert getattr(made, field) == getattr(job, field), field


def test_a_slot_between_two_seconds_has_an_id_of_its_own() -> None:
    ids = {job_from(template_of(TIDY), "often", slot).id for slot in (1.0, 1.5, 2.0)}

    assert ids == {"cron:often:1", "cron:often:1.5", "cron:often:2"}


def test_a_broadcast_can_be_repeated_and_a_turn_cannot() -> None:
    made = job_from(template_of(NewJob(id="x", task="purge", kind=JobKind.BROADCAST)), "purge", 60.0)
    assert made.kind is JobKind.BROADCAST
    with pytest.raises(InvalidInput, match="turn"):
        template_of(NewJob(id="x", task="t", kind=JobKind.TURN, lane="a", waiter="me"))
    with pytest.raises(InvalidInput, match="run_at"):
        template_of(NewJob(id="x", task="t", run_at=1_700_000_000.0))


@pytest.mark.parametrize(
    "template",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"task":5}',
        b'{"task":"no spaces allowed"}',
        b'{"task":"t","payload":"?"}',
        b"\xff",
    ],
)
def test_what_is_no_template_is_refused(template: bytes) -> None:
    with pytest.raises(InvalidInput, match="template"):
        job_from(template, "nightly", 60.0)


# -- firing ----------------------------------------------------------------------------------------------------------


async def test_without_schedules_it_looks_rarely(scene: Scene) -> None:
    assert await scene.one_pass() == 5.0


async def test_a_slot_fires_when_it_is_due_and_only_then(scene: Scene, store: Store) -> None:
    await store.declare([schedule("each", EACH_MINUTE)])
    scene.clock.advance(59.75)
    assert await scene.one_pass() == pytest.approx(0.25, abs=0.001)
    assert await scene.jobs() == []

    scene.clock.advance(0.25)
    assert await scene.one_pass() == 1.0
    await scene.one_pass()

    assert await scene.jobs() == scene.slots("each", 0)
    assert scene.context.counts["fired"] == 1
    assert (await scene.kit.job(f"cron:each:{scene.clock.now():.0f}")).task == "tidy"


async def test_slots_are_due_by_the_store_clock_of_the_same_pass(scene: Scene, store: Store) -> None:
    await store.declare([schedule("each", EACH_MINUTE)])
    scene.context.clock.set(scene.clock.now() - 3_600.0)  # what the rescuer read does not matter
    scene.clock.step_wall(60.0)

    await scene.one_pass()

    assert await scene.jobs() == scene.slots("each", 0)


async def test_slots_missed_in_the_last_minute_all_fire_and_of_older_ones_the_latest(
    scene: Scene, store: Store
) -> None:
    await store.declare([schedule("each", Timetable(every=20.0))])
    scene.clock.advance(600.0)

    await scene.one_pass()

    assert await scene.jobs() == scene.slots("each", 0, 20, 40, 60)


async def test_a_schedule_fires_nothing_from_before_it_was_stored(scene: Scene, store: Store) -> None:
    scene.clock.advance(30.0)
    await store.declare([schedule("each", Timetable(every=20.0))])
    scene.clock.advance(15.0)

    await scene.one_pass()

    assert await scene.jobs() == scene.slots("each", 5)


async def test_a_schedule_that_is_not_declared_any_more_stops(scene: Scene, store: Store) -> None:
    await store.declare([schedule("each", EACH_MINUTE)])
    scene.clock.advance(FORGOTTEN_SECONDS + 60)

    assert await scene.one_pass() == 1.0
    assert await scene.jobs() == []


async def test_local_time_that_comes_twice_fires_by_the_clock_that_does_not(scene: Scene, store: Store) -> None:
    # 29 October 2023, Berlin: 02:30 came at 00:30 and at 01:30 UTC.
    clock = ManualClock(1_698_537_600.0)
    scene.clock.step_wall(clock.now() - scene.clock.now())
    await store.declare([schedule("half", Timetable(cron="30 * * * *", timezone="Europe/Berlin"))])
    for _ in range(16):
        scene.clock.advance(900.0)
        await scene.one_pass()

    assert len(await scene.jobs()) == 4


async def test_two_schedulers_at_once_fire_each_slot_once(
    scene: Scene, store: Store, store_url: str, clock: ManualClock
) -> None:
    await store.declare([schedule(f"s{n}", EACH_SECOND) for n in range(5)])
    other_store = await open_store(store_url, clock=clock)
    try:
        other = Scene(scene.kit, LeaderContext(**{**scene.context.__dict__, "store": other_store}))
        for _ in range(20):
            clock.advance(1.0)
            await asyncio.gather(scene.one_pass(), other.one_pass())
    finally:
        await other_store.close()

    assert len(await scene.jobs()) == 100
    assert scene.context.counts["fired"] == 100


async def test_three_hundred_slots_fire_once_each_over_many_leaders(
    kit: Kit, store: Store, make_context: MakeContext, clock: ManualClock
) -> None:
    await store.declare([schedule("each", EACH_SECOND)])
    beginning = clock.now()
    scene = Scene(kit, await make_context("leader-0"))
    fired = 0
    for second in range(1, 301):
        clock.advance(1.0)
        if second % 7 == 0:
            # The leader dies without resigning; for some slots there is no leader.
            await store.resign(scene.context.term)
            fired += scene.context.counts["fired"]
            scene = Scene(kit, await make_context(f"leader-{second}"))
        elif second % 7 > 2:
            await scene.one_pass()
    clock.advance(1.0)
    await scene.one_pass()
    fired += scene.context.counts["fired"]

    assert await scene.jobs() == sorted(f"cron:each:{beginning + n:.0f}" for n in range(1, 302))
    assert fired == 301


async def test_a_lost_reply_fires_nothing_twice(
    kit: Kit, store: Store, make_context: MakeContext, clock: ManualClock
) -> None:
    def lose() -> None:
        raise StoreUnavailable("the reply was lost")

    through, faults = faulty(store)
    scene = Scene(kit, await make_context(through=through))
    await store.declare([schedule("each", EACH_MINUTE)])
    clock.advance(60.0)
    faults.late["enqueue"] = lose
    with pytest.raises(StoreUnavailable):
        await scene.one_pass()
    faults.up()
    await scene.one_pass()

    assert await scene.jobs() == scene.slots("each", 0)


# -- refusals --------------------------------------------------------------------------------------------------------


async def test_a_template_that_cannot_be_read_stops_no_other_schedule_and_is_logged_once(
    scene: Scene, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Schedule(name="broken", timetable=EACH_SECOND, job=b'{"task":5}')
    await store.declare([broken, schedule("good", EACH_SECOND)])
    for _ in range(5):
        scene.clock.advance(1.0)
        await scene.one_pass()

    assert await scene.jobs() == scene.slots("good", 0, 1, 2, 3, 4)
    assert len(caplog.messages) == 1
    assert "broken" in caplog.messages[0]
    assert "template" in caplog.messages[0]


async def test_a_full_queue_delays_its_own_schedule_alone_and_no_slot_is_skipped(
    scene: Scene, store: Store, kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await kit.settings("narrow", max_pending=2)
    narrow = NewJob(id="any", task="tidy", queue="narrow")
    await store.declare([schedule("narrow", EACH_SECOND, narrow), schedule("good", EACH_SECOND)])
    for _ in range(5):
        scene.clock.advance(1.0)
        await scene.one_pass()

    assert await scene.jobs() == sorted(
        scene.slots("good", 0, 1, 2, 3, 4) + scene.slots("narrow", 3, 4),
    )
    assert len(caplog.messages) == 1

    worker = await kit.worker("narrow")
    await worker.complete(*await worker.claim(2))
    await scene.one_pass()
    assert scene.slots("narrow", 1, 2) == [id for id in await scene.jobs() if id in scene.slots("narrow", 0, 1, 2)]
    await worker.complete(*await worker.claim(2))
    await scene.one_pass()
    assert set(scene.slots("narrow", 0, 1, 2, 3, 4)) <= set(await scene.jobs())
    assert caplog.messages.count("schedule narrow: fires again") >= 1


async def test_after_a_refused_slot_the_later_ones_of_its_schedule_wait(
    kit: Kit, store: Store, make_context: MakeContext, clock: ManualClock
) -> None:
    through, faults = faulty(store)
    scene = Scene(kit, await make_context(through=through))
    await store.declare([schedule("each", EACH_SECOND)])
    clock.advance(3.0)
    # All at once, and then the first alone; there would be room for the second.
    faults.once["enqueue"] = [QueueFull("no room"), QueueFull("no room")]

    await scene.one_pass()
    assert await scene.jobs() == []
    await scene.one_pass()
    assert await scene.jobs() == scene.slots("each", 0, 1, 2)


async def test_a_slot_whose_unique_job_still_runs_is_not_tried_again(
    kit: Kit, store: Store, make_context: MakeContext, clock: ManualClock
) -> None:
    through, faults = faulty(store)
    scene = Scene(kit, await make_context(through=through))
    job = NewJob(id="any", task="tidy", unique="one")
    await store.declare([schedule("each", EACH_MINUTE, job)])
    for _ in range(2):
        clock.advance(60.0)
        await scene.one_pass()
    calls = faults.calls["enqueue"]
    worker = await kit.worker()
    [claimed] = await worker.claim(5)
    await worker.complete(claimed)

    clock.advance(10.0)
    await scene.one_pass()

    assert faults.calls["enqueue"] == calls
    assert await kit.state(claimed.id) is JobState.COMPLETED
    assert await scene.jobs() == [claimed.id], "what would have overlapped is left out, not fired late"


async def test_a_slot_that_another_manager_fired_with_an_older_template_counts_as_fired(
    scene: Scene, store: Store, kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    await store.declare([schedule("each", EACH_MINUTE), schedule("good", EACH_MINUTE)])
    scene.clock.advance(60.0)
    await kit.enqueue("older", id=f"cron:each:{scene.clock.now():.0f}")

    await scene.one_pass()
    await scene.one_pass()

    assert await scene.jobs() == sorted(scene.slots("each", 0) + scene.slots("good", 0))
    assert caplog.messages == []


async def test_a_thousand_and_more_slots_at_once_all_fire(scene: Scene, store: Store) -> None:
    await store.declare([schedule(f"s{n}", EACH_SECOND) for n in range(20)])
    scene.clock.advance(58.0)

    await scene.one_pass()

    assert scene.context.counts["fired"] == 20 * 58
