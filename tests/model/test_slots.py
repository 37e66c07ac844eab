"""Slots and reservations: nothing ever takes what is kept for others, and everything else is used."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.job import Priority
from fairlane.model.slots import MOST_SLOTS, Reserved, Slots, default_reserved
from tests.model import bad_values as bad
from tests.model.bad_values import refused_field, short

HIGH, NORMAL, LOW = Priority


@st.composite
def all_slots(draw: st.DrawFn) -> Slots:
    total = draw(st.integers(1, 12))
    high = draw(st.integers(0, total - 1))
    return Slots(total=total, reserved=Reserved(high=high, normal=draw(st.integers(0, total - 1 - high))))


def kept(slots: Slots, running: list[int]) -> bool:
    """The rule: reservations protect upwards."""
    high, normal, low = running
    return (
        high + normal + low <= slots.total
        and normal + low <= slots.total - slots.reserved.high
        and low <= slots.total - slots.reserved.high - slots.reserved.normal
    )


steps = st.lists(st.tuples(st.sampled_from(["start", "start", "finish"]), st.sampled_from(Priority)), max_size=60)


@given(all_slots(), steps)
def test_whatever_starts_and_ends_the_reservations_are_kept(slots: Slots, steps: list[tuple[str, Priority]]) -> None:
    running = [0, 0, 0]
    for step, priority in steps:
        if step == "start" and slots.room(running, priority) > 0:
            running[priority] += 1
        elif step == "finish" and running[priority]:
            running[priority] -= 1
        assert kept(slots, running)


@given(all_slots(), steps, st.sampled_from(Priority))
def test_room_is_exactly_how_many_more_may_start(
    slots: Slots, steps: list[tuple[str, Priority]], priority: Priority
) -> None:
    running = [0, 0, 0]
    for step, other in steps:
        if step == "start" and slots.room(running, other) > 0:
            running[other] += 1
    room = slots.room(running, priority)
    running[priority] += room
    assert kept(slots, running)
    running[priority] += 1
    assert not kept(slots, running), "one more would fit, so a slot idles"


@given(all_slots())
def test_each_class_can_reach_its_own_maximum(slots: Slots) -> None:
    assert slots.room([0, 0, 0], HIGH) == slots.total
    assert slots.room([0, 0, 0], NORMAL) == slots.total - slots.reserved.high
    assert slots.room([0, 0, 0], LOW) == slots.total - slots.reserved.high - slots.reserved.normal


@given(all_slots())
def test_low_and_normal_together_reach_their_maximum_and_high_fills_the_rest(slots: Slots) -> None:
    low = slots.room([0, 0, 0], LOW)
    normal = slots.room([0, 0, low], NORMAL)
    high = slots.room([0, normal, low], HIGH)
    assert low + normal == slots.total - slots.reserved.high
    assert high == slots.reserved.high
    assert slots.room([high, normal, low], HIGH) == 0


def test_more_running_than_the_limit_leaves_no_room_and_no_debt() -> None:
    # A queue's limit may be lowered below what runs.
    assert Slots(total=2).room([3, 2, 1], HIGH) == 0
    assert Slots(total=4, reserved=Reserved(high=1)).room([0, 5, 0], LOW) == 0


@pytest.mark.parametrize("total", [*bad.NOT_WHOLE, 0, -1, MOST_SLOTS + 1], ids=short)
def test_there_is_at_least_one_slot(total: Any) -> None:
    assert refused_field(Slots, total=total) == "slots"


@pytest.mark.parametrize("value", [*bad.NOT_WHOLE, -1], ids=short)
def test_a_reservation_is_a_number_of_slots(value: Any) -> None:
    assert refused_field(Slots, total=9, reserved=Reserved(high=value)) == "reserved.high"
    assert refused_field(Slots, total=9, reserved=Reserved(normal=value)) == "reserved.normal"


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_reservations_are_fewer_than_the_slots(total: int, high: int, normal: int) -> None:
    reserved = Reserved(high=high, normal=normal)
    if high + normal < total:
        assert Slots(total=total, reserved=reserved).reserved == reserved
    else:
        assert refused_field(Slots, total=total, reserved=reserved) == "reserved"


@given(st.integers(1, 1_000))
def test_by_default_one_slot_is_reserved_for_high_when_there_are_four(total: int) -> None:
    assert default_reserved(total) == Reserved(high=0 if total < 4 else 1)
    Slots(total=total, reserved=default_reserved(total))
