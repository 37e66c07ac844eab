"""The clock that tests move by hand, and the machine's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.store.clock import Clock, ManualClock, SystemClock


def test_a_manual_clock_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock(start=500.0)
    assert (clock.now(), clock.now()) == (500.0, 500.0)
    assert clock.monotonic() == clock.monotonic()


@given(st.lists(st.floats(0, 1e6)))
def test_both_readings_pass_the_same_time(steps: list[float]) -> None:
    clock = ManualClock(start=0.0)
    began = clock.monotonic()
    for step in steps:
        clock.advance(step)
    assert clock.now() == pytest.approx(clock.monotonic() - began, abs=1e-3)
    assert clock.now() == pytest.approx(sum(steps))


@pytest.mark.parametrize("seconds", [-1, -1e-9, float("nan"), float("-inf")])
def test_time_does_not_pass_backwards(seconds: float) -> None:
    clock = ManualClock()
    before = (clock.now(), clock.monotonic())
    with pytest.raises(ValueError, match="step_wall"):
        clock.advance(seconds)
    assert (clock.now(), clock.monotonic()) == before


@pytest.mark.parametrize("seconds", [-3_600.0, 3_600.0])
def test_setting_the_wall_clock_leaves_the_monotonic_one_alone(seconds: float) -> None:
    clock = ManualClock()
    now, monotonic, boot = clock.now(), clock.monotonic(), clock.boot()
    clock.step_wall(seconds)
    assert (clock.now(), clock.monotonic(), clock.boot()) == (now + seconds, monotonic, boot)


def test_a_reboot_begins_the_monotonic_clock_anew_under_another_name() -> None:
    clock = ManualClock()
    clock.advance(100)
    now, monotonic = clock.now(), clock.monotonic()
    boots = {clock.boot()}
    for _ in range(3):
        clock.reboot()
        boots.add(clock.boot())
    assert clock.monotonic() < monotonic
    assert clock.now() == now
    assert len(boots) == 4


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()], ids=["system", "manual"])
def test_every_clock_has_the_time_and_its_boot(clock: Clock) -> None:
    assert clock.now() > 1_600_000_000
    assert 0 < clock.monotonic() <= clock.monotonic()
    assert clock.boot()
    assert clock.boot() == clock.boot()


def test_all_processes_of_a_boot_name_it_alike() -> None:
    assert SystemClock().boot() == SystemClock().boot()
