"""Which missed slots still fire: all of the last minute, of older ones the latest, none from before the start."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.schedule import CATCH_UP_SECONDS, FORGOTTEN_SECONDS, Schedule, StoredSchedule, Timetable

NOW = 1_700_000_000.0
YEAR = 365 * 86_400.0
MINUTELY = Timetable(cron="* * * * *")
TIMETABLES = st.sampled_from(
    [
        Timetable(every=1.0),
        Timetable(every=7.3),
        Timetable(every=59.9),
        Timetable(every=3_600.0),
        Timetable(cron="*/20 * * * * *"),
        MINUTELY,
        Timetable(cron="*/7 3,4 * * *", timezone="Europe/Berlin"),
        Timetable(cron="30 2 * * *", timezone="Europe/Berlin"),
    ]
)


def stored(table: Timetable, at: float, *, declared: float | None = None, last: float | None = None) -> StoredSchedule:
    return StoredSchedule(
        schedule=Schedule(name="nightly", timetable=table, job=b"{}"),
        stored_at=at,
        declared_at=at if declared is None else declared,
        last_slot=last,
        now=at,
    )


def plainly_due(table: Timetable, since: float, now: float) -> list[float]:
    """The rule, spelled out: list every slot since then, and drop the older ones but the latest."""
    every = []
    for slot in table.after(since):
        if slot > now:
            break
        every.append(slot)
    older = [slot for slot in every if slot <= now - CATCH_UP_SECONDS]
    return older[-1:] + [slot for slot in every if slot > now - CATCH_UP_SECONDS]


@given(TIMETABLES, st.floats(NOW, NOW + 40 * 86_400), st.floats(0, 7_200))
def test_due_is_all_of_the_last_minute_and_the_latest_older_one(table: Timetable, since: float, silence: float) -> None:
    assert table.due(since, since + silence) == plainly_due(table, since, since + silence)


def test_a_slot_fires_at_its_moment_and_not_before() -> None:
    table = Timetable(every=100.0)
    assert table.due(NOW, NOW + 99.9) == []
    assert table.due(NOW, NOW + 100.0) == [NOW + 100.0]


def test_all_slots_of_the_last_minute_fire() -> None:
    table = Timetable(every=10.0)
    assert table.due(NOW, NOW + 55) == [NOW + 10, NOW + 20, NOW + 30, NOW + 40, NOW + 50]


def test_of_older_slots_only_the_latest_fires() -> None:
    assert Timetable(every=1.0).due(NOW, NOW + 1_000) == [NOW + second for second in range(940, 1_001)]
    table = Timetable(every=10.0)
    now = NOW + 1_005
    assert table.due(NOW, now) == [NOW + 940, *(NOW + 950 + 10 * n for n in range(6))]


def test_a_slot_that_has_fired_does_not_fire_again() -> None:
    table = Timetable(every=10.0)
    assert table.due(NOW + 30, NOW + 35) == []


def test_nothing_is_due_when_the_clock_was_set_back() -> None:
    assert MINUTELY.due(NOW, NOW - 3_600) == []


@given(TIMETABLES, st.floats(NOW, NOW + 40 * 86_400), st.lists(st.floats(0, 400), max_size=40))
def test_calling_again_with_the_last_slot_never_fires_a_slot_twice_or_out_of_order(
    table: Timetable, start: float, pauses: list[float]
) -> None:
    fired: list[float] = []
    now = start
    for pause in pauses:
        now += pause
        schedule = stored(table, start, declared=now, last=fired[-1] if fired else None)
        fired += schedule.due(now)
    assert fired == sorted(set(fired))
    assert all(start < slot <= now for slot in fired)


@given(TIMETABLES, st.floats(NOW, NOW + 40 * 86_400), st.lists(st.floats(0, 60), max_size=40))
def test_a_manager_that_looks_at_least_once_a_minute_misses_nothing(
    table: Timetable, start: float, pauses: list[float]
) -> None:
    fired: list[float] = []
    now = start
    for pause in pauses:
        now += pause
        fired += stored(table, start, declared=now, last=fired[-1] if fired else None).due(now)
    expected = []
    for slot in table.after(start):
        if slot > now:
            break
        expected.append(slot)
    assert fired == expected


@given(TIMETABLES, st.floats(0, 7_200), st.floats(-7_200, 0))
def test_no_slot_from_before_the_schedule_was_stored_fires(table: Timetable, silence: float, last: float) -> None:
    # A timetable that was changed counts as newly stored, while its last slot may be of the old one.
    schedule = stored(table, NOW, last=NOW + last)
    assert schedule.due(NOW + silence) == table.due(NOW, NOW + silence)


def test_a_schedule_stops_when_it_was_not_declared_for_a_day() -> None:
    schedule = stored(MINUTELY, NOW)
    assert schedule.due(NOW + FORGOTTEN_SECONDS)
    assert schedule.due(NOW + FORGOTTEN_SECONDS + 1) == []
    assert stored(MINUTELY, NOW, declared=NOW + 60).due(NOW + FORGOTTEN_SECONDS + 1)


class Counting(Timetable, frozen=True, kw_only=True):
    """A timetable that counts how many slots were looked at."""

    looked_at: list[float]

    def after(self, instant: float) -> Iterator[float]:
        for slot in super().after(instant):
            self.looked_at.append(slot)
            yield slot


@pytest.mark.parametrize(
    ("cron", "every"),
    [
        (None, 1.0),
        ("* * * * * *", None),
        ("* * * * *", None),
        ("0 3 * * *", None),
        ("0 0 1 1 *", None),
        # All of its slots on one day, as far away as can be.
        ("* * * 15 11 *", None),
        ("0 0 29 2 *", None),
    ],
)
def test_a_year_of_silence_is_looked_through_in_few_steps(cron: str | None, every: float | None) -> None:
    table = Counting(cron=cron, every=every, timezone="Europe/Berlin", looked_at=[])
    fired = table.due(NOW - YEAR, NOW)
    older = [slot for slot in fired if slot <= NOW - CATCH_UP_SECONDS]
    assert len(older) <= 1
    following = table.next_after(older[-1] if older else NOW - YEAR)
    assert following is not None
    assert following > NOW - CATCH_UP_SECONDS
    # Sixty slots of the last minute at most, and a search that halves a year down to a second.
    assert len(table.looked_at) < 62 + 2 * 26 + 2
