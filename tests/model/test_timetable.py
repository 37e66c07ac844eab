"""When the slots of a timetable are: cron through both changes of the clocks, intervals, and what is refused."""

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.schedule import Schedule, Timetable
from tests.model import bad_values as bad
from tests.model.bad_values import refused_field, short

BERLIN = ZoneInfo("Europe/Berlin")
# In 2024 the clocks in Berlin went from 2 to 3 o'clock on 31 March, and from 3 back to 2 on 27 October.
INSTANTS = st.floats(1_600_000_000, 1_900_000_000)
CRONS = st.sampled_from(
    [
        "* * * * *",
        "*/15 * * * *",
        "30 2 * * *",
        "0 0,12 * * *",
        "15 9-17 * * MON-FRI",
        "0 3 1 * *",
        "*/20 0 4 * * *",
        "0 0 29 2 *",
    ]
)
ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"])
TIMETABLES = st.builds(lambda cron, zone: Timetable(cron=cron, timezone=zone), CRONS, ZONES) | st.builds(
    lambda every: Timetable(every=every), st.floats(1, 100_000) | st.integers(1, 100_000)
)


def berlin(text: str) -> float:
    """The moment of a local time in Berlin; a trailing ' 2nd' means the second of two equal ones."""
    return (
        datetime.fromisoformat(text.removesuffix(" 2nd")).replace(tzinfo=BERLIN, fold=text.endswith(" 2nd")).timestamp()
    )


def slots(cron: str, after: str, count: int) -> list[str]:
    """The next slots in Berlin as local times with their offset."""
    table = Timetable(cron=cron, timezone="Europe/Berlin")
    return [f"{datetime.fromtimestamp(slot, BERLIN):%d. %H:%M%z}" for slot in islice(table.after(berlin(after)), count)]


def test_cron_speaks_local_time() -> None:
    assert slots("30 9 * * MON", "2024-06-01 00:00", 2) == ["03. 09:30+0200", "10. 09:30+0200"]
    assert slots("30 9 * * MON", "2024-12-01 00:00", 2) == ["02. 09:30+0100", "09. 09:30+0100"]


def test_a_daily_slot_in_the_hour_that_spring_skips_fires_once_when_the_hour_is_over() -> None:
    assert slots("30 2 * * *", "2024-03-29 12:00", 4) == [
        "30. 02:30+0100",
        "31. 03:00+0200",
        "01. 02:30+0200",
        "02. 02:30+0200",
    ]


def test_a_daily_slot_in_the_hour_that_autumn_repeats_fires_once_the_first_time() -> None:
    expected = ["26. 02:30+0200", "27. 02:30+0200", "28. 02:30+0100"]
    assert slots("30 2 * * *", "2024-10-25 12:00", 3) == expected
    # Also for a manager that first looks in the middle of the two hours.
    assert slots("30 2 * * *", "2024-10-27 02:29", 2) == expected[1:]
    assert slots("30 2 * * *", "2024-10-27 02:31", 1) == expected[2:]
    assert slots("30 2 * * *", "2024-10-27 02:10 2nd", 1) == expected[2:]


def test_an_hourly_slot_skips_the_hour_that_is_not_there_and_fires_in_both_that_are_twice() -> None:
    assert slots("0 * * * *", "2024-03-31 00:30", 3) == ["31. 01:00+0100", "31. 03:00+0200", "31. 04:00+0200"]
    assert slots("0 * * * *", "2024-10-27 01:30", 3) == ["27. 02:00+0200", "27. 02:00+0100", "27. 03:00+0100"]


def test_a_slot_every_few_minutes_is_not_disturbed_by_the_change_of_the_clocks() -> None:
    for change in ("2024-03-31 00:00", "2024-10-27 00:00"):
        table = Timetable(cron="*/15 * * * *", timezone="Europe/Berlin")
        passed = list(islice(table.after(berlin(change)), 20))
        assert {later - earlier for earlier, later in pairwise(passed)} == {900.0}


