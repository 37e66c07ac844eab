"""Estimates, as pure functions: when a waiting job starts, what starts before it, and when a full queue has room."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.errors import InvalidInput
from fairlane.model.job import JobState
from fairlane.model.reading import (
    EXACT_PLACES,
    CompetingLane,
    Filter,
    Gate,
    JobPosition,
    count_text,
    room_after,
    starts_before,
)
from fairlane.model.slots import FLOOR


def position(
    *,
    gate: Gate = Gate.AHEAD,
    until: float | None = None,
    place: int | None = 1,
    queue_ahead: int = 0,
    servers: int = 4,
    lane_limit: int | None = None,
    service_seconds: float | None = 2.0,
    exact: bool = True,
    likely: int | None = None,
) -> JobPosition:
    return JobPosition(
        id="job",
        now=1_000.0,
        state=JobState.PENDING,
        gate=gate,
        until=until,
        worker=None,
        lane="user",
        queue="default",
        place=place,
        of=10,
        exact=exact,
        likely=likely,
        queue_ahead=queue_ahead,
        servers=servers,
        lane_limit=lane_limit,
        service_seconds=service_seconds,
    )


# -- the start of a job ----------------------------------------------------------------------------


def test_the_servers_share_what_is_ahead() -> None:
    assert position(place=8, queue_ahead=7).eta() == pytest.approx(2.0 * 7.5 / 4)


def test_next_behind_one_server_waits_for_half_a_run() -> None:
    assert position(servers=1).eta() == pytest.approx(1.0)


def test_a_limited_lane_starts_no_faster_than_its_places_become_free() -> None:
    assert position(gate=Gate.LANE, place=6, queue_ahead=5, lane_limit=1).eta() == pytest.approx(2.0 * 5.5)
    assert position(gate=Gate.LANE, place=6, queue_ahead=5, lane_limit=2).eta() == pytest.approx(2.0 * 5.5 / 2)
    assert position(gate=Gate.LANE, place=2, queue_ahead=39, lane_limit=2).eta() == pytest.approx(2.0 * 39.5 / 4)


def test_a_place_that_is_only_a_lower_bound_is_not_what_the_estimate_is_made_of() -> None:
    for likely, told in ((5_001, pytest.approx(2.0 * 5_000.5)), (None, None)):
        deep = position(gate=Gate.LANE, place=EXACT_PLACES + 2, lane_limit=1, exact=False, likely=likely)
        assert deep.eta() == told


def test_an_unfinished_count_is_shown_as_a_lower_bound() -> None:
    assert count_text(1_500, exact=True) == "1500"
    assert count_text(EXACT_PLACES + 1, exact=False) == "more than 1,000"
    assert count_text(7, exact=False) == "about 7"
    assert "more than 1,000 ahead" in position(place=EXACT_PLACES + 2, exact=False).why()


def test_what_nothing_holds_starts_now() -> None:
    assert position(gate=Gate.NONE).eta() == 0.0


def test_a_lane_that_waits_for_a_retry_stands_still_until_then() -> None:
    assert position(gate=Gate.LANE_RETRY, until=1_060.0, place=4, lane_limit=1).eta() == pytest.approx(60 + 3 * 2.0)
    assert position(gate=Gate.LANE_RETRY, until=990.0, place=4, lane_limit=1).eta() == pytest.approx(2.0 * 3.5)


def test_a_lane_with_more_places_goes_on_while_one_of_them_waits_for_a_retry() -> None:
    assert position(gate=Gate.LANE_RETRY, until=1_001.0, place=9, lane_limit=2).eta() == pytest.approx(2.0 * 8.5 / 2)


@pytest.mark.parametrize(
    "unknown",
    [
        position(place=None),
        position(servers=0),
        position(service_seconds=None),
        position(gate=Gate.QUEUE_PAUSED),
        position(gate=Gate.NO_WORKER),
    ],
    ids=["no place", "no servers", "no service time", "paused", "no worker"],
)
def test_what_is_not_known_is_not_estimated(unknown: JobPosition) -> None:
    assert unknown.eta() is None


# -- what starts before it -------------------------------------------------------------------------


def lane(waiting: float, turns: float, limit: int | None = None, lanes: float = 1.0) -> CompetingLane:
    return CompetingLane(waiting=waiting, turns=turns, limit=limit, lanes=lanes)


def test_alone_a_job_waits_for_its_own_lane() -> None:
    assert starts_before(7, [], 4) == 7


def test_a_rival_sends_no_more_than_its_turns_nor_than_it_has() -> None:
    assert starts_before(7, [lane(100, 8), lane(3, 8)], 4) == 7 + 8 + 3


def test_a_lane_can_stand_for_others_like_it() -> None:
    assert starts_before(0, [lane(math.inf, 1, lanes=10.0)], 4) == 10


def test_a_rival_with_a_limit_sends_no_more_than_that_for_each_service_time() -> None:
    # 30 of our own and 10 of the lane's: 40 starts by 4 servers take as long as 10 runs one after another.
    assert starts_before(30, [lane(100, 31, limit=1)], 4) == pytest.approx(40, abs=1)


def test_a_limit_that_the_fair_share_does_not_reach_changes_nothing() -> None:
    free = starts_before(10, [lane(100, 11), lane(100, 11)], 4)
    assert starts_before(10, [lane(100, 11, limit=2), lane(100, 11)], 4) == free


def test_higher_classes_go_first() -> None:
    assert starts_before(2, [], 4, higher=5) == 7


def test_every_class_keeps_its_part_of_the_starts_however_long_the_higher_ones_are() -> None:
    assert starts_before(2, [], 4, higher=1_000_000) == 3 * FLOOR - 1


competing = st.builds(
    lane,
    st.one_of(st.integers(0, 1_000).map(float), st.just(math.inf)),
    st.floats(0, 1_000),
    st.one_of(st.none(), st.integers(0, 20)),
    st.floats(1, 10),
)


@given(st.integers(0, 1_000), st.lists(competing, max_size=10), st.integers(0, 100), st.integers(0, 10_000))
def test_the_estimate_lies_between_the_own_lane_and_everybody(
    own: int, others: list[CompetingLane], servers: int, higher: int
) -> None:
    everybody = own + higher + sum(other.lanes * min(other.waiting, other.turns) for other in others)
    assert own <= starts_before(own, others, servers, higher=higher) <= everybody + 0.5


@given(st.integers(0, 1_000), st.lists(competing, max_size=10), st.integers(1, 100))
def test_one_more_before_it_in_its_lane_never_brings_it_forward(
    own: int, others: list[CompetingLane], servers: int
) -> None:
    assert starts_before(own + 1, others, servers) >= starts_before(own, others, servers)


# -- room for one more -----------------------------------------------------------------------------


def test_a_queue_has_room_as_soon_as_one_of_its_servers_is_done() -> None:
    assert room_after(6.0, 3) == pytest.approx(2.0)


def test_a_lane_has_room_as_soon_as_one_of_its_places_is_free() -> None:
    assert room_after(6.0, 10, limit=2) == pytest.approx(3.0)
    assert room_after(6.0, 1.5, limit=2) == pytest.approx(4.0)


@pytest.mark.parametrize(("seconds", "servers", "limit"), [(None, 3, None), (6.0, 0, None), (6.0, 0, 2), (6.0, 3, 0)])
def test_room_is_not_estimated_without_a_service_time_or_a_server(
    seconds: float | None, servers: float, limit: int | None
) -> None:
    assert room_after(seconds, servers, limit=limit) is None


def test_a_filter_takes_no_word_for_a_state() -> None:
    word: Any = "failed"
    with pytest.raises(InvalidInput, match="state: must be a JobState"):
        Filter(state=word)
