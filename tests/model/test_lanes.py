"""Lanes: which rule speaks of a key, and which jobs hold the places of a limited lane."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.job import Priority
from fairlane.model.lanes import OPEN_TERMS, LaneTerms, Place, granted, terms, yields
from fairlane.model.settings import LaneRule, QueueSettings

HIGH, NORMAL, LOW = Priority

patterns = st.from_regex(r"[ab]{0,3}\*|[ab]{1,3}", fullmatch=True)
rules = st.lists(patterns, unique=True, max_size=8).map(
    # The weight tells which rule it was.
    lambda unique: tuple(LaneRule(pattern=pattern, weight=1.0 + n) for n, pattern in enumerate(unique))
)


@st.composite
def crowds(draw: st.DrawFn, *, running: bool = True) -> list[Place]:
    """Jobs of one lane, each with its own arrival, in no order."""
    arrivals = draw(st.lists(st.integers(1, 99), unique=True, max_size=10))
    return [Place(draw(st.sampled_from(Priority)), arrival, running and draw(st.booleans())) for arrival in arrivals]


limits = st.integers(0, 6)


def settings(**limit_by_pattern: int) -> QueueSettings:
    return QueueSettings(lanes=tuple(LaneRule(pattern=p, limit=n) for p, n in limit_by_pattern.items()))


@given(rules, st.text("ab", min_size=1, max_size=4))
def test_the_longest_literal_prefix_wins_and_an_exact_key_before_a_prefix_of_its_length(
    given_rules: tuple[LaneRule, ...], key: str
) -> None:
    candidates = [key, *(key[:length] + "*" for length in range(len(key), -1, -1))]
    weights = {rule.pattern: rule.weight for rule in given_rules}
    expected = next((weights[pattern] for pattern in candidates if pattern in weights), 1.0)
    assert terms(QueueSettings(lanes=given_rules), key).weight == expected
    assert terms(QueueSettings(lanes=given_rules[::-1]), key).weight == expected


def test_no_rule_and_no_lane_have_open_terms() -> None:
    only = settings(**{"user:*": 3})
    assert terms(only, "model:flux") is OPEN_TERMS
    assert terms(QueueSettings(), "user:ann") is OPEN_TERMS
    # Jobs without a lane share one, of which no rule speaks, not even the one for all.
    assert terms(settings(**{"*": 3}), None) is OPEN_TERMS
    assert (OPEN_TERMS.limit, OPEN_TERMS.weight, OPEN_TERMS.ordered, OPEN_TERMS.paused) == (None, 1.0, False, False)


@pytest.mark.parametrize(
    ("limit", "ordered", "expected"),
    [
        (1, None, True),
        (2, None, False),
        (None, None, False),
        (1, False, False),
        (2, True, True),
        (None, False, False),
    ],
)
def test_a_lane_is_ordered_by_default_when_its_limit_is_one(
    limit: int | None, ordered: bool | None, expected: bool
) -> None:
    rule = LaneRule(pattern="*", limit=limit, ordered=ordered)
    assert terms(QueueSettings(lanes=(rule,)), "ann").ordered is expected


@pytest.mark.parametrize("limit", [None, 1, 5])
def test_a_paused_lane_has_no_places_and_stays_what_it_is(limit: int | None) -> None:
    rule = LaneRule(pattern="*", limit=limit, weight=3.0, max_pending=9, paused=True)
    found = terms(QueueSettings(lanes=(rule,)), "ann")
    assert found == LaneTerms(limit=0, weight=3.0, ordered=limit == 1, max_pending=9, paused=True)


@given(limits, st.booleans(), crowds())
def test_a_lane_grants_no_more_than_its_limit_unless_more_run_already(
    limit: int, ordered: bool, crowd: list[Place]
) -> None:
    holders = granted(LaneTerms(limit=limit, ordered=ordered), crowd)
    running = [job for job in crowd if job.running]
    assert len(holders) == min(len(crowd), max(limit, len(running)))
    assert set(running) <= set(holders) <= set(crowd)
    assert len(set(holders)) == len(holders)


@given(crowds())
def test_a_lane_without_a_limit_grants_everybody(crowd: list[Place]) -> None:
    assert granted(LaneTerms(), crowd) == crowd


@given(limits, crowds(running=False))
def test_an_ordered_lane_grants_the_first_by_arrival_whatever_their_class(limit: int, crowd: list[Place]) -> None:
    first = sorted(crowd, key=lambda job: job.arrival)[:limit]
    assert granted(LaneTerms(limit=limit, ordered=True), crowd) == first


@given(limits, crowds(running=False))
def test_an_unordered_lane_grants_the_higher_class_first_and_then_by_arrival(limit: int, crowd: list[Place]) -> None:
    first = sorted(crowd, key=lambda job: (job.priority, job.arrival))[:limit]
    assert granted(LaneTerms(limit=limit), crowd) == first


@given(
    st.integers(1, 4),
    st.lists(st.sampled_from(["arrive", "start", "finish"]), max_size=40),
    st.randoms(use_true_random=False),
)
def test_in_an_ordered_lane_nobody_ever_starts_before_an_earlier_arrival(
    limit: int,
    steps: list[str],
    random: Random,
) -> None:
    lane = LaneTerms(limit=limit, ordered=True)
    crowd: list[Place] = []
    arrivals = 0
    started: list[int] = []
    for step in steps:
        if step == "arrive":
            arrivals += 1
            crowd.append(Place(random.choice(list(Priority)), arrivals))
        elif step == "start":
            ready = [job for job in granted(lane, crowd) if not job.running]
            if ready:
                # Any free slot may take any granted job; the one of lowest arrival is asked for first.
                job = min(ready, key=lambda one: one.arrival)
                crowd[crowd.index(job)] = Place(job.priority, job.arrival, running=True)
                started.append(job.arrival)
        else:
            running = [job for job in crowd if job.running]
            if running:
                crowd.remove(random.choice(running))
        assert len([job for job in crowd if job.running]) <= limit
    assert started == sorted(started)


@given(st.integers(1, 6), st.integers(0, 6), st.booleans(), crowds())
def test_lowering_a_limit_takes_grants_from_the_last_in_order_and_never_from_what_runs(
    limit: int, lower: int, ordered: bool, crowd: list[Place]
) -> None:
    before = granted(LaneTerms(limit=limit, ordered=ordered), crowd)
    after = granted(LaneTerms(limit=min(limit, lower), ordered=ordered), crowd)
    assert before[: len(after)] == after
    assert not any(job.running for job in before[len(after) :])


def test_of_one_class_a_lower_limit_takes_back_the_newest_grants() -> None:
    crowd = [Place(NORMAL, arrival) for arrival in (3, 1, 4, 2)]
    for ordered in (True, False):
        kept = granted(LaneTerms(limit=2, ordered=ordered), crowd)
        assert [job.arrival for job in kept] == [1, 2]


@given(st.integers(1, 6), crowds(), st.sampled_from(Priority))
def test_an_arriving_job_takes_the_grant_that_the_order_of_grants_says(
    limit: int, crowd: list[Place], priority: Priority
) -> None:
    lane = LaneTerms(limit=limit)
    holders = granted(lane, crowd)
    if len(holders) < limit:
        return
    newcomer = Place(priority, 100)
    loser = yields(priority, holders)
    after = granted(lane, [*crowd, newcomer])
    if loser is None:
        assert newcomer not in after
        assert set(after) == set(holders)
    else:
        assert set(after) == set(holders) - {loser} | {newcomer}


def test_a_grant_is_taken_from_the_lowest_unstarted_job_and_only_by_a_higher_class() -> None:
    holders = [Place(NORMAL, 1), Place(LOW, 2), Place(LOW, 3), Place(LOW, 4, running=True)]
    assert yields(HIGH, holders) == Place(LOW, 3)
    assert yields(NORMAL, holders) == Place(LOW, 3)
    assert yields(LOW, holders) is None
    assert yields(HIGH, [Place(LOW, 4, running=True)]) is None
    assert yields(HIGH, [Place(HIGH, 1)]) is None
    assert yields(HIGH, []) is None
