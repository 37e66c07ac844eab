"""What a name, a key and a number may be, and that the refusal of anything else names the field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model import names
from tests.model import bad_values as bad
from tests.model.bad_values import refused_field, short


@given(bad.names)
def test_a_name_of_the_small_alphabet_is_taken_as_it_is(name: str) -> None:
    assert names.check_name("queue", name) == name


@pytest.mark.parametrize("value", bad.NOT_NAMES, ids=short)
def test_what_is_no_name_is_refused(value: Any) -> None:
    assert refused_field(names.check_name, "queue", value) == "queue"


def test_a_bad_name_is_refused_again_the_second_time_and_under_the_other_field() -> None:
    assert refused_field(names.check_name, "queue", "two words") == "queue"
    assert refused_field(names.check_name, "task", "two words") == "task"


@given(bad.keys)
def test_a_key_of_printable_text_is_taken_as_it_is(key: str) -> None:
    assert names.check_key("lane", key) == key


@pytest.mark.parametrize("key", ["x" * 200, "ä" * 100, "😀" * 50, " ", "a b", "*", "user:ann"], ids=short)
def test_a_key_of_two_hundred_bytes_is_not_too_long(key: str) -> None:
    assert names.check_key("lane", key) == key


@pytest.mark.parametrize("value", bad.NOT_KEYS, ids=short)
def test_what_is_no_key_is_refused(value: Any) -> None:
    assert refused_field(names.check_key, "lane", value) == "lane"


@given(st.text(st.characters()))
def test_every_text_is_either_a_storable_key_or_refused_by_name(text: str) -> None:
    if text.isprintable() and 1 <= len(text.encode()) <= 200:
        assert names.check_key("lane", text) == text
    else:
        assert refused_field(names.check_key, "lane", text) == "lane"


@given(st.floats(0, names.LONGEST_SECONDS) | st.integers(0, 10 * 365 * 86_400))
def test_a_duration_comes_back_as_seconds(value: float) -> None:
    seconds = names.check_seconds("delay", value)
    assert seconds == value
    assert type(seconds) is float


@pytest.mark.parametrize("value", bad.NOT_DURATIONS, ids=short)
def test_what_is_no_duration_is_refused(value: Any) -> None:
    assert refused_field(names.check_seconds, "delay", value) == "delay"


def test_a_duration_may_have_a_least_value_of_its_own() -> None:
    assert names.check_seconds("lease", 0.05, least=0.05) == 0.05
    assert refused_field(names.check_seconds, "lease", 0.049, least=0.05) == "lease"


@given(st.floats(0, 1e11))
def test_a_moment_comes_back_as_seconds_since_1970(value: float) -> None:
    assert names.check_instant("run_at", value) == value


@pytest.mark.parametrize("value", bad.NOT_INSTANTS, ids=short)
def test_what_is_no_moment_is_refused_milliseconds_above_all(value: Any) -> None:
    assert refused_field(names.check_instant, "run_at", value) == "run_at"


@given(st.floats(names.LOWEST_FACTOR, names.HIGHEST_FACTOR))
def test_a_cost_or_weight_in_range_is_taken(value: float) -> None:
    assert names.check_factor("cost", value) == value


@pytest.mark.parametrize("value", bad.NOT_FACTORS, ids=short)
def test_what_is_no_cost_or_weight_is_refused(value: Any) -> None:
    assert refused_field(names.check_factor, "cost", value) == "cost"


@given(st.integers(-5, 15))
def test_a_count_is_taken_between_its_bounds_and_nowhere_else(value: int) -> None:
    if 1 <= value <= 10:
        assert names.check_count("limit", value, least=1, most=10) == value
    else:
        assert refused_field(names.check_count, "limit", value, least=1, most=10) == "limit"


@pytest.mark.parametrize("value", bad.NOT_WHOLE, ids=short)
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    assert refused_field(names.check_count, "limit", value, least=0) == "limit"


def test_data_is_taken_up_to_its_size_and_not_a_byte_more() -> None:
    assert names.check_size("result", b"x" * 10, 10) == b"x" * 10
    assert refused_field(names.check_size, "result", b"x" * 11, 10) == "result"


@pytest.mark.parametrize(
    "value",
    [None, "text", bytearray(b"x"), memoryview(b"x"), 5],
    ids=["none", "text", "bytearray", "memoryview", "int"],
)
def test_what_is_not_bytes_is_refused_as_data(value: Any) -> None:
    assert refused_field(names.check_size, "result", value, 10) == "result"
