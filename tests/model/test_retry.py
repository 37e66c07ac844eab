"""Back-off: its bounds, its jitter, and the rule after a crash."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.job import MOST_RETRIES
from fairlane.model.retry import DEFAULT_BACKOFF, Backoff, counted, may_retry
from tests.model import bad_values as bad
from tests.model.bad_values import refused_field, short

backoffs = st.builds(
    Backoff,
    base=st.floats(0, 1e6),
    factor=st.floats(0.01, 100),
    most=st.floats(0, 1e6),
    jitter=st.booleans(),
)
attempts = st.integers(1, MOST_RETRIES + 1)
draws = st.floats(0, 1, exclude_max=True)


@given(backoffs, attempts, draws)
def test_a_delay_lies_between_nothing_and_the_most(backoff: Backoff, attempt: int, draw: float) -> None:
    assert 0 <= backoff.delay(attempt, draw) <= backoff.most


@given(backoffs, attempts, draws, draws)
def test_jitter_spreads_over_the_whole_delay_and_its_absence_waits_it_out(
    backoff: Backoff, attempt: int, draw: float, other: float
) -> None:
    whole = Backoff(base=backoff.base, factor=backoff.factor, most=backoff.most, jitter=False)
    if backoff.jitter:
        assert backoff.delay(attempt, draw) == whole.delay(attempt, other) * draw
        assert backoff.delay(attempt, 0.0) == 0.0
    else:
        assert backoff.delay(attempt, draw) == backoff.delay(attempt, other)


@given(st.floats(0, 1e6), st.floats(1, 100), st.floats(0, 1e6), st.integers(1, MOST_RETRIES))
def test_later_attempts_never_wait_less(base: float, factor: float, most: float, attempt: int) -> None:
    backoff = Backoff(base=base, factor=factor, most=most, jitter=False)
    assert backoff.delay(attempt, 0.0) <= backoff.delay(attempt + 1, 0.0)


def test_delays_grow_by_the_factor_up_to_the_most() -> None:
    backoff = Backoff(base=1.0, factor=2.0, most=20.0, jitter=False)
    assert [backoff.delay(attempt, 0.0) for attempt in range(1, 8)] == [1, 2, 4, 8, 16, 20, 20]


def test_a_factor_of_one_waits_the_same_time_for_ever() -> None:
    backoff = Backoff(base=7.0, factor=1.0, jitter=False)
    assert {backoff.delay(attempt, 0.0) for attempt in (1, 2, 10, 1_000)} == {7.0}


def test_a_small_factor_still_reaches_a_large_most() -> None:
    backoff = Backoff(base=1.0, factor=1.1, most=86_400.0, jitter=False)
    assert backoff.delay(120, 0.0) == pytest.approx(1.1**119)
    assert backoff.delay(121, 0.0) == 86_400.0


def test_a_power_beyond_all_numbers_waits_the_most_unless_the_base_is_nothing() -> None:
    assert Backoff(base=1.0, factor=100.0, most=50.0, jitter=False).delay(1_001, 0.0) == 50.0
    assert Backoff(base=0.0, factor=100.0, most=50.0, jitter=False).delay(1_001, 0.0) == 0.0


@pytest.mark.parametrize("attempt", [0, -1, 1.5, True, None], ids=short)
def test_attempts_count_from_one(attempt: Any) -> None:
    assert refused_field(DEFAULT_BACKOFF.delay, attempt, 0.5) == "attempt"


@given(backoffs, attempts, draws)
def test_after_the_first_crash_there_is_no_delay_and_after_more_the_usual_one(
    backoff: Backoff, attempt: int, draw: float
) -> None:
    assert backoff.after_crash(attempt, 1, draw) == 0.0
    assert backoff.after_crash(attempt, 2, draw) == backoff.delay(attempt, draw)
    assert backoff.after_crash(attempt, 9, draw) == backoff.delay(attempt, draw)


@given(st.integers(0, 50))
def test_the_budget_is_one_run_more_than_the_retries(retries: int) -> None:
    runs = 1
    while may_retry(runs, retries):
        runs += 1
    assert runs == retries + 1


@pytest.mark.parametrize("value", bad.NOT_DURATIONS, ids=short)
def test_a_base_or_a_most_that_is_no_duration_is_refused(value: Any) -> None:
    assert refused_field(Backoff, base=value) == "backoff.base"
    assert refused_field(Backoff, most=value) == "backoff.most"


@pytest.mark.parametrize("value", bad.NOT_FACTORS, ids=short)
def test_a_factor_out_of_range_is_refused(value: Any) -> None:
    assert refused_field(Backoff, factor=value) == "backoff.factor"


def test_no_run_is_counted_beyond_its_budget() -> None:
    """Celery decides about the retries of its tasks, and the budget of their jobs is for crashes."""
    assert [counted(attempt, 1) for attempt in (1, 2, 3)] == ["1 of 2", "2 of 2", "3"]
