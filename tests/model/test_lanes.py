"""Lanes: which rule applies to a key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.lanes import OPEN_TERMS, LaneTerms, terms
from fairlane.model.settings import LaneRule, QueueSettings

patterns = st.from_regex(r"[ab]{0,3}\*|[ab]{1,3}", fullmatch=True)
rules = st.lists(patterns, unique=True, max_size=8).map(
    # The weight shows which rule applies.
    lambda unique: tuple(LaneRule(pattern=pattern, weight=1.0 + n) for n, pattern in enumerate(unique))
)


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
    # Jobs without a lane share one, to which no rule applies, not even the one for all.
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
    assert found == LaneTerms(limit=0, weight=3.0, ordered=limit == 1, max_pending=9, paused=True, own_limit=limit)