@pytest.mark.parametrize("change", ["2024-03-31 00:00", "2024-10-27 00:00"])
@pytest.mark.parametrize("cron", ["30 2 * * *", "0 1-4 * * *", "*/20 2 * * *", "10 2,3 * * *", "0 0 * * SUN"])
def test_slots_around_a_clock_change_do_not_depend_on_when_they_are_computed(cron: str, change: str) -> None:
    table = Timetable(cron=cron, timezone="Europe/Berlin")
    start = berlin(change) - 3_600
    end = start + 12 * 3_600
    known = [slot for slot in islice(table.after(start), 60) if slot <= end]
    for minute in range(0, 12 * 60, 7):
        moment = start + minute * 60 + 0.5
        expected = next((slot for slot in known if slot > moment), None)
        if expected is not None:
            assert table.next_after(moment) == expected


@given(TIMETABLES, INSTANTS)
def test_slots_come_in_order_and_all_of_them_later(table: Timetable, instant: float) -> None:
    found = [instant, *islice(table.after(instant), 5)]
    assert all(earlier < later for earlier, later in pairwise(found))


@given(TIMETABLES, INSTANTS, st.floats(0, 1))
def test_a_slot_does_not_depend_on_when_one_looks(table: Timetable, instant: float, part: float) -> None:
    first, second = islice(table.after(instant), 2)
    between = first + (second - first) * part
    assert table.next_after(first) == second
    if between < second:
        assert table.next_after(between) == second
    before = instant + (first - instant) * part
    if before < first:
        assert table.next_after(before) == first


@given(CRONS, ZONES, INSTANTS)
def test_a_moment_just_before_a_slot_does_not_miss_it(cron: str, zone: str, instant: float) -> None:
    table = Timetable(cron=cron, timezone=zone)
    slot = table.next_after(instant)
    assert slot is not None
    for fraction in (1e-3, 1e-6, 2.4e-7):
        assert table.next_after(slot - fraction) == slot


@given(st.floats(1, 1e6), st.integers(1, 10**9))
def test_an_interval_counts_from_1970_so_that_all_processes_have_the_same_slots(every: float, number: int) -> None:
    table = Timetable(every=every)
    assert table.next_after(number * every) == (number + 1) * every


def test_the_slots_of_an_interval_do_not_drift() -> None:
    table = Timetable(every=0.1 * 11)
    whole = list(islice(table.after(1_700_000_000.0), 1_000))
    stepwise = [1_700_000_000.0]
    while len(stepwise) <= 1_000:
        following = table.next_after(stepwise[-1])
        assert following is not None
        stepwise.append(following)
    assert stepwise[1:] == whole


def test_a_slot_that_is_years_away_is_found() -> None:
    leap = Timetable(cron="0 0 29 2 *")
    found = [datetime.fromtimestamp(slot, UTC) for slot in islice(leap.after(1_700_000_000.0), 3)]
    assert [moment.year for moment in found] == [2024, 2028, 2032]
    assert found[1] - found[0] == timedelta(days=1461)


@pytest.mark.parametrize(
    "cron",
    [
        *("", "*", "* * * *", "* * * * * * *", "@daily", "\0 * * * *", "\ud800 * * * *", "9" * 5_000 + " * * * *"),
        *("60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "*/0 * * * *", "5-1 * * * *"),
        *("0 0 30 2 *", 5, b"* * * * *", ["*"] * 5),
    ],
    ids=short,
)
def test_what_is_no_cron_expression_is_refused(cron: Any) -> None:
    assert refused_field(Timetable, cron=cron) == "cron"


@pytest.mark.parametrize("every", [*(x for x in bad.NOT_DURATIONS if x is not None), 0, 0.5], ids=short)
def test_an_interval_is_at_least_a_second(every: Any) -> None:
    assert refused_field(Timetable, every=every) == "every"


@pytest.mark.parametrize(
    "zone",
    [
        "",
        "Berlin",
        "Europe",
        "europe/berlin ",
        "../../etc/passwd",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "x" * 5_000,
        None,
        1,
    ],
    ids=short,
)
def test_an_unknown_time_zone_is_refused(zone: Any) -> None:
    assert refused_field(Timetable, cron="* * * * *", timezone=zone) == "timezone"
    assert refused_field(Timetable, every=5, timezone=zone) == "timezone"


def test_a_timetable_is_either_cron_or_an_interval() -> None:
    assert refused_field(Timetable) == "cron"
    assert refused_field(Timetable, cron="* * * * *", every=5) == "cron"


@pytest.mark.parametrize("name", bad.NOT_NAMES, ids=short)
def test_a_schedule_without_a_proper_name_is_refused(name: Any) -> None:
    assert refused_field(Schedule, name=name, timetable=Timetable(every=5), job=b"{}") == "schedule"
