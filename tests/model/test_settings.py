"""Settings of queues and lanes: what is refused, and what counts when an override lies over a declaration."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from fairlane.model.slots import MOST_SLOTS, Reserved, Slots
from tests.model import bad_values as bad
from tests.model.bad_values import refused_field, short

NOT_LIMITS: list[Any] = [value for value in bad.NOT_WHOLE if value is not None] + [0, -1]
NOT_PATTERNS: list[Any] = [*bad.NOT_KEYS, "**", "*:ann", "user:*:x", "a*b*"]


@pytest.mark.parametrize("pattern", NOT_PATTERNS, ids=short)
def test_a_pattern_is_a_key_with_at_most_one_star_at_its_end(pattern: Any) -> None:
    assert refused_field(LaneRule, pattern=pattern) == "lane pattern"


@pytest.mark.parametrize("limit", NOT_LIMITS, ids=short)
def test_a_lane_is_never_limited_to_less_than_one_job(limit: Any) -> None:
    assert refused_field(LaneRule, pattern="*", limit=limit) == "limit"


def test_the_refusal_of_a_limit_of_zero_names_the_way_out() -> None:
    with pytest.raises(ValueError, match="pause the lane"):
        LaneRule(pattern="*", limit=0)
    with pytest.raises(ValueError, match="pause the queue"):
        QueueSettings(limit=0)
    with pytest.raises(ValueError, match="pause the queue"):
        QueueOverride(limit=0)


@pytest.mark.parametrize("weight", bad.NOT_FACTORS, ids=short)
def test_a_weight_out_of_range_is_refused(weight: Any) -> None:
    assert refused_field(LaneRule, pattern="*", weight=weight) == "weight"


def test_an_ordered_lane_needs_a_limit() -> None:
    assert refused_field(LaneRule, pattern="*", ordered=True) == "ordered"
    assert LaneRule(pattern="*", ordered=True, limit=2).ordered


@pytest.mark.parametrize("value", NOT_LIMITS, ids=short)
def test_a_bound_on_waiting_jobs_is_at_least_one(value: Any) -> None:
    assert refused_field(LaneRule, pattern="*", max_pending=value) == "max_pending"
    assert refused_field(QueueSettings, max_pending=value) == "max_pending"
    assert refused_field(QueueOverride, max_pending=value) == "max_pending"


@pytest.mark.parametrize("limit", [*NOT_LIMITS, MOST_SLOTS + 1], ids=short)
def test_a_bad_limit_of_a_queue_is_refused_as_the_limit(limit: Any) -> None:
    assert refused_field(QueueSettings, limit=limit) == "limit"
    assert refused_field(QueueOverride, limit=limit) == "limit"


@given(limit=st.integers(1, 30), high=st.integers(0, 30), normal=st.integers(0, 30))
def test_reservations_must_leave_a_place_of_the_limit_for_low_work(limit: int, high: int, normal: int) -> None:
    reserved = Reserved(high=high, normal=normal)
    if high + normal < limit:
        assert QueueSettings(limit=limit, reserved=reserved).slots == Slots(total=limit, reserved=reserved)
    else:
        assert refused_field(QueueSettings, limit=limit, reserved=reserved) == "reserved"


def test_a_reservation_without_a_limit_is_refused() -> None:
    assert refused_field(QueueSettings, reserved=Reserved(high=1)) == "reserved"
    assert QueueSettings().slots is None


def test_a_pattern_given_twice_is_refused() -> None:
    rules = (LaneRule(pattern="a*"), LaneRule(pattern="a"), LaneRule(pattern="a*", limit=1))
    assert refused_field(QueueSettings, lanes=rules) == "lanes"
    assert refused_field(QueueOverride, lanes=rules) == "lanes"


@pytest.mark.parametrize("key", bad.NOT_KEYS, ids=short)
def test_a_closed_set_holds_keys_only(key: Any) -> None:
    assert refused_field(QueueSettings, closed=("ann", key)) == "closed"


def test_a_closed_set_admits_its_lanes_and_nothing_else() -> None:
    closed = QueueSettings(closed=("ann", "bob"))
    assert closed.admits("ann")
    assert not closed.admits("eve")
    assert not closed.admits(None)
    assert QueueSettings().admits("eve")
    assert QueueSettings().admits(None)


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("*", "", True),
        ("*", "anything", True),
        ("user:*", "user:", True),
        ("user:*", "user:ann", True),
        ("user:*", "user", False),
        ("user:*", "a user:ann", False),
        ("user:ann", "user:ann", True),
        ("user:ann", "user:anna", False),
        ("user:ann", "User:ann", False),
    ],
)
def test_a_pattern_is_a_literal_key_or_a_literal_prefix(pattern: str, key: str, matches: bool) -> None:
    assert LaneRule(pattern=pattern).matches(key) is matches


@pytest.mark.parametrize("queue", bad.NOT_NAMES, ids=short)
def test_a_change_of_a_queue_that_cannot_exist_is_refused(queue: Any) -> None:
    assert refused_field(SettingsChange, queue=queue) == "queue"


@pytest.mark.parametrize("version", [*bad.NOT_WHOLE, -1, 2**53 + 1], ids=short)
def test_a_bad_version_is_refused(version: Any) -> None:
    assert refused_field(SettingsChange, queue="images", version=version) == "version"


DECLARED = QueueSettings(
    limit=8,
    reserved=Reserved(high=2, normal=3),
    max_pending=100,
    lanes=(LaneRule(pattern="user:*", weight=2.0), LaneRule(pattern="*", limit=3)),
    closed=("user:ann",),
)


def test_an_empty_override_changes_nothing() -> None:
    assert QueueOverride().over(DECLARED) == DECLARED


def test_an_override_changes_the_fields_it_names_and_no_others() -> None:
    changed = QueueOverride(paused=True, max_pending=None).over(DECLARED)
    assert (changed.paused, changed.max_pending) == (True, None)
    assert msgspec.structs.replace(changed, paused=False, max_pending=100) == DECLARED


def test_an_override_without_a_limit_ends_the_reservations_of_the_limit() -> None:
    changed = QueueOverride(limit=None).over(DECLARED)
    assert (changed.limit, changed.reserved, changed.slots) == (None, Reserved(), None)


def test_an_overriding_rule_replaces_the_one_of_its_pattern() -> None:
    changed = QueueOverride(lanes=(LaneRule(pattern="*", limit=1),)).over(DECLARED)
    assert {rule.pattern: rule.limit for rule in changed.lanes} == {"*": 1, "user:*": None}


@st.composite
def limited(draw: st.DrawFn) -> QueueSettings:
    limit = draw(st.integers(1, 12))
    high = draw(st.integers(0, limit - 1))
    return QueueSettings(limit=limit, reserved=Reserved(high=high, normal=draw(st.integers(0, limit - 1 - high))))


@given(st.just(QueueSettings()) | limited(), st.none() | st.just(msgspec.UNSET) | st.integers(1, 12))
def test_a_valid_declaration_under_a_valid_override_is_always_valid(declared: QueueSettings, limit: Any) -> None:
    changed = QueueOverride(limit=limit).over(declared)
    assert changed.limit == (declared.limit if limit is msgspec.UNSET else limit)
    assert changed.reserved.high <= declared.reserved.high
    assert changed.reserved.normal <= declared.reserved.normal
    # What still fits is kept, and what is reserved for high goes last.
    if changed.limit is not None and declared.reserved.high + declared.reserved.normal < changed.limit:
        assert changed.reserved == declared.reserved
    if changed.reserved.high < declared.reserved.high:
        assert changed.reserved.normal == 0


@given(
    limit=st.none() | st.just(msgspec.UNSET) | st.integers(1, 9),
    paused=st.just(msgspec.UNSET) | st.booleans(),
)
def test_an_override_comes_back_from_json_as_it_was(limit: Any, paused: Any) -> None:
    override = QueueOverride(limit=limit, paused=paused, lanes=(LaneRule(pattern="a*", limit=2),))
    assert msgspec.json.decode(msgspec.json.encode(override), type=QueueOverride) == override
