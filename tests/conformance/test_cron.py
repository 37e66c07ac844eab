"""Schedules as the store keeps them: which slot fired last, and since when a timetable counts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fairlane.errors import Conflict
from fairlane.model.job import CronSlot
from fairlane.model.schedule import FORGOTTEN_SECONDS, Schedule, StoredSchedule, Timetable
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .kit import Kit

EVERY_MINUTE = Timetable(every=60.0)


def schedule(name: str = "nightly", timetable: Timetable = EVERY_MINUTE, job: bytes = b"{}") -> Schedule:
    """A schedule that fires every minute by default."""
    return Schedule(name=name, timetable=timetable, job=job)


async def stored(store: Store, name: str = "nightly") -> StoredSchedule:
    """The schedule as the store knows it."""
    [found] = [each for each in await store.declare([]) if each.schedule.name == name]
    return found


async def fire(kit: Kit, name: str, slot: float) -> bool:
    """Enqueue the job of a slot as the scheduler does. Returns whether it was new."""
    new = kit.new(id=f"cron:{name}:{slot:.0f}", cron=CronSlot(name, slot))
    [answer] = await kit.store.enqueue([new])
    return answer.created


async def test_a_declared_schedule_is_stored_with_the_present_time(store: Store, clock: ManualClock) -> None:
    [answer] = await store.declare([schedule(job=b'{"task":"tidy"}')])

    assert answer == StoredSchedule(
        schedule=schedule(job=b'{"task":"tidy"}'),
        stored_at=clock.now(),
        declared_at=clock.now(),
        last_slot=None,
        now=clock.now(),
    )
    assert answer.due(clock.now()) == []


async def test_declaring_answers_with_all_there_are(store: Store) -> None:
    await store.declare([schedule("one"), schedule("two")])

    answers = await store.declare([schedule("three")])

    assert {each.schedule.name for each in answers} == {"one", "two", "three"}
    assert {each.schedule.name for each in await store.declare([])} == {"one", "two", "three"}


async def test_reading_the_schedules_answers_the_same_and_refreshes_none(store: Store, clock: ManualClock) -> None:
    assert await store.schedules() == []
    declared = await store.declare([schedule("two"), schedule("one")])
    clock.advance(100)

    read = await store.schedules()

    assert sorted(read, key=lambda each: each.schedule.name) == read
    earlier = [replace(each, now=clock.now() - 100) for each in read]
    assert earlier == sorted(declared, key=lambda each: each.schedule.name)
    assert {each.declared_at for each in read} == {clock.now() - 100}


async def test_schedules_are_read_with_the_stores_clock(store: Store, clock: ManualClock) -> None:
    await store.declare([schedule("one"), schedule("two")])
    clock.advance(100)

    assert {each.now for each in await store.declare([])} == {clock.now()}
    assert {each.now for each in await store.schedules()} == {clock.now()}


async def test_declaring_again_refreshes_and_keeps_its_beginning(store: Store, clock: ManualClock) -> None:
    await store.declare([schedule(job=b"1")])
    beginning = clock.now()
    clock.advance(100)

    [answer] = await store.declare([schedule(job=b"2")])

    assert (answer.stored_at, answer.declared_at) == (beginning, clock.now())
    assert answer.schedule.job == b"2"
    assert (await stored(store)).declared_at == clock.now()


async def test_reading_the_schedules_does_not_refresh_them(store: Store, clock: ManualClock) -> None:
    await store.declare([schedule("silent")])
    clock.advance(FORGOTTEN_SECONDS + 1)
    await store.declare([schedule("other")])

    silent = await stored(store, "silent")

    assert silent.declared_at == clock.now() - FORGOTTEN_SECONDS - 1
    assert silent.due(clock.now()) == []


async def test_a_changed_timetable_counts_as_newly_stored(store: Store, clock: ManualClock) -> None:
    await store.declare([schedule()])
    clock.advance(600)

    [answer] = await store.declare([schedule(timetable=Timetable(cron="*/5 * * * *"))])

    assert answer.stored_at == clock.now()
    assert answer.due(clock.now()) == []
    [later] = [each for each in await store.declare([]) if each.schedule.name == "nightly"]
    assert len(later.due(clock.now() + 300)) == 1


async def test_a_slot_that_fired_is_remembered_with_its_job(kit: Kit, store: Store, clock: ManualClock) -> None:
    await store.declare([schedule()])
    clock.advance(60)
    [slot] = (await stored(store)).due(clock.now())

    assert await fire(kit, "nightly", slot)

    after = await stored(store)
    assert after.last_slot == slot
    assert after.due(clock.now()) == []


async def test_slots_fire_once_each_in_a_row(kit: Kit, store: Store, clock: ManualClock) -> None:
    await store.declare([schedule()])
    fired: list[float] = []
    for _ in range(40):
        clock.advance(15)
        due = (await stored(store)).due(clock.now())
        for slot in due:
            assert await fire(kit, "nightly", slot)
        fired += due

    beginning = (await stored(store)).stored_at
    assert len(fired) == 10
    assert fired == [beginning // 60 * 60 + 60 * n for n in range(1, 11)]


async def test_a_slot_of_one_schedule_is_none_of_another(kit: Kit, store: Store, clock: ManualClock) -> None:
    await store.declare([schedule("one"), schedule("two")])
    clock.advance(60)
    [slot] = (await stored(store, "one")).due(clock.now())

    await fire(kit, "one", slot)

    assert (await stored(store, "two")).last_slot is None
    assert (await stored(store, "two")).due(clock.now()) == [slot]


async def test_an_older_slot_does_not_take_the_last_one_back(kit: Kit, store: Store, clock: ManualClock) -> None:
    await store.declare([schedule()])
    clock.advance(120)
    older, newer = (await stored(store)).due(clock.now())

    await fire(kit, "nightly", newer)
    await fire(kit, "nightly", older)

    assert (await stored(store)).last_slot == newer


async def test_two_managers_that_fire_the_same_slot_make_one_job(kit: Kit, store: Store, clock: ManualClock) -> None:
    await store.declare([schedule()])
    clock.advance(60)
    [slot] = (await stored(store)).due(clock.now())

    assert [await fire(kit, "nightly", slot) for _ in range(2)] == [True, False]

    assert len(await (await kit.worker()).claim(5)) == 1


async def test_a_refused_batch_leaves_the_last_slot_where_it_was(kit: Kit, store: Store, clock: ManualClock) -> None:
    await store.declare([schedule()])
    await kit.enqueue(id="taken")
    clock.advance(60)
    [slot] = (await stored(store)).due(clock.now())

    with pytest.raises(Conflict):
        await store.enqueue([kit.new(cron=CronSlot("nightly", slot)), kit.new("other", id="taken")])

    assert (await stored(store)).last_slot is None


async def test_declaring_again_keeps_the_last_slot(kit: Kit, store: Store, clock: ManualClock) -> None:
    await store.declare([schedule()])
    clock.advance(60)
    [slot] = (await stored(store)).due(clock.now())
    await fire(kit, "nightly", slot)

    [answer] = await store.declare([schedule()])

    assert answer.last_slot == slot
    assert answer.due(clock.now()) == []


async def test_a_slot_whose_job_is_a_duplicate_has_fired_all_the_same(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    await store.declare([schedule()])
    await kit.enqueue(unique="one at a time")
    clock.advance(60)
    [slot] = (await stored(store)).due(clock.now())

    [answer] = await store.enqueue([kit.new(id="late", unique="one at a time", cron=CronSlot("nightly", slot))])

    assert not answer.created
    assert (await stored(store)).due(clock.now()) == []
